"""The driver: evaluate, test in blocks, freeze each sample when it is done, compact, report.

Every test reads one small vector from the device; between tests nothing waits. Convergence is
tested at the first step and every ``block`` steps; divergence, NaN and stagnation every ``HEALTH``
steps; and all at the last step. These moments depend on the step count alone, so that a sample's
answer does not depend on its batch mates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .maps import Map, Surrogate
from .result import Result
from .solver import Point, Solver
from .tree import (
    Leaves,
    flatten_state,
    place_samples,
    quick_norm,
    sample_norm,
    scale_samples,
    select_samples,
    strange,
    unflatten,
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

    def cast(inner: Callable[..., Any]) -> Callable[..., Any]:
        def within(z: Any, *args: Any) -> Any:
            with torch.autocast(device, dtype=dtype, cache_enabled=cache):
                return inner(z, *args)

        return within

    with torch.autocast(device, enabled=False):
        return iterate(_wrapped(fn, cast, fn.args, z0), z0, solver, callback)


def _wrapped(
    fn: Map,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    args: tuple[Any, ...],
    z0: Leaves,
) -> Map:
    """The map with its step, and what it is judged by, wrapped."""
    given, count, surrogate = fn.surrogate, len(fn.args), None
    if given is not None:

        def near(*both: Any) -> float | Tensor:
            return given.near(*both[len(both) - count :])

        surrogate = Surrogate(fn.fn, wrap(given.own), near, given.dtype)
    return Map(wrap(fn.fn), args, fn.spec, z0, surrogate)


def _exact_norms(fn: Map, point: Point) -> tuple[Tensor, Tensor]:
    """‖T(z) − z‖ and ‖T(z)‖ of each sample, [B] each, right at any scale."""
    if fn.surrogate is None:
        return point.residual_norm, sample_norm(without_graph(point.f))
    z, image = fn.judged(fn.surrogate, point.z)
    return sample_norm([a - b for a, b in zip(image, z, strict=True)]), sample_norm(image)


def _relative(residual: Tensor, scale: Tensor) -> Tensor:
    # A residual of zero at T(z) = 0 is exact, not 0/0.
    return torch.where(residual == 0, residual, residual / scale)


def _unit(residual: Tensor, scale: Tensor) -> Tensor:
    """2^k near the size of each sample's problem, [B]; 1 where that is ordinary, 0 or not finite.

    The end of the exponents is left out, where 2^k or 2^{−k} would not be a normal number.
    """
    size = torch.maximum(residual, scale)
    end = 1000 if size.dtype == torch.float64 else 100
    unit = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent.clamp(-end, end))
    return torch.where(strange(size) & (size > 0) & torch.isfinite(size), unit, 1.0)


def _in_units(
    fn: Map, z0: Leaves, solver: Solver, callback: Callback | None, unit: Tensor
) -> Iterated:
    """Solve for w = z/unit, in which the solver's products neither underflow nor overflow.

    Units are powers of two: no digit of the answer changes.
    """
    inverse = 1.0 / unit

    def scaled(inner: Callable[..., Any]) -> Callable[..., Any]:
        def within(w: Any, up: Tensor, down: Tensor, *args: Any) -> Any:
            leaves, spec = flatten_state(w, "z")
            out = inner(unflatten(scale_samples(up, leaves), spec), *args)
            flat, spec = flatten_state(out, "T(z)")
            return unflatten(scale_samples(down, flat), spec)

        return within

    def shown(step: int, w: Leaves, residual: Tensor) -> None:
        assert callback is not None
        callback(step, scale_samples(unit, w), residual * unit)

    w0 = scale_samples(inverse, z0)
    run = _Run(
        _wrapped(fn, scaled, (unit, inverse, *fn.args), w0),
        w0,
        solver,
        None if callback is None else shown,
        inverse,
    )
    done = run.solve()
    return replace(done, value=scale_samples(unit, done.value), residual=done.residual * unit)


def _hold(point: Point, following: Leaves, limit: Tensor | None) -> Leaves:
    """Where a graph is recorded, samples that blow up stand still.

    Their codes say what happened; but once their numbers overflow, even a zero gradient into them
    turns into NaN for the weights that they share with the others.
    """
    if limit is None:
        return following
    return where_sample(point.residual_norm <= limit, following, point.z)


def _run_fixed(fn: Map, z0: Leaves, solver: Solver, callback: Callback | None) -> Iterated:
    z, state = z0, solver.init(z0)
    hold, epsilons = None, [torch.finfo(d).eps for d in fn.dtypes(z0)]
    for step in range(1, solver.max_steps + 1):
        point = Point(z, fn(z), solver.residual_memory(state))
        if step == 1:
            residual, scale = _exact_norms(fn, point)
            limit = solver.divergence * (residual + scale)
            if torch.is_grad_enabled():
                hold = _hold_limit(fn, point, solver, limit)
        if callback is not None:
            callback(step, z, _exact_norms(fn, point)[0])
        last = state
        if step == solver.max_steps:  # before the step, which may overwrite the residual
            residual, scale = _exact_norms(fn, point)
            judged = _weighted(fn, point, residual, epsilons)
        following, state = solver.step(point, state)
        z = _hold(point, following, hold)
        if step < solver.max_steps:
            del point, following  # so that the map's own memory does not come on top of theirs
    kept = solver.fallback(point, last)
    if kept is not None:
        z, residual, scale = kept
        judged = residual
    code = torch.full_like(residual, int(Result.max_steps), dtype=torch.int8)
    code = torch.where(judged <= 2 * max(epsilons) * scale, int(Result.converged), code)
    code = torch.where(residual > limit, int(Result.diverged), code)
    finite = torch.isfinite(residual) & torch.isfinite(scale)
    finite = finite & torch.isfinite(sample_norm(without_graph(z)))
    code = torch.where(finite, code, int(Result.nonfinite)).to(torch.int8)
    z = where_sample(finite, z, z0)
    steps = torch.full_like(code, solver.max_steps, dtype=torch.int32)
    return Iterated(z, code, steps, residual, _relative(residual, scale), solver.max_steps, 0)


def _hold_limit(fn: Map, point: Point, solver: Solver, limit: Tensor) -> Tensor:
    """The limit for ‖S(u) − u‖ where S is iterated in place of T; T's own else."""
    if fn.surrogate is None:
        return limit
    return solver.divergence * (point.residual_norm + sample_norm(without_graph(point.f)))


