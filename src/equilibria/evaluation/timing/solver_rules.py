"""Rules about solvers: how they test, which one it is, for whom and how far it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from equilibria.engine.solver import Solver
from equilibria.solvers import Anderson, Auto, ForwardBackward, PeacemanRachford, Picard

from .ideas import GAIN, SHARE, Case, Idea
from .instrument import solving_layers
from .probes import Edit, Probe, edit_solvers, probe, relative_change, tolerance_of
from .report import Suggestion
from .timeline import MAP, PREPARE, SOLVER

__all__ = ["SOLVER_RULES"]

_WASTE = 0.3
"""Evaluations for samples that had converged, as a share of all."""


def fixed_steps(case: Case) -> Idea | None:
    """A solver that costs more than its map should test less, or not at all."""
    share = case.main.share(SOLVER)
    if not case.tolerant or share <= SHARE:
        return None
    steps = {
        layer.name: layer.statistics.max_steps
        for layer in case.main.layers
        if layer.statistics is not None
    }

    def fixed(name: str, solver: Solver) -> Solver:
        most = steps.get(name, solver.max_steps)
        return dataclasses.replace(solver, rtol=0.0, atol=0.0, max_steps=most)

    longest = max(steps.values())
    said = Suggestion(
        "fixed steps",
        f"{share:.0%} of the pass is the solver's own work (tests, norms, algebra), not the map",
        f"dataclasses.replace(layer.solver, rtol=0.0, atol=0.0, max_steps={longest}): no tests, no "
        "waits, compiles whole; or block=8 to test less often",
        case.without(case.main.parts[SOLVER]),
    )
    return Idea(said, edit_solvers(fixed))


def other_solver(case: Case) -> Idea | None:
    """Picard, Anderson and Auto at the same tolerance: who would take least time?"""
    if not case.tolerant or case.main.parts[MAP] + case.main.parts[SOLVER] == 0.0:
        return None
    now = {type(layer.solver) for layer in case.tolerant.values()}
    best: tuple[float, str, Probe, Edit] | None = None
    for kind in (Picard, Anderson, Auto):
        if kind in now:
            continue
        edit = edit_solvers(_as(kind))
        try:
            seen = probe(case.work, edit)
        except (ValueError, RuntimeError):
            continue
        if not seen.converged:
            continue
        ratio = seen.evaluations / max(case.base.evaluations, 1)
        # Picard's own step is nothing; that of the others is taken to cost what it does now.
        gain = case.with_evaluations(ratio, overhead=0.0 if kind is Picard else 1.0)
        if gain > GAIN and (best is None or gain > best[0]):
            best = gain, kind.__name__, seen, edit
    if best is None:
        return None
    gain, name, seen, edit = best
    said = Suggestion(
        f"solver {name}",
        f"{name} reaches the same tolerance in {seen.evaluations} evaluations where "
        f"{' and '.join(sorted(k.__name__ for k in now))} takes {case.base.evaluations}"
        + _proven(case),
        f"layer.solver = eq.{name}(rtol=..., max_steps=...)",
        gain,
    )
    return Idea(said, edit)


def _as(kind: type[Solver]) -> Callable[[str, Solver], Solver]:
    shared = [f.name for f in dataclasses.fields(Solver)]

    def made(_: str, solver: Solver) -> Solver:
        given = {name: getattr(solver, name) for name in shared}
        return kind(**{**given, "max_steps": max(solver.max_steps, 200)})

    return made


def _proven(case: Case) -> str:
    """What the certificate says of plain iteration."""
    factor = case.contraction
    if factor is None:
        return ""
    if factor >= 1.0:
        return f"; plain iteration is not proven to converge (certified factor {factor:.3g})"
    rtol = min(tolerance_of(layer.solver, case.work.x) for layer in case.tolerant.values())
    if factor <= 0.0 or rtol <= 0.0:
        return f"; certified contraction factor {factor:.3g}"
    steps = math.ceil(math.log(rtol) / math.log(factor))
    return f"; certified contraction factor {factor:.3g}: a digit of plain iteration takes " + (
        f"at most {math.ceil(math.log(0.1) / math.log(factor))} steps, the tolerance about {steps}"
    )


def compaction(case: Case) -> Idea | None:
    """Samples that are done still ride along with the slowest one."""
    wasted = spent = 0.0
    for layer in case.main.layers:
        if layer.name in case.tolerant and layer.statistics is not None:
            if case.tolerant[layer.name].solver.compact:
                continue
            seconds = layer.seconds[MAP] + layer.seconds[SOLVER]
            most = max(layer.statistics.max_steps, 1)
            wasted += seconds * (1.0 - layer.statistics.mean_steps / most)
            spent += seconds
    if case.work.batch < 8 or spent == 0.0 or wasted / spent < _WASTE:
        return None
    said = Suggestion(
        "compaction",
        f"{wasted / spent:.0%} of the solves' work is done on samples that had converged: most are "
        "done long before the slowest",
        "solver with compact=True: finished samples leave the batch",
        case.without(wasted),
    )
    return Idea(said, edit_solvers(lambda _, s: dataclasses.replace(s, compact=True)))


def looser_tolerance(case: Case) -> Idea | None:
    """Ten times the tolerance, if every decision on this batch stays the same."""
    if not case.tolerant:
        return None
    edit = edit_solvers(
        lambda _, s: dataclasses.replace(s, rtol=10.0 * tolerance_of(s, case.work.x))
    )
    seen = probe(case.work, edit)
    ratio = seen.evaluations / max(case.base.evaluations, 1)
    gain = case.with_evaluations(ratio)
    change = relative_change(seen.answer, case.base.answer)
    if gain < GAIN or change > 0.01 or not _same_decisions(seen.answer, case.base.answer):
        return None
    said = Suggestion(
        "looser tolerance",
        f"ten times the tolerance takes {seen.evaluations} evaluations instead of "
        f"{case.base.evaluations}; on this batch the output changes by {change:.1e} and no "
        "decision does",
        "solver with 10 times its rtol; check the accuracy on your data",
        gain,
    )
    return Idea(said, edit)


def _same_decisions(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.ndim < 2:
        return True
    return bool((a.argmax(1) == b.argmax(1)).all())


def cheaper_splitting(case: Case) -> Idea | None:
    """Peaceman–Rachford factorizes before it starts; forward-backward does not."""
    layers = solving_layers(case.work.model)
    chosen = [n for n, m in layers.items() if isinstance(m.solver, PeacemanRachford)]
    share = case.main.share(PREPARE)
    if not chosen or share <= SHARE:
        return None

    def edit(model: nn.Module) -> None:
        for name, layer in solving_layers(model).items():
            if name in chosen:
                own = layer.solver
                layer.solver = ForwardBackward(rtol=own.rtol, atol=own.atol, max_steps=500)

    said = Suggestion(
        "forward-backward",
        f"{share:.0%} of the pass prepares the solves: the resolvent of Peaceman–Rachford is made "
        "anew for every batch while weights move",
        "layer.solver = eq.ForwardBackward(...): more steps, and nothing to factorize",
        None,
    )
    return Idea(said, edit)


SOLVER_RULES: tuple[Callable[[Case], Idea | None], ...] = (
    fixed_steps,
    other_solver,
    compaction,
    looser_tolerance,
    cheaper_splitting,
)
