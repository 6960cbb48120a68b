"""The driver: evaluate, test in blocks, freeze each sample when it is done, compact, report.

Every test reads one small vector from the device; between tests nothing waits. Convergence is
tested at the first step and every ``block`` steps; divergence, NaN and stagnation every ``HEALTH``
steps; and all at the last step. These moments depend on the step count alone, so that a sample's
answer does not depend on the others of its batch.

A sample that is done stands still, and each later test looks at it again, at no cost: T(z) was
evaluated at its final value. If its residual has grown, the map couples samples. From there on, or
from the start where coupling was declared, the batch is one sample to the solver, done when every
sample passes its test at the same z. Where steps are differentiated, and in a solve that takes
long, one evaluation asks for coupling (``Map.couples``).

A problem so small or large that products under- or overflow is solved for w = z/unit. Units are
powers of two, one per sample: no digit of the answer changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .judge import HEALTH, Judge, judged_norms, relative_norm
from .looped import run_looped
from .maps import Map
from .result import Iterated, Result
from .solver import Point, Reached, Solver
from .tree import (
    Leaves,
    flatten_state,
    join_samples,
    part_samples,
    place_samples,
    power_of_two,
    quick_norm,
    repeat_samples,
    sample_norm,
    scale_samples,
    select_samples,
    strange,
    subtract,
    take_samples,
    unflatten,
    where_sample,
    without_graph,
)

R = TypeVar("R")

Callback = Callable[[int, Leaves, Tensor], None] | None
"""Called after each evaluation with (step, leaves of z, residual norms [B]); or nothing is."""


def iterate(fn: Map, z0: Leaves, solver: Solver, callback: Callback = None) -> Iterated:
    """Solve z = T(z) from z0 by ``solver``."""
    if torch.is_autocast_enabled(z0[0].device.type):
        return in_state_dtype(fn, z0, lambda cast: iterate(cast, z0, solver, callback))
    if not solver.fixed_steps:
        compiled = solver.while_loop and torch.compiler.is_compiling()
        if compiled or torch.compiler.is_exporting():
            return run_looped(fn, z0, solver)
        return _Run(fn, z0, solver, callback).solve()
    if not (fn.coupled and solver.joins):
        return _run_fixed(fn, z0, solver, callback)
    size = fn.group
    done = _run_fixed(fn.joined(), join_samples(z0, size), solver, _each(callback, size))
    return done.spread(size)


def in_state_dtype(fn: Map, z0: Leaves, run: Callable[[Map], R]) -> R:
    """Under autocast the map keeps it, but the solver's own algebra stays in the state's dtype."""
    device = z0[0].device.type
    dtype, cache = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()

    def cast(inner: Callable[..., Any], z: Any, *args: Any) -> Any:
        with torch.autocast(device, dtype=dtype, cache_enabled=cache):
            return inner(z, *args)

    with torch.autocast(device, enabled=False):
        return run(fn.wrapped(cast))


def shown(
    callback: Callback, change: Callable[[Leaves, Tensor], tuple[Leaves, Tensor]]
) -> Callback:
    """The callback of a solve in other terms, given what ``change`` makes of z and the norms."""
    return None if callback is None else lambda step, z, norm: callback(step, *change(z, norm))


def _each(callback: Callback, size: int) -> Callback:
    """The callback of a solve whose samples are joined; each gets the norm of its group."""
    return shown(callback, lambda z, norm: (part_samples(z), repeat_samples(norm, size)))


def _map_in_units(fn: Map, unit: Tensor) -> Map:
    """w ↦ T(unit·w)/unit."""

    def scaled(inner: Callable[..., Any], w: Any, up: Tensor, down: Tensor, *args: Any) -> Any:
        leaves, spec = flatten_state(w, "z")
        out = inner(unflatten(scale_samples(up, leaves), spec), *args)
        flat, spec = flatten_state(out, "T(z)")
        return unflatten(scale_samples(down, flat), spec)

    return fn.wrapped(scaled, (unit, 1.0 / unit, *fn.args))


def _own_norms(fn: Map, kept: Reached) -> Reached:
    """An iterate that a solver kept, with the norms of T where it knows those of a surrogate."""
    z = kept[0]
    return kept if fn.surrogate is None else (z, *judged_norms(fn, Point(z, z)))


def _hold(point: Point, following: Leaves, limit: Tensor | None) -> Leaves:
    """Where a graph is recorded, samples that blow up stand still: once their numbers overflow,
    even a zero gradient into them is NaN for the weights that they share with the others."""
    if limit is None:
        return following
    return where_sample(point.residual_norm <= limit, following, point.z)


def _hold_limit(fn: Map, point: Point, solver: Solver, limit: Tensor) -> Tensor:
    """The limit for ‖S(u) − u‖ where S is iterated in place of T; T's own else."""
    if fn.surrogate is None:
        return limit
    return solver.divergence * (point.residual_norm + sample_norm(without_graph(point.f)))


