"""Solver statistics of a training step, as numbers on the device that nobody waits for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine.result import ConvergenceWarning, Result
from equilibria.nn import Observed, equilibrium_layers

__all__ = ["SOLVER_FIELDS", "UNSETTLED", "solver_numbers", "warn_unsettled"]

UNSETTLED = 0.1
"""A relative residual above which a state is not near its equilibrium: the last step moved a tenth
of it."""

SOLVER_FIELDS = ("solver_steps", "residual", "converged", "failed")
"""Means over samples and layers: evaluations of the map; ‖T(z) − z‖/‖T(z)‖; the share that passed
its tolerance (NaN where every layer runs a fixed number of steps and so tests none); the share that
diverged or met NaN."""


@torch.no_grad()
def solver_numbers(model: nn.Module, seen: Observed) -> Tensor | None:
    """The four numbers of ``SOLVER_FIELDS``, [4]; None where no solve was seen."""
    if not len(seen):
        return None
    layers = equilibrium_layers(model)
    steps: list[Tensor] = []
    relative: list[Tensor] = []
    tested: list[Tensor] = []
    failed: list[Tensor] = []
    for name, solutions in seen.solutions.items():
        solver: Any = getattr(layers.get(name), "solver", None)
        fixed = bool(getattr(solver, "fixed_steps", False))
        for solution in solutions:
            steps.append(solution.stats.steps.flatten().float())
            relative.append(solution.stats.relative.flatten().float())
            bad = (solution.result == int(Result.diverged)) | (
                solution.result == int(Result.nonfinite)
            )
            failed.append(bad.flatten().float())
            if not fixed:
                tested.append(solution.converged.flatten().float())
    residual = torch.cat(relative)
    residual = torch.where(torch.isfinite(residual), residual, float("nan"))
    return torch.stack(
        [
            torch.cat(steps).mean(),
            residual.nanmean(),
            torch.cat(tested).mean() if tested else residual.new_tensor(float("nan")),
            torch.cat(failed).mean(),
        ]
    )


def warn_unsettled(row: Mapping[str, Any]) -> None:
    """Say it where fixed steps of a training end far from the equilibrium: nothing else shows it.

    A solve with a tolerance says itself that it missed it, and has a share converged.
    """
    residual = float(row.get("residual", math.nan))
    if residual > UNSETTLED and math.isnan(row.get("converged", math.nan)):
        count = f"{row['solver_steps']:.3g}"
        steps = f"{count} step{'' if count == '1' else 's'}"
        warnings.warn(
            f"the layers are not at their equilibrium: the last of {steps} still moved the state "
            f"by {residual:.2g} of its size. What was trained are these steps. Raise max_steps of "
            "the solver, or try another: Picard(), Anderson().",
            ConvergenceWarning,
            stacklevel=2,
        )
