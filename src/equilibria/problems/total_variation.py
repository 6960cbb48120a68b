"""Total variation of images, whose prox is an inner solve."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.adjoints import Implicit
from equilibria.engine.krylov import CG
from equilibria.engine.options import check_number
from equilibria.entry import fixed_point
from equilibria.problems.joint_priors import GroupSoftThreshold, JointPrior, sizes
from equilibria.problems.objective import LeastSquares
from equilibria.problems.operators import DifferenceOperator
from equilibria.problems.priors import (
    Free,
    Parameter,
    SoftThreshold,
    aligned,
    at_least_float32,
    check_parameter,
    check_step,
)
from equilibria.problems.splitting import ADMM, Composite, Inverse, duality_gap, split
from equilibria.solvers import Picard

_D = DifferenceOperator()
_RTOL = {torch.float64: 1e-8}  # of the answer; 1e-6 in other types


def _cosines(n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors ``[n, n]``, as rows, and eigenvalues of D'D along one dimension."""
    k = torch.arange(n, dtype=torch.float64)
    rows = torch.cos(math.pi / n * torch.outer(k, k + 0.5)) * math.sqrt(2.0 / n)
    rows[0] /= math.sqrt(2.0)
    return rows.to(like), (2.0 - 2.0 * torch.cos(math.pi / n * k)).to(like)


def _inverse(like: Tensor) -> Inverse:
    """``(I + rho D'D)^{-1} rhs``, by the cosine transform."""
    (u, a), (v, b) = (_cosines(n, like) for n in like.shape[-2:])
    squares = a.unsqueeze(1) + b
    return lambda rhs, rho: u.mT @ ((u @ rhs @ v.mT) / (1.0 + rho * squares)) @ v


def _components(flat: Tensor) -> Tensor:
    """A label for each pixel, the same where edges ``flat`` ``[B, 2, ..., H, W]`` connect them."""
    shape = flat[:, 0].shape
    label = torch.arange(math.prod(shape), device=flat.device).reshape(shape)
    while True:  # the least label spreads to the neighbors, then to all that have their label
        before = label
        for edge, dim in zip(flat.unbind(1), (-2, -1), strict=True):
            n = edge.shape[dim] - 1
            pair = torch.minimum(label.narrow(dim, 0, n), label.narrow(dim, 1, n))
            low = torch.where(edge.narrow(dim, 0, n), pair, label.numel())
            none = torch.full_like(label.narrow(dim, 0, 1), label.numel())
            for parts in ([low, none], [none, low]):
                label = torch.minimum(label, torch.cat(parts, dim))
        for _ in range(3):
            label = label.flatten()[label]
        if bool((label == before).all()):
            return label


def _means(t: Tensor, label: Tensor) -> Tensor:
    """The mean over all pixels with the same label, in place of each."""
    index, zero = label.flatten(), torch.zeros_like(t).flatten()
    sums = zero.index_add(0, index, t.flatten())
    counts = zero.detach().index_add(0, index, torch.ones_like(zero))
    return (sums[index] / counts[index]).reshape(t.shape)


def _peak(z: Tensor) -> Tensor:
    """The largest magnitude of each sample, to compare differences with."""
    return z.abs().flatten(1).amax(1).reshape(-1, *[1] * z.ndim)


