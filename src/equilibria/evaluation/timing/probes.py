"""Cheap questions to a model, each one forward pass: what would another solver need?"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine.result import Result
from equilibria.engine.solver import Solver
from equilibria.engine.tree import flatten_state
from equilibria.evaluation.certifying import certify_model
from equilibria.evaluation.running import evaluating
from equilibria.nn.observing import observe
from equilibria.solvers.forward_backward import SplittingSolver

from .instrument import solving_layers
from .workload import Workload

__all__ = [
    "Edit",
    "Probe",
    "contraction",
    "edit_solvers",
    "edited",
    "probe",
    "relative_change",
    "tolerance_of",
    "tolerant_layers",
]

Edit = Callable[[nn.Module], None]
"""Changes a copy of the model in place."""


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """One inference of a changed model."""

    evaluations: int
    converged: bool
    """Whether every sample of every layer passed its tolerance."""
    answer: Any


def tolerant_layers(model: nn.Module) -> dict[str, Any]:
    """Layers that stop by a tolerance and whose solver may be exchanged."""
    return {
        name: layer
        for name, layer in solving_layers(model).items()
        if isinstance(layer.solver, Solver)
        and not layer.solver.fixed_steps
        and not isinstance(layer.solver, SplittingSolver)
    }


def tolerance_of(solver: Solver, x: Tensor) -> float:
    """The relative tolerance that the solver takes for states of x's dtype."""
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return solver.relative_tolerance(dtype, x.device.type)


def edit_solvers(change: Callable[[str, Solver], Solver]) -> Edit:
    """An edit of every tolerant layer: (name, its solver) → another."""

    def edit(model: nn.Module) -> None:
        for name, layer in tolerant_layers(model).items():
            layer.solver = change(name, layer.solver)

    return edit


def edited(model: nn.Module, edit: Edit | None) -> nn.Module:
    """A copy with the change."""
    made = copy.deepcopy(model)
    if edit is not None:
        edit(made)
    return made


def probe(work: Workload, edit: Edit | None) -> Probe:
    """Run the changed model once in eval mode."""
    model = edited(work.model, edit)
    with evaluating(model), torch.no_grad(), work.cast(), observe(model) as seen:
        answer = model(work.x)
        found = [s for each in seen.solutions.values() for s in each]
        fine = all(bool((s.result == int(Result.converged)).all()) for s in found)
        return Probe(sum(s.stats.evaluations for s in found), fine, answer)


def relative_change(a: Any, b: Any) -> float:
    """‖a − b‖/‖b‖ over all leaves."""
    ours, theirs = (
        torch.cat([t.detach().double().flatten() for t in flatten_state(v)[0]]) for v in (a, b)
    )
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-300))


def contraction(work: Workload, samples: int = 2) -> float | None:
    """The largest contraction factor that the certificates of the layers prove; None: unknown."""
    rows = min(samples, work.batch)
    try:
        whole = certify_model(work.model, work.x[:rows])
    except (ValueError, TypeError, RuntimeError, NotImplementedError):
        return None
    factors = [getattr(part, "contraction", None) for part in whole.values()]
    if not factors or any(f is None for f in factors):
        return None
    worst = max(float(torch.as_tensor(f).max()) for f in factors)
    return worst if math.isfinite(worst) else None
