"""A prior from a user's own activation.

    ``f(z) = Psi(u) - (u - z)^2/2``,  ``u = sigma^{-1}(z)``,  ``Psi(u) = int_0^u (t - sigma(t)) dt``

This is ``f = Phi* - z^2/2`` with ``Phi(u) = int_0^u sigma`` (Xie et al. 2021, Theorem 1), in a
form without cancellation. ``Psi`` is tabulated once by Gauss-Lobatto quadrature on cells refined
where ``sigma`` has a kink; ``u`` comes from a search in the table and a bisection with ``sigma``
itself. As the formula for ``f`` is stationary in ``u``, its error is of second order in that of
``u``. Flat pieces of ``sigma`` are jumps of ``sigma^{-1}``: there the subdifferential is the whole
interval. The domain of ``f`` is the range of ``sigma``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from equilibria.problems.priors import Prior, at_least_float32, check_step, interval, step_tensor

_SLACK = 1e-9  # of a slope on the grid: rounding in sigma, not a license
_REACH = 1e8  # the table ends here on both sides
_KINK = 4e-15  # quadrature error that makes a cell split
_BISECTIONS = 60

# Gauss-Lobatto, 7 points on [-1, 1]: with the ends, or a kink next to an end goes unseen.
_CENTER_WEIGHT = 256 / 525
_NODES_AND_WEIGHTS = (
    (math.sqrt(5 / 11 - 2 / 11 * math.sqrt(5 / 3)), (124 + 7 * math.sqrt(15)) / 350),
    (math.sqrt(5 / 11 + 2 / 11 * math.sqrt(5 / 3)), (124 - 7 * math.sqrt(15)) / 350),
    (1.0, 1 / 21),
)

Activation = Callable[[Tensor], Tensor]


class NonMonotoneActivation(ValueError):
    """The activation decreases somewhere, so it is the prox of no convex function."""


class NotNonexpansive(ValueError):
    """The activation has a slope above 1 (or a jump), so it is the prox of no convex function."""


class _Table(NamedTuple):
    """``u`` increasing, ``sigma(u)`` and ``Psi(u)``, float64, each ``[K]``."""

    point: Tensor
    height: Tensor
    area: Tensor


def _quadrature(sigma: Activation, start: Tensor, end: Tensor) -> Tensor:
    """``int_start^end (t - sigma(t)) dt`` per entry, one Gauss-Lobatto panel each."""
    half, middle = 0.5 * (end - start), 0.5 * (end + start)
    total = _CENTER_WEIGHT * (middle - sigma(middle))
    for node, weight in _NODES_AND_WEIGHTS:
        below, above = middle - node * half, middle + node * half
        total = total + weight * ((below - sigma(below)) + (above - sigma(above)))
    return half * total


def _evaluate(activation: Activation, points: Tensor) -> Tensor:
    """``activation(points)``, checked to be elementwise, float64 and finite."""
    heights: object = activation(points)
    made = isinstance(heights, Tensor) and (tuple(heights.shape), heights.dtype)
    if not isinstance(heights, Tensor) or made != (tuple(points.shape), points.dtype):
        raise ValueError(
            f"CustomPrior: activation got a tensor {tuple(points.shape)} of {points.dtype} and "
            f"returned {made or type(heights).__name__}, takes an elementwise function of tensors "
            "that keeps the type"
        )
    return heights.detach()


def _check(points: Tensor, heights: Tensor) -> None:
    """Raise unless ``heights`` is finite, nondecreasing and 1-Lipschitz on the grid."""
    if not bool(heights.isfinite().all()):
        where = float(points[~heights.isfinite()][0])
        raise ValueError(f"CustomPrior: activation is not finite at {where:g}")
    run = points.diff()
    # Rounding of sigma alone moves a slope by this much on a short or far cell.
    noise = 4e-16 * heights.abs().maximum(points.abs())
    slope = heights.diff() / run
    slack = _SLACK + (noise[1:] + noise[:-1]) / run
    for excess, error, word in (
        (-(slope + slack), NonMonotoneActivation, "monotone"),
        (slope - slack - 1.0, NotNonexpansive, "1-Lipschitz"),
    ):
        k = int(excess.argmax())
        if float(excess[k]) > 0.0:
            raise error(
                f"CustomPrior: activation is not {word}: between {float(points[k]):.6g} and "
                f"{float(points[k + 1]):.6g} its slope is {float(slope[k]):.6g}, takes slopes in "
                "[0, 1]"
            )


class CustomPrior(Prior):
    """The prior whose prox is ``activation``: ``f(z) = int (sigma^{-1}(t) - t) dt``.

    ``activation`` is an elementwise function of tensors that keeps the type of its input, monotone
    and 1-Lipschitz: an error says where it is not. It is checked at ``samples`` points of
    ``domain``, and coarsely outside, out to 1e8 or to where it stops being finite; between these
    points it is trusted. ``f`` is ``+inf`` outside the range of the activation.

    ``prox(v)`` is the activation itself, in the type of ``v``; other steps solve
    ``tau u + (1 - tau) sigma(u) = v`` by bisection and Newton in float64. Derivatives are those of
    the solution: up to third order for ``prox``, second for ``value``.
    """

    sampled = True
    shift = 0.0

    def __init__(
        self,
        activation: Activation,
        *,
        domain: tuple[float, float] = (-8.0, 8.0),
        samples: int = 4001,
    ) -> None:
        start, end = float(domain[0]), float(domain[1])
        if not (math.isfinite(start) and math.isfinite(end) and start < end):
            raise ValueError(f"CustomPrior: domain got {domain!r}, takes (start, end), start < end")
        if samples < 3:
            raise ValueError(f"CustomPrior: samples got {samples!r}, takes an integer >= 3")
        self.sigma = activation
        self.domain = (start, end)
        grid = torch.linspace(start, end, samples, dtype=torch.float64)
        heights = _evaluate(activation, grid)
        part = _evaluate(activation, grid[::2])
        if not torch.allclose(part, heights[::2], rtol=1e-12, atol=1e-12, equal_nan=True):
            raise ValueError(
                "CustomPrior: activation is not elementwise: other entries of its input change "
                "its value, takes an elementwise function of tensors"
            )
        _check(grid, heights)
        grid = self._extend(grid)
        heights = _evaluate(activation, grid)
        _check(grid, heights)
        # Outside of the domain too: what is steep there only is steep.
        self._expansion = float((heights.diff() / grid.diff()).clamp(0.0, 1.0).max())
        self._tables = {torch.device("cpu"): self._tabulate(grid)}

    def __repr__(self) -> str:
        name = getattr(self.sigma, "__name__", repr(self.sigma))
        return f"CustomPrior({name}, domain={self.domain})"

    @property
    def expansion(self) -> float:
        """The largest slope met on the grid: a measurement, not a bound (see ``sampled``)."""
        return self._expansion

    def _extend(self, grid: Tensor) -> Tensor:
        """The grid, continued geometrically while the activation stays finite."""
        start, end = self.domain
        reach = max(end - start, 1.0)
        outward = reach * 1.25 ** torch.arange(120, dtype=torch.float64)
        outward = outward[outward < _REACH]
        left, right = (
            points[_evaluate(self.sigma, points).isfinite().long().cumprod(0).bool()]
            for points in (start - outward, end + outward)
        )
        return torch.cat([left.flip(0), grid, right])

    @torch.no_grad()
    def _tabulate(self, grid: Tensor) -> _Table:
        """Cells split until one panel and two halves agree; then cumulative areas."""

        points = torch.cat([grid, grid.new_zeros(1)]).sort().values
        points = points[torch.cat([points.diff() > 0, points.new_ones(1, dtype=torch.bool)])]
        for k in range(49):
            left, right = points[:-1], points[1:]
            middle = 0.5 * (left + right)
            cells = _quadrature(self.sigma, left, middle) + _quadrature(self.sigma, middle, right)
            size = cells.abs() + (right - left) * left.abs().maximum(right.abs())
            rough = (cells - _quadrature(self.sigma, left, right)).abs() > _KINK * size + 1e-18
            rough &= (right - left) > 1e-9
            if k == 48 or not bool(rough.any()):
                break
            points = torch.cat([points, middle[rough]]).sort().values
        origin = int(torch.searchsorted(points, torch.zeros((), dtype=torch.float64)))
        # Outward from 0 on both sides: far cells are large and must not drown the near ones.
        before = -cells[:origin].flip(0).cumsum(0).flip(0)
        area = torch.cat([before, cells.new_zeros(1), cells[origin:].cumsum(0)])
        heights = self.sigma(points).detach().cummax(0).values  # rounding must not spoil the search
        return _Table(points, heights, area)

    def _table(self, device: torch.device) -> _Table:
        if device not in self._tables:
            table = self._tables[torch.device("cpu")]
            self._tables[device] = _Table(*(t.to(device) for t in table))
        return self._tables[device]

    def _slope(self, u: Tensor) -> Tensor:
        """``sigma'(u)``, differentiable."""
        slope: Tensor = torch.func.vjp(self.sigma, u)[1](torch.ones_like(u))[0]
        return slope

    def _inverse(self, z: Tensor, table: _Table, *, right: bool) -> tuple[Tensor, Tensor]:
        """``inf {u: sigma(u) >= z}`` (or ``sup {u: sigma(u) <= z}``) and its table cell."""
        last = table.point.numel() - 1
        found = torch.searchsorted(table.height, z, right=right)
        cell = (found - 1).clamp(0, last - 1)
        low, high = table.point[cell], table.point[cell + 1]
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            height = self.sigma(middle)
            down = height <= z if right else height < z
            low, high = torch.where(down, middle, low), torch.where(down, high, middle)
        u = 0.5 * (low + high)
        # Past the table on a flat end there is no last point: the preimage is unbounded.
        if right:
            return torch.where(found > last, math.inf, u), cell
        return torch.where(found == 0, -math.inf, u), cell

    def _locate(self, z: Tensor) -> tuple[Tensor, Tensor, _Table]:
        """Whether ``z`` is in the domain (in its own type), and ``z`` in float64 moved into it."""
        table = self._table(z.device)
        low, high = table.height[0], table.height[-1]
        inside = (z >= low.to(z.dtype)) & (z <= high.to(z.dtype))
        return inside, torch.where(inside, z.double(), low).clamp(low, high), table

    def value(self, z: Tensor) -> Tensor:
        inside, point, table = self._locate(z)
        target = point.detach()
        u, cell = self._inverse(target, table, right=False)
        other, other_cell = self._inverse(target, table, right=True)
        # At a flat end of sigma one side of the preimage is infinite; at both it is constant.
        cell, u = torch.where(u.isinf(), other_cell, cell), torch.where(u.isinf(), other, u)
        u = torch.where(u.isinf(), table.point[cell], u)
        # One Newton step puts z into the graph of u where sigma is strictly increasing.
        slope = self._slope(u)
        steep = slope > 1e-12
        live = u + torch.where(steep, (point - target) / torch.where(steep, slope, 1.0), 0.0)
        area = table.area[cell] + _quadrature(self.sigma, table.point[cell], live)
        f = area - 0.5 * (live - point) ** 2
        return torch.where(inside, f, math.inf).to(at_least_float32(z).dtype)

    def into_domain(self, z: Tensor) -> Tensor:
        table = self._table(z.device)  # the prox of a short step may lie beyond its ends
        return z.clamp(table.height[0].to(z.dtype), table.height[-1].to(z.dtype))

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        inside, point, table = self._locate(z)
        low, high = table.height[0], table.height[-1]
        # A floating point z stands for the reals that round to it: a flat piece of sigma is met
        # although its height is not a number of this type, and so is a saturated end.
        info = torch.finfo(z.dtype)
        spacing = (0.5 * info.eps * point.abs()).clamp(min=info.tiny).detach()
        down, _ = self._inverse((point.detach() - spacing).clamp(min=low), table, right=False)
        up, _ = self._inverse((point.detach() + spacing).clamp(max=high), table, right=True)
        lower, upper = interval(inside, down - point, up - point)
        kind = at_least_float32(z).dtype
        return lower.to(kind), upper.to(kind)

    def activation(self, v: Tensor) -> Tensor:
        return self.sigma(v)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        tau = check_step(tau)
        if isinstance(tau, float) and tau == 1.0:
            return self.sigma(v)
        wide = v.double()
        step = step_tensor(tau, wide)
        u = self._solve(wide.detach(), step.detach())
        for _ in range(2):
            slope = step + (1.0 - step) * self._slope(u)
            u = u - (step * u + (1.0 - step) * self.sigma(u) - wide) / slope
        return self.sigma(u).to(v.dtype)

    def _solve(self, v: Tensor, tau: Tensor) -> Tensor:
        """The root of ``h(u) = tau u + (1-tau) sigma(u) - v``; ``h'`` is between 1 and ``tau``."""

        def miss(u: Tensor) -> Tensor:
            return tau * u + (1.0 - tau) * self.sigma(u).detach() - v

        off = (1.0 - tau) * (self.sigma(v).detach() - v)
        near, far = v - off, v - off / tau
        low, high = torch.minimum(near, far), torch.maximum(near, far)
        for k in range(2 * _BISECTIONS):
            middle = 0.5 * (low + high)
            if k % 2:  # every other step is Newton's, kept inside the bracket
                slope = tau + (1.0 - tau) * self._slope(middle).detach()
                newton = middle - miss(middle) / slope
                middle = torch.where((newton > low) & (newton < high), newton, middle)
            above = miss(middle) > 0
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return 0.5 * (low + high)