@dataclass(frozen=True)
class TotalVariation2d(JointPrior):
    """``f(z) = weight sum |(z_{i+1,j} - z_{ij}, z_{i,j+1} - z_{ij})|`` of the last two dimensions.

    The prox is solved by ADMM to the relative tolerance ``rtol`` (None: 1e-8 in float64, 1e-6
    below), differentiable by the implicit function theorem; ``prox_error(v)`` bounds its distance
    from the exact one by the duality gap. ``isotropic=False`` sums absolute values.
    """

    weight: Parameter = 1.0
    isotropic: bool = True
    rtol: float | None = None
    max_steps: int = 2000
    parameters = ("weight",)

    def _check(self) -> None:
        check_parameter(self, "weight", low=0.0)
        check_number(self, "rtol", low=0.0, low_open=True, optional=True)
        check_number(self, "max_steps", low=1, integer=True)

    def _size(self, jumps: Tensor) -> Tensor:
        return sizes(jumps, 1) if self.isotropic else jumps.abs()

    def _weight(self, z: Tensor) -> Tensor:
        """Of each pixel, ``[B or 1, 1, ...]``: beside the dimension of the differences."""
        if z.ndim < 3:
            raise ValueError(f"TotalVariation2d takes images [B, ..., H, W], got {tuple(z.shape)}")
        given = aligned(self, "weight", z)
        dtype = given.dtype if isinstance(given, Tensor) else at_least_float32(z).dtype
        held = torch.as_tensor(given, dtype=dtype, device=z.device)
        return held.reshape(held.shape or [1] * z.ndim).unsqueeze(1)

    def value(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        return (self._weight(wide) * self._size(_D(wide))).flatten(1).sum(1).to(wide.dtype)

    def _solve(self, v: Tensor, weight: Tensor) -> tuple[Composite, Tensor, Tensor]:
        """The problem of ``prox``, its solution, and the dual."""
        rtol = _RTOL.get(v.dtype, 1e-6) if self.rtol is None else self.rtol
        # In float32 the residual falls to 1e-5 and no further.
        kind = v.dtype if v.device.type == "mps" else torch.float64
        v, weight = v.to(kind), weight.to(kind)
        fixed, held = v.detach(), weight.detach()
        norm = GroupSoftThreshold(held, dim=1) if self.isotropic else SoftThreshold(held)
        problem = Composite(Free(), [(norm, _D)], LeastSquares(None, fixed), inverse=_inverse(v))
        # Of the size of a subgradient over that of a jump; it changes the speed, not the answer.
        scale = self._size(_D(fixed)).flatten(1).mean(1) / (16.0 * held.mean())
        scale = scale[scale.isfinite() & (scale > 0)]
        rho = 1.0 / float(scale.median()) if len(scale) else 1.0
        way = ADMM(rho=min(max(rho, 1e-3), 1e3), rtol=rtol, max_steps=self.max_steps)
        with torch.no_grad():
            y = split(problem, fixed, solver=way)[1]
            z = fixed - problem.pull(y, fixed)
            size = self._size(_D(z))
            flat = (self._size(norm.prox(_D(z) + y[0])) == 0) | (size <= 10.0 * rtol * _peak(z))
            label = _components(flat.expand_as(y[0]))
            z = _means(z, label)
        return problem, self._attached(z, v, weight, label), y[0]

    def _attached(self, z: Tensor, v: Tensor, weight: Tensor, label: Tensor) -> Tensor:
        """``z`` with its derivatives, from ``z = P(v - D'(weight n))``: P takes the means of flat
        parts, n is the direction of the jumps between them."""

        def image(at: Tensor, given: Tensor, level: Tensor) -> Tensor:
            jumps = _D(_means(at, label))
            size = self._size(jumps)
            real = size > 0
            slope = jumps / torch.where(real, size, 1.0) if self.isotropic else jumps.sign()
            return _means(given - _D.adjoint(torch.where(real, level * slope, 0.0)), label)

        with torch.no_grad():
            shift = z - image(z, v, weight)  # what the inner solve left
        value: Tensor = fixed_point(
            lambda at, *given: image(at, *given) + shift,
            z,
            (v, weight),
            solver=Picard(max_steps=1, rtol=0.0, atol=0.0),
            adjoint=Implicit(solver=CG(max_steps=1000)),
        ).value
        return value

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return self._solve(v, self._scaled(v, tau))[1].to(v.dtype)

    def _scaled(self, v: Tensor, tau: float | Tensor) -> Tensor:
        tau, weight = check_step(tau), self._weight(v)
        return weight * (tau.reshape(-1, *[1] * v.ndim) if isinstance(tau, Tensor) else tau)

    @torch.no_grad()
    def prox_error(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        """``|prox(v, tau) - exact| <= sqrt(gap)``, ``[B]``, with the rounding to the type of v."""
        problem, z, y = self._solve(v, self._scaled(v, tau))
        rest, gap = duality_gap(problem, z, [y])
        rounded: Tensor = (z - z.to(v.dtype).to(z.dtype)).flatten(1).norm(dim=1)
        return rounded + 0.5 * (rest + (rest * rest + 4.0 * gap).sqrt())

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        """``-prox_h(-g)``, ``h`` the directional derivative; jumps of the size of rounding count as
        flat."""
        wide, weight = at_least_float32(z), self._weight(z)
        jumps = _D(wide)
        size = self._size(jumps)
        flat = size <= 64.0 * torch.finfo(wide.dtype).eps * _peak(wide)
        slope = torch.where(flat, 0.0, weight * (jumps / torch.where(flat, 1.0, size)))
        pull = -g - _D.adjoint(slope.to(wide.dtype))
        return -self._solve(pull, torch.where(flat, weight, 0.0))[1].to(wide.dtype)
