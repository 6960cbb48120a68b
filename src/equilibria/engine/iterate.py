"""The driver: evaluate, test in blocks, freeze each sample when it is done, compact, report.

Every test reads one small vector from the device; between tests nothing waits. Convergence is
tested at the first step and every ``block`` steps; divergence, NaN and stagnation every ``HEALTH``
steps; and all at the last step. These moments depend on the step count alone, so that a sample's
answer does not depend on its batch mates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .maps import Map
from .result import Result
from .solver import Point, Solver
from .tree import (
    Leaves,
    place_samples,
    sample_norm,
    select_samples,
    where_sample,
    without_graph,
)

HEALTH = 16
"""Steps between two looks at divergence, NaN and stagnation."""

Callback = Callable[[int, Leaves, Tensor], None]
"""Called after each evaluation with (step, leaves of z, residual norms [B])."""


@dataclass
class Iterated:
    """The raw outcome of a solve, on leaves."""

    value: Leaves
    result: Tensor
    steps: Tensor
    residual: Tensor
    relative: Tensor
    evaluations: int
    syncs: int
    counts: dict[Result, int] | None = None
    """How many samples ended in which way, where the host knows it without waiting."""


def iterate(fn: Map, z0: Leaves, solver: Solver, callback: Callback | None = None) -> Iterated:
    """Solve z = T(z) from z0 by ``solver``."""
    if torch.is_autocast_enabled(z0[0].device.type):
        return _run_in_state_dtype(fn, z0, solver, callback)
    if solver.fixed_steps:
        return _run_fixed(fn, z0, solver, callback)
    return _Run(fn, z0, solver, callback).solve()


def _run_in_state_dtype(fn: Map, z0: Leaves, solver: Solver, callback: Callback | None) -> Iterated:
    """Under autocast the map keeps it, but the solver's own algebra stays in the state's dtype."""
    device = z0[0].device.type
    dtype, cache = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    inner = fn.fn

    def cast(z: Any, *args: Any) -> Any:
        with torch.autocast(device, dtype=dtype, cache_enabled=cache):
            return inner(z, *args)

    with torch.autocast(device, enabled=False):
        return iterate(Map(cast, fn.args, fn.spec, z0), z0, solver, callback)


def _norms(point: Point) -> tuple[Tensor, Tensor]:
    return point.residual_norm, sample_norm(without_graph(point.f))


def _relative(residual: Tensor, scale: Tensor) -> Tensor:
    # A residual of zero at T(z) = 0 is exact, not 0/0.
    return residual / scale.clamp_min(torch.finfo(scale.dtype).tiny)


def _hold(point: Point, following: Leaves, limit: Tensor) -> Leaves:
    """Where a graph is recorded, samples that blow up stand still.

    Their codes say what happened; but once their numbers overflow, even a zero gradient into them
    turns into NaN for the weights that they share with the others.
    """
    if not torch.is_grad_enabled():
        return following
    return where_sample(point.residual_norm <= limit, following, point.z)


def _run_fixed(fn: Map, z0: Leaves, solver: Solver, callback: Callback | None) -> Iterated:
    z, state = z0, solver.init(z0)
    for step in range(1, solver.max_steps + 1):
        point = Point(z, fn(z), solver.residual_memory(state))
        if step == 1:
            residual, scale = _norms(point)
            limit = solver.divergence * (residual + scale)
        if callback is not None:
            callback(step, z, point.residual_norm)
        last = state
        following, state = solver.step(point, state)
        z = _hold(point, following, limit)
        if step < solver.max_steps:
            del point, following  # so that the map's own memory does not come on top of theirs
    residual, scale = _norms(point)
    kept = solver.fallback(point, last)
    if kept is not None:
        z, residual, scale = kept
    code = torch.full_like(residual, int(Result.max_steps), dtype=torch.int8)
    exact = 2 * max(torch.finfo(x.dtype).eps for x in z) * scale
    code = torch.where(residual <= exact, int(Result.converged), code)
    code = torch.where(residual > limit, int(Result.diverged), code)
    finite = torch.isfinite(residual) & torch.isfinite(sample_norm(without_graph(z)))
    code = torch.where(finite, code, int(Result.nonfinite)).to(torch.int8)
    z = where_sample(finite, z, z0)
    steps = torch.full_like(code, solver.max_steps, dtype=torch.int32)
    return Iterated(z, code, steps, residual, _relative(residual, scale), solver.max_steps, 0)


def _count(mask: Tensor) -> int:
    """How many are true: the host's read of a test."""
    if mask.device.type == "cpu" and mask.shape[0] <= 128:
        return sum(mask.tolist())  # ten times faster than a kernel, for so few
    return int(torch.count_nonzero(mask))