def _weighted(fn: Map, point: Point, residual: Tensor, tolerances: list[float]) -> Tensor:
    """The norm of the residual for the largest of the leaves' tolerances: each leaf counts as much
    more as its own is smaller, so that it is held to its own. [B]."""
    if len(set(tolerances)) == 1 or fn.surrogate is not None:
        return residual
    largest = max(tolerances)
    parts = zip(without_graph(point.residual), tolerances, strict=True)
    return sample_norm([sample_norm([r]) * (largest / tol) for r, tol in parts])


def _counts(first: Tensor, second: Tensor) -> list[int]:
    """How many are true in each: the host's read of a test."""
    both = torch.stack([first, second])
    if both.device.type == "cpu" and both.shape[1] <= 128:
        return [sum(row) for row in both.tolist()]  # faster than a kernel, for so few
    found: list[int] = both.sum(1).tolist()
    return found


class _Run:
    """One solve with tolerances: the loop, and what is known of each sample so far."""

    def __init__(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback | None,
        inverse: Tensor | None = None,
    ) -> None:
        self.fn = fn
        self.solver = solver
        self.callback = callback
        self.z = z0
        device = z0[0].device.type
        self.tolerances = [solver.relative_tolerance(d, device) for d in fn.dtypes(z0)]
        self.rtol = max(self.tolerances)
        self.in_units = inverse is not None
        self.atol: float | Tensor = solver.atol if inverse is None else solver.atol * inverse
        self.block = solver.block_length(z0)
        self.evaluations = 0
        self.syncs = 0
        self.total = self.left = z0[0].shape[0]
        self.rows: Tensor | None = None  # after compaction: where the present rows came from
        self.active: Tensor | None = None  # None: all
        self.out: Iterated | None = None
        self.counts: dict[Result, int] = {}
        self.start = self.safe = z0  # safe: the latest iterate known to be finite and bounded
        self.hold: Tensor | None = None
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
            if step % HEALTH == 0 or step == last:
                state = self._examine(point, state, step, final=step == last)
            elif step == 1:  # a warm start may be the answer
                unit = self._test_start(point)
                if unit is not None:
                    return self._again(unit)
            elif step % self.block == 0:
                self._test(point, step)
            if self.callback is not None:
                self._report(step, point)
            if self.left == 0:
                assert self.out is not None
                self.out.evaluations, self.out.syncs = self.evaluations, self.syncs
                self.out.counts = self.counts
                return self.out
            following, state = solver.step(point, state)
            self.z = _hold(point, following, self.hold)
            del point, following  # so that the map's own memory does not come on top of theirs
            if solver.compact and self.active is not None and 2 * self.left <= len(self.active):
                state = self._compact(state)

    def _start(self, point: Point) -> None:
        residual, scale = _exact_norms(self.fn, point)
        self.safe_norms = (residual, scale)
        self.limit = self.solver.divergence * (residual + scale)
        if torch.is_grad_enabled():
            self.hold = _hold_limit(self.fn, point, self.solver, self.limit)
        self.best = torch.full_like(residual, float("inf"))
        self.best_step = torch.zeros_like(residual)

    def _passed(self, residual: Tensor, scale: Tensor) -> Tensor:
        """residual ≤ atol + rtol·scale, of samples that are still active."""
        passed = torch.add(residual, scale, alpha=-self.rtol) <= self.atol
        return passed if self.active is None else passed & self.active

    def _exactly(
        self, point: Point, norms: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Which samples have converged, ‖T(z) − z‖ and ‖T(z)‖; [B] each."""
        residual, scale = _exact_norms(self.fn, point) if norms is None else norms
        judged = _weighted(self.fn, point, residual, self.tolerances)
        return self._passed(judged, scale) & (scale < torch.inf), residual, scale

    def _test_start(self, point: Point) -> Tensor | None:
        """Is the start the answer? If not: the units to solve in, where they are not all 1."""
        passed, residual, scale = self._exactly(point, self.safe_norms)
        odd = strange(torch.maximum(residual, scale)) & ~passed
        self.syncs += 1
        count, extreme = _counts(passed, odd)
        if extreme and not self.in_units:
            unit = _unit(residual, scale)
            self.syncs += 1
            if bool((unit != 1.0).any()):
                return unit
        if count:
            self._record(passed, count, Result.converged, point.z, residual, scale, 1)
        return None

    def _again(self, unit: Tensor) -> Iterated:
        done = _in_units(self.fn, self.start, self.solver, self.callback, unit)
        done.evaluations, done.syncs = done.evaluations + 1, done.syncs + self.syncs
        return done

    def _test(self, point: Point, step: int) -> None:
        """Which samples have converged? Two numbers are read; an exact test follows where the
        quick one is not enough."""
        residual = quick_norm(without_graph(point.residual))
        scale = quick_norm(without_graph(point.f))
        surrogate = self.fn.surrogate
        slack = None if surrogate is None else surrogate.near(*self.fn.args)
        passed = self._passed(residual if slack is None else residual / slack, scale)
        # Beside an ordinary scale a residual that underflows passes, one that overflows does not.
        odd = strange(scale) if self.active is None else strange(scale) & self.active
        self.syncs += 1
        count, unsure = _counts(passed, odd)
        if unsure or (count and (surrogate is not None or len(set(self.tolerances)) > 1)):
            passed, residual, scale = self._exactly(point)
            self.syncs += 1
            count = int(torch.count_nonzero(passed))
        if count:
            self._record(passed, count, Result.converged, point.z, residual, scale, step)

    def _examine(self, point: Point, state: Any, step: int, *, final: bool) -> Any:
        """Converged, diverged, NaN, stagnated, out of steps? Four numbers are read at once."""
        passed, residual, scale = self._exactly(point)
        alive = ~passed if self.active is None else self.active & ~passed
        infinite = alive & ~(torch.isfinite(residual) & torch.isfinite(scale))
        diverged = alive & (residual > self.limit) & ~infinite
        improved = residual < self.solver.fall * self.best
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
        if z is self.start:
            z = [x.clone() for x in z]  # the answer is not the caller's own memory
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
        if self.hold is not None:
            self.hold = self.hold.index_select(0, index)
        if isinstance(self.atol, Tensor):
            self.atol = self.atol.index_select(0, index)
        self.active = None
        return self.solver.take(state, index)

    def _report(self, step: int, point: Point) -> None:
        """Tell the callback; rows that were compacted away stand at their final value."""
        assert self.callback is not None
        z, norm = point.z, _exact_norms(self.fn, point)[0]
        if self.rows is not None and self.out is not None:
            rows, out = self.rows, self.out
            z = place_samples(out.value, rows, z)
            norm = place_samples([out.residual], rows, [norm])[0]
        self.callback(step, z, norm)