def _run_fixed(fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
    z, state = z0, solver.init(z0)
    hold = None
    for step in range(1, solver.max_steps + 1):
        point = Point(z, fn(z), solver.residual_memory(state))
        if step == 1:
            residual, scale = judged_norms(fn, point)
            limit = solver.divergence * (residual + scale)
            if torch.is_grad_enabled():
                hold = _hold_limit(fn, point, solver, limit)
        if callback is not None:
            callback(step, z, judged_norms(fn, point)[0])
        last = state
        if step == solver.max_steps:  # before the step, which may overwrite the residual
            residual, scale = judged_norms(fn, point)
        following, state = solver.step(point, state)
        z = _hold(point, following, hold)
        if step < solver.max_steps:
            del point, following  # so that the map's own memory does not come on top of theirs
    met_nan = ~(torch.isfinite(residual) & torch.isfinite(scale))
    kept = solver.fallback(point, last)
    if kept is not None:
        z, residual, scale = _own_norms(fn, kept)
    code = torch.full_like(residual, int(Result.fixed_steps), dtype=torch.int8)
    code = torch.where(residual > limit, int(Result.diverged), code)
    finite = torch.isfinite(residual) & torch.isfinite(scale)
    finite = finite & torch.isfinite(sample_norm(without_graph(z)))
    code = torch.where(finite & ~met_nan, code, int(Result.nonfinite)).to(torch.int8)
    z = where_sample(finite, z, z0)
    steps = torch.full_like(code, solver.max_steps, dtype=torch.int32)
    return Iterated(z, code, steps, residual, relative_norm(residual, scale), solver.max_steps, 0)


def _count(masks: list[Tensor]) -> list[int]:
    """How many are true in each: the host's read of a test."""
    stacked = masks[0].unsqueeze(0) if len(masks) == 1 else torch.stack(masks)
    if stacked.device.type == "cpu" and stacked.shape[1] <= 128:
        return [sum(row) for row in stacked.tolist()]  # faster than a kernel, for so few
    found: list[int] = stacked.sum(1).tolist()
    return found


class _Run:
    """One solve with tolerances: the loop, and what is known of each sample so far."""

    def __init__(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback,
        inverse_unit: Tensor | None = None,
        size: int = 0,
    ) -> None:
        self.fn, self.solver, self.callback = fn, solver, callback
        self.judge = Judge(fn, z0, solver, inverse_unit, size)
        self.in_units = inverse_unit is not None
        self.block = solver.block_length(z0)
        self.evaluations = self.syncs = 0
        self.start = self.frozen = z0  # as it was given; the values of samples that are done
        self.rows: Tensor | None = None  # after compaction: where the present rows came from
        self.compaction_checked = False
        self.hold: Tensor | None = None
        self.coupled, self.asked = fn.coupled, False  # asked: whether coupling was looked for
        self._begin(z0)
        if fn.coupled and solver.joins and not size:
            self._join(z0)

    def _begin(self, z: Leaves) -> None:
        """Nothing is known of any sample."""
        self.z = self.origin = z
        self.left = z[0].shape[0]
        self.active: Tensor | None = None  # None: all
        self.settled: Tensor | None = None  # samples that are done because they passed; None: none
        self.out: Leaves = []  # of samples that are done: value, residual, relative, code, steps
        self.counts: dict[Result, int] = {}
        self.first, self.found_coupled = True, False

    def _join(self, z: Leaves) -> None:
        """Go on from z with each group of coupled samples as one sample."""
        size = self.fn.group
        self.fn, self.callback = self.fn.joined(), _each(self.callback, size)
        self.judge.fn, self.judge.size = self.fn, size
        self._begin(join_samples(z, size))

    def solve(self) -> Iterated:
        solver, step, last = self.solver, 0, self.solver.max_steps
        state = solver.init(self.z)
        while True:
            step += 1
            point = Point(self.z, self.fn(self.z), solver.residual_memory(state))
            self.evaluations += 1
            if self.first:
                self._start(point, step)
            elif step == 2 and torch.is_grad_enabled() and solver.joins:
                self._ask(point)  # not at the start: at z = 0 much of a coupling vanishes
            if step % HEALTH == 0 or step == last:
                state = self._examine(point, state, step, final=step == last)
            elif step == 1:  # a warm start may be the answer
                unit = self._test_start(point)
                if unit is not None:
                    return self._again(unit)
            elif step % self.block == 0:
                self._test(point, state, step)
            if self.callback is not None:
                self._report(step, point)
            if self.left == 0:
                return self._outcome()
            if self.found_coupled and solver.joins and self.rows is None:
                self._join(self._onset(point))
                state = solver.init(self.z)
                continue
            self.z, state = self._advance(point, state)
            del point  # so that the map's own memory does not come on top of it
            few = self.active is not None and 2 * self.left <= len(self.active)
            if solver.compact and few and not self.coupled:
                state = self._compact(state)

    def _advance(self, point: Point, state: Any) -> tuple[Leaves, Any]:
        """One step of the solver for the samples that are not done."""
        if self.active is not None and torch.is_grad_enabled():
            # Steps that are not taken must not be differentiated: 0 times infinity is NaN.
            point = Point(point.z, where_sample(self.active, point.f, point.z))
        following, state = self.solver.step(point, state)
        following = _hold(point, following, self.hold)
        if self.active is not None:
            following = where_sample(self.active, following, self.frozen)
        return following, state

    def _ask(self, point: Point) -> None:
        """Look for coupling, once a solve."""
        if self.asked or self.coupled or self.rows is not None:
            return
        before, self.asked = self.fn.evaluations, True
        self.coupled = self.found_coupled = self.fn.couples(point.z, point.f)
        self.evaluations += self.fn.evaluations - before
        self.syncs += self.fn.evaluations - before

    def _onset(self, point: Point) -> Leaves:
        """Where the joined solve starts. Steps of samples apart from each other are not to be
        differentiated where they are coupled: small differences of theirs grow."""
        if torch.is_grad_enabled():
            return self.start
        return point.z if self.active is None else where_sample(self.active, point.z, self.frozen)

    def _start(self, point: Point, step: int) -> None:
        self.first = False
        residual, scale = judged_norms(self.fn, point)
        self.safe = point.z, residual, scale  # the latest iterate known to be bounded
        self.limit = self.solver.divergence * (residual + scale)
        if torch.is_grad_enabled():
            self.hold = _hold_limit(self.fn, point, self.solver, self.limit)
        self.peak, self.best = residual, torch.full_like(residual, float("inf"))
        self.best_step = torch.full_like(residual, step - 1)

    def _still_active(self, mask: Tensor) -> Tensor:
        return mask if self.active is None else mask & self.active

    def _fallen(self, passed: Tensor, residual: Tensor, step: int) -> Tensor:
        """Without the samples that pass by their growth alone."""
        late = step > self.judge.patience
        return passed & self.judge.fell(residual, self.peak) if late else passed

    def _believed(self, passed: Tensor, point: Point, state: Any) -> Tensor:
        """Without the samples that the solver doubts."""
        doubts = self.solver.doubts(point, state)
        return passed if doubts is None else passed & ~doubts

    def _test_start(self, point: Point) -> Tensor | None:
        """Is the start the answer? If not: the units to solve in, where they are not all 1."""
        _, residual, scale = self.safe
        self.syncs += 1
        clear = self.judge.clearly_passing(residual, scale, None)
        if clear is not None and not any(clear):
            return None
        passed = self.judge.passes(point, residual, scale)
        size = torch.maximum(residual, scale)
        odd = strange(size) & ~passed
        count, extreme = _count([passed, odd])
        if extreme and not self.in_units:
            unit = torch.where(strange(size), power_of_two(size), 1.0)
            self.syncs += 1
            if bool((unit != 1.0).any()):
                return unit
        if count:
            self._record(passed, count, Result.converged, self.safe, 1)
        return None

    def _again(self, unit: Tensor) -> Iterated:
        """The whole solve in other units."""
        size, inverse = self.judge.size, 1.0 / unit
        watch = shown(self.callback, lambda w, norm: (scale_samples(unit, w), norm * unit))
        fn, w0 = _map_in_units(self.fn, unit), scale_samples(inverse, self.origin)
        done = _Run(fn, w0, self.solver, watch, inverse, size).solve()
        each = repeat_samples(unit, size) if size else unit  # the outcome is of samples again
        return replace(
            done,
            value=scale_samples(each, done.value),
            residual=done.residual * each,
            evaluations=done.evaluations + self.evaluations,
            syncs=done.syncs + self.syncs,
        )

    def _lost(self, residual: Tensor, scale: Tensor) -> list[Tensor]:
        """[samples that had passed and, at the same z, do so no more], or nothing to ask."""
        if self.settled is None or self.judge.size:
            return []
        return [self.settled & self.judge.fails_now(residual, scale)]

    def _reopen(self, lost: Tensor, count: int) -> None:
        """Samples that had passed go on: the map couples them to others that moved."""
        assert self.active is not None
        assert self.settled is not None
        self.coupled = self.found_coupled = True
        self.active, self.settled = self.active | lost, self.settled & ~lost
        self.left += count
        self.counts[Result.converged] -= count
        if not self.counts[Result.converged]:
            del self.counts[Result.converged]

    def _test(self, point: Point, state: Any, step: int) -> None:
        """Which samples have converged? An exact test follows where the quick one is not enough."""
        exact = bool(self.judge.size)
        if not exact:
            residual, scale = point.quick_norm, quick_norm(without_graph(point.f))
            clear = self.judge.clearly_passing(residual, scale, self.active)
            self.syncs += 1
            if clear is None:
                passed, odd = self.judge.quick(residual, scale)
                lost = self._lost(residual, scale) if self.fn.surrogate is None else []
                others = [self._still_active(odd), *lost]
            elif any(clear):
                passed, lost, others = torch.tensor(clear, device=scale.device), [], []
            else:
                return
            passed = self._fallen(passed, residual, step) if self.judge.quick_decides else passed
            passed = self._believed(self._still_active(passed), point, state)
            count, *found = _count([passed, *others])
            exact = any(found[:1]) or (count > 0 and not self.judge.quick_decides)
            regained = found[1:]
        if exact:
            residual, scale = judged_norms(self.fn, point)
            passed = self._still_active(self.judge.passes(point, residual, scale))
            passed = self._believed(self._fallen(passed, residual, step), point, state)
            lost = self._lost(residual, scale)
            self.syncs += 1
            count, *regained = _count([passed, *lost])
        if regained and regained[0]:
            self._reopen(lost[0], regained[0])
        if count:
            self._record(passed, count, Result.converged, (point.z, residual, scale), step)

    def _examine(self, point: Point, state: Any, step: int, *, final: bool) -> Any:
        """Converged, diverged, NaN, stagnated, out of steps? Four numbers are read at once."""
        residual, scale = judged_norms(self.fn, point)
        passed = self._still_active(self.judge.passes(point, residual, scale))
        self.peak = torch.fmax(self.peak, residual)
        passed = self._believed(self._fallen(passed, residual, step), point, state)
        alive = self._still_active(~passed)
        infinite = alive & ~(torch.isfinite(residual) & torch.isfinite(scale))
        diverged = alive & (residual > self.limit) & ~infinite
        alive = alive & ~infinite & ~diverged
        stuck = alive & (residual >= self.solver.fall * self.best)
        ended = alive & self._stagnates(point, residual, step)
        lost = self._lost(residual, scale)
        masks = [passed, infinite, diverged, ended, stuck, *lost]
        self.syncs += 1
        counts = _count(masks)
        if lost and counts[5]:
            self._reopen(lost[0], counts[5])

        for code, i in ((Result.nonfinite, 1), (Result.diverged, 2)):
            if counts[i]:
                self._record(masks[i], counts[i], code, self.safe, step)
        here = point.z, residual, scale
        if counts[0]:
            self._record(passed, counts[0], Result.converged, here, step)
        if counts[3] or (final and self.left):
            best = self._fallback(point, state) or here
            if counts[3]:
                self._record(ended, counts[3], Result.stagnated, best, step)
            if final and self.left:
                rest = ~ended if self.active is None else self.active
                self._record(rest, self.left, Result.max_steps, best, step)
        self.safe = here
        if self.left and self.solver.joins and step >= 2 * HEALTH:
            self._ask(point)
        if counts[4] and self.left:
            state = self.solver.restart(state, stuck)
        return state

    def _stagnates(self, point: Point, residual: Tensor, step: int) -> Tensor:
        """Which samples, [B], have made no progress for ``patience`` steps and for a quarter of the
        steps before.

        Progress is a residual below the least one by more than rounding. Of plain steps it is also
        a straight way since the last look, at least half as long as all the steps in between: where
        soft thresholding moves z by the same T(z) − z each time, z gets nearer and no norm falls.
        """
        progress = residual < self.best * (1.0 - min(0.01, 256 * self.judge.eps))
        self.best = torch.where(progress, residual, self.best)
        if self.solver.stride is not None:
            way = sample_norm(subtract(without_graph(point.z), without_graph(self.safe[0])))
            progress |= way > 0.5 * HEALTH * self.solver.stride * point.residual_norm
        self.best_step = torch.where(progress, step, self.best_step)
        return step - self.best_step >= (0.25 * self.best_step).clamp_min(self.solver.patience)

    def _fallback(self, point: Point, state: Any) -> Reached | None:
        """What the solver has for samples that did not converge. Iterates of different steps do not
        go together where samples are coupled."""
        kept = self.solver.fallback(point, state)
        if kept is None:
            return None
        self._ask(point)
        if self.coupled and not self.judge.size:
            return None
        return _own_norms(self.fn, kept)

    def _record(self, mask: Tensor, count: int, code: Result, at: Reached, step: int) -> None:
        """Freeze the samples of ``mask``: write down their value and numbers."""
        z, residual, scale = at
        self.counts[code] = self.counts.get(code, 0) + count
        self.left -= count
        codes = torch.full_like(residual, int(code), dtype=torch.int8)
        steps = torch.full_like(residual, step, dtype=torch.int32)
        if z is self.origin:
            z = [x.clone() for x in z]  # the answer is not the caller's own memory
        kept = [*z, residual, relative_norm(residual, scale), codes, steps]
        if not self.out:
            self.out = kept
        elif self.rows is None:
            self.out = kept = where_sample(mask, kept, self.out)
        else:
            kept = where_sample(mask, kept, select_samples(self.out, self.rows))
            self.out = place_samples(self.out, self.rows, kept)
        if not self.left:
            return
        self.frozen = kept[: len(z)]
        if code is Result.converged:
            self.settled = mask if self.settled is None else self.settled | mask
        self.active = ~mask if self.active is None else self.active & ~mask

    def _outcome(self) -> Iterated:
        *value, residual, relative, code, steps = self.out
        counted = self.evaluations, self.syncs, self.counts, self.coupled
        done = Iterated(value, code, steps, residual, relative, *counted)
        return done.spread(self.judge.size) if self.judge.size else done

    def _compact(self, state: Any) -> Any:
        """Keep the rows that are still active. The host reads which they are."""
        assert self.active is not None
        whole = None
        if not self.compaction_checked:
            whole = self.fn(self.z)
            self.evaluations += 1
            self._ask(Point(self.z, whole))
            if self.found_coupled:
                return state
        self.syncs += 1
        index = self.active.nonzero()[:, 0]
        part = self.fn.take(index)
        if whole is not None:
            self.fn.check_take(index, self.z, whole, part)
            self.evaluations += 1
            self.compaction_checked = True
        self.fn = part
        self.rows = index if self.rows is None else self.rows.index_select(0, index)
        self.z = select_samples(self.z, index)
        known = self.safe, self.limit, self.hold, self.peak, self.best, self.best_step
        known = take_samples(known, index)
        self.safe, self.limit, self.hold, self.peak, self.best, self.best_step = known
        self.judge.fn, self.judge.atol = part, take_samples(self.judge.atol, index)
        self.active = self.settled = None
        return self.solver.take(state, index)

    def _report(self, step: int, point: Point) -> None:
        """Tell the callback; rows that were compacted away stand at their final value."""
        assert self.callback is not None
        z, norm = point.z, judged_norms(self.fn, point)[0]
        if self.rows is not None:
            *z, norm = place_samples(self.out[: len(z) + 1], self.rows, [*z, norm])
        self.callback(step, z, norm)
