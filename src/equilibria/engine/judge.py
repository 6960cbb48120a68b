"""When a sample has converged."""

from __future__ import annotations

import torch
from torch import Tensor

from .maps import Map
from .solver import Point, Solver
from .tree import (
    ORDINARY,
    Leaves,
    part_samples,
    read_freely,
    repeat_samples,
    sample_norm,
    strange,
    subtract,
    without_graph,
)

HEALTH = 16
"""Steps between two looks at divergence, NaN and stagnation."""


def judged_leaves(fn: Map, point: Point) -> tuple[Leaves, Leaves]:
    """The leaves of T(z) − z and of T(z), of the map that is meant."""
    if fn.surrogate is None:
        return without_graph(point.residual), without_graph(point.f)
    z, image = fn.judged(fn.surrogate, point.z)
    return subtract(image, z), image


def judged_norms(fn: Map, point: Point) -> tuple[Tensor, Tensor]:
    """‖T(z) − z‖ and ‖T(z)‖ of each sample, [B] each, right at any scale."""
    if fn.surrogate is None:
        return point.residual_norm, sample_norm(without_graph(point.f))
    residual, image = judged_leaves(fn, point)
    return sample_norm(residual), sample_norm(image)


def relative_norm(residual: Tensor, scale: Tensor) -> Tensor:
    # A residual of zero at T(z) = 0 is exact, not 0/0.
    return torch.where(residual == 0, residual, residual / scale)


def _weighted(leaves: Leaves, norm: Tensor, tolerances: list[float]) -> Tensor:
    """The norm of a residual for the largest of the leaves' tolerances: each leaf counts as much
    more as its own is smaller, so that it is held to its own. [B]."""
    if len(set(tolerances)) == 1 or len(leaves) != len(tolerances):
        return norm
    largest = max(tolerances)
    parts = zip(without_graph(leaves), tolerances, strict=True)
    return sample_norm([sample_norm([r]) * (largest / tol) for r, tol in parts])


class Judge:
    """When a sample has converged: ‖T(z) − z‖ ≤ atol + rtol·‖T(z)‖ of the map T that is meant.

    After ``patience`` steps the residual must also lie below its ``peak``, the largest one at the
    start and at each look: where z only runs away from it, as in T(z) = z + 1, the scale grows.
    ``size`` coupled samples may be joined to one (0: none are), which passes when all of them do.
    """

    def __init__(
        self, fn: Map, z0: Leaves, solver: Solver, inverse_unit: Tensor | None, size: int
    ) -> None:
        device = z0[0].device.type
        self.fn, self.size, self.patience = fn, size, solver.patience
        self.tolerances = [solver.relative_tolerance(d, device) for d in fn.dtypes(z0)]
        self.quick_decides = fn.surrogate is None and len(set(self.tolerances)) == 1
        self.rtol = max(self.tolerances)
        self.eps = max(torch.finfo(x.dtype).eps for x in z0)
        self.atol: float | Tensor = float(solver.atol)
        if inverse_unit is not None:
            self.atol = solver.atol * (repeat_samples(inverse_unit, size) if size else inverse_unit)

    def passes(self, point: Point, residual: Tensor, scale: Tensor) -> Tensor:
        """Which samples have converged, [B], by these norms of the point."""
        if self.size:
            off, image = (part_samples(x) for x in judged_leaves(self.fn, point))
            norm = _weighted(off, sample_norm(off), self.tolerances)
            passed = self._within(norm, sample_norm(image))
            together: Tensor = passed.unflatten(0, (-1, self.size)).all(1)
            return together
        if self.fn.surrogate is None:
            residual = _weighted(point.residual, residual, self.tolerances)
        return self._within(residual, scale)

    def fell(self, residual: Tensor, peak: Tensor) -> Tensor:
        """Which samples, [B], would not pass by the growth of their scale alone."""
        return (residual < 0.99 * peak) | (residual == 0)

    def clearly_passing(
        self, residual: Tensor, scale: Tensor, active: Tensor | None
    ) -> list[bool] | None:
        """Which active samples pass by these quick norms, where that is clear of each of them and
        none of the others fails; else None.

        Where the host may read, it knows that sooner than ``quick``, which decides what is close.
        """
        decides = self.quick_decides and not self.size and isinstance(self.atol, float)
        if not (decides and read_freely(scale)):
            return None
        low, high = ORDINARY[scale.dtype]
        runs = [True] * len(scale) if active is None else active.tolist()
        passes = []
        for r, s, running in zip(residual.tolist(), scale.tolist(), runs, strict=True):
            allowed = self.atol + self.rtol * s
            sure = r < 0.999 * allowed or r > 1.001 * allowed if running else r <= allowed
            if not (sure and low <= s and max(r, s) <= high):
                return None
            passes.append(running and r < allowed)
        return passes

    def quick(self, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(passes, unsure), [B] each, by quick norms, which are wrong at extreme scales.

        Of a surrogate they are norms of its own, and passing says only that T's may be asked.
        """
        surrogate = self.fn.surrogate
        own = residual if surrogate is None else residual / surrogate.near(*self.fn.args)
        # Beside an ordinary scale a residual that underflows passes, one that overflows not.
        return self._within(own, scale), strange(scale)

    def fails_now(self, residual: Tensor, scale: Tensor) -> Tensor:
        """Which samples, [B], fail by more than a map that does not round the same way twice."""
        allowed = self.rtol * scale + self.atol
        slack = 4 * self.eps * scale
        return (residual > allowed + slack) & torch.isfinite(residual)

    def _within(self, residual: Tensor, scale: Tensor) -> Tensor:
        """residual ≤ atol + rtol·scale; an infinite scale never passes."""
        # residual − rtol·scale: NaN where either is NaN, or where both are infinite.
        passed = torch.add(residual, scale, alpha=-self.rtol) <= self.atol
        return passed & (scale < torch.inf)