class _Run:
    """One solve with tolerances: the loop, and what is known of each sample so far."""

    def __init__(self, fn: Map, z0: Leaves, solver: Solver, callback: Callback | None) -> None:
        self.fn = fn
        self.solver = solver
        self.callback = callback
        self.z = z0
        self.rtol = max(solver.relative_tolerance(x.dtype, x.device.type) for x in z0)
        self.block = solver.block_length(z0)
        self.evaluations = 0
        self.syncs = 0
        self.total = self.left = z0[0].shape[0]
        self.rows: Tensor | None = None  # after compaction: where the present rows came from
        self.active: Tensor | None = None  # None: all
        self.out: Iterated | None = None
        self.counts: dict[Result, int] = {}
        self.safe = z0  # the latest iterate known to be finite and bounded
        self.compaction_checked = False

    def solve(self) -> Iterated:
        solver, step, last = self.solver, 0, self.solver.max_steps
        state = solver.init(self.z)
        while True:
            step += 1
            point = Point(self.z, self.fn(self.z), solver.residual_memory(state))
            self.evaluations += 1
            if step == 1:
                self._start(point)
            if self.callback is not None:
                self._report(step, point)
            if step % HEALTH == 0 or step == last:
                state = self._examine(point, state, step, final=step == last)
            elif step % self.block == 0 or step == 1:  # step 1: a warm start may be the answer
                self._test(point, step)
            if self.left == 0:
                assert self.out is not None
                self.out.evaluations, self.out.syncs = self.evaluations, self.syncs
                self.out.counts = self.counts
                return self.out
            following, state = solver.step(point, state)
            self.z = _hold(point, following, self.limit)
            del point, following  # so that the map's own memory does not come on top of theirs
            if solver.compact and self.active is not None and 2 * self.left <= len(self.active):
                state = self._compact(state)

    def _start(self, point: Point) -> None:
        residual, scale = _norms(point)
        self.safe_norms = (residual, scale)
        self.limit = self.solver.divergence * (residual + scale)
        self.best = torch.full_like(residual, float("inf"))
        self.best_step = torch.zeros_like(residual)

    def _passed(self, point: Point) -> tuple[Tensor, Tensor, Tensor]:
        residual, scale = _norms(point)
        # residual − rtol·scale: NaN where either is not finite, so that infinity never passes.
        passed = torch.add(residual, scale, alpha=-self.rtol) <= self.solver.atol
        if self.active is not None:
            passed = passed & self.active
        return passed, residual, scale

    def _test(self, point: Point, step: int) -> None:
        """Which samples have converged? One number is read."""
        passed, residual, scale = self._passed(point)
        self.syncs += 1
        count = _count(passed)
        if count:
            self._record(passed, count, Result.converged, point.z, residual, scale, step)

    def _examine(self, point: Point, state: Any, step: int, *, final: bool) -> Any:
        """Converged, diverged, NaN, stagnated, out of steps? Four numbers are read at once."""
        passed, residual, scale = self._passed(point)
        alive = ~passed if self.active is None else self.active & ~passed
        infinite = alive & ~torch.isfinite(residual + scale)
        diverged = alive & (residual > self.limit) & ~infinite
        improved = residual < 0.99 * self.best
        self.best = torch.where(improved, residual, self.best)
        self.best_step = torch.where(improved, step, self.best_step)
        stuck = alive & ~improved & ~infinite & ~diverged
        ended = stuck & (step - self.best_step >= self.solver.patience)
        masks = [passed, infinite, diverged, ended, stuck]
        self.syncs += 1
        counts = torch.stack(masks).sum(1).tolist()

        blown = {Result.nonfinite: 1, Result.diverged: 2}
        for code, i in blown.items():
            if counts[i]:
                self._record(masks[i], counts[i], code, self.safe, *self.safe_norms, step)
        if counts[0]:
            self._record(passed, counts[0], Result.converged, point.z, residual, scale, step)
        giving_up = counts[3] > 0 or (final and self.left > 0)
        if giving_up:
            z, r, s = point.z, residual, scale
            kept = self.solver.fallback(point, state)
            if kept is not None:
                z, r, s = kept
            if counts[3]:
                self._record(ended, counts[3], Result.stagnated, z, r, s, step)
            if final and self.left:
                rest = ~ended if self.active is None else self.active
                self._record(rest, self.left, Result.max_steps, z, r, s, step)
        self.safe, self.safe_norms = point.z, (residual, scale)
        if counts[4] and self.left:
            state = self.solver.restart(state, stuck)
        return state

    def _record(
        self,
        mask: Tensor,
        count: int,
        code: Result,
        z: Leaves,
        residual: Tensor,
        scale: Tensor,
        step: int,
    ) -> None:
        """Freeze the samples of ``mask``: write down their value and numbers."""
        self.counts[code] = self.counts.get(code, 0) + count
        relative = _relative(residual, scale)
        codes = torch.full_like(residual, int(code), dtype=torch.int8)
        steps = torch.full_like(residual, step, dtype=torch.int32)
        if self.out is None and count == self.left == self.total:
            self.out = Iterated(z, codes, steps, residual, relative, 0, 0)
            self.left = 0
            return
        new = [*z, residual, relative, codes, steps]
        if self.out is None:
            old = new
        else:
            out = self.out
            old = [*out.value, out.residual, out.relative, out.result, out.steps]
            if self.rows is None:
                old = where_sample(mask, new, old)
            else:
                merged = where_sample(mask, new, select_samples(old, self.rows))
                old = place_samples(old, self.rows, merged)
        n = len(z)
        self.out = Iterated(old[:n], old[n + 2], old[n + 3], old[n], old[n + 1], 0, 0)
        self.active = ~mask if self.active is None else self.active & ~mask
        self.left -= count

    def _compact(self, state: Any) -> Any:
        """Keep the rows that are still active. The host reads which they are."""
        assert self.active is not None
        self.syncs += 1
        index = self.active.nonzero()[:, 0]
        part = self.fn.take(index)
        if not self.compaction_checked:
            self.fn.check_take(index, self.z, part)
            self.evaluations += 2
            self.compaction_checked = True
        self.fn = part
        self.rows = index if self.rows is None else self.rows.index_select(0, index)
        self.z = select_samples(self.z, index)
        self.safe = select_samples(self.safe, index)
        norms = [*self.safe_norms, self.limit, self.best, self.best_step]
        first, second, self.limit, self.best, self.best_step = select_samples(norms, index)
        self.safe_norms = (first, second)
        self.active = None
        return self.solver.take(state, index)

    def _report(self, step: int, point: Point) -> None:
        """Tell the callback; rows that were compacted away stand at their final value."""
        assert self.callback is not None
        z, norm = point.z, point.residual_norm
        if self.rows is not None and self.out is not None:
            rows, out = self.rows, self.out
            z = place_samples(out.value, rows, z)
            norm = place_samples([out.residual], rows, [norm])[0]
        self.callback(step, z, norm)
