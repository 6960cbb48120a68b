"""A copy of a model with another solver or another adjoint in every equilibrium layer."""

from __future__ import annotations

import copy
import dataclasses

from torch import nn

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import Solver
from equilibria.solvers import Auto
from equilibria.solvers.forward_backward import SplittingSolver

__all__ = ["replaced", "with_solver"]


def with_solver(model: nn.Module, solver: Solver | None) -> nn.Module:
    """A deep copy in which ``solver`` solves every equilibrium layer; for None the model itself.

    A solver with tolerances, ``eq.Auto(rtol=1e-5)``, shows what a network gives at its equilibria,
    where it was trained with a few fixed steps.
    """
    return model if solver is None else replaced(model, solver=solver)


def replaced(
    model: nn.Module, *, solver: Solver | None = None, adjoint: Adjoint | None = None
) -> nn.Module:
    """A deep copy in which every layer has this solver, this adjoint, or both; None keeps its own.

    Layers inside layers (the branches of a MultiBranch) are changed too. ``Auto`` leaves a layer
    that is solved by operator splitting its splitting (Anderson may fail there) and gives it its
    tolerances.
    """
    for name, given, kind in (("solver", solver, Solver), ("adjoint", adjoint, Adjoint)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"{name}={given!r}: expected a {name} object of this library, or None.")
    made = copy.deepcopy(model)
    for module in made.modules():
        if solver is not None and isinstance(getattr(module, "solver", None), Solver):
            module.solver = _suited(solver, module.solver)  # type: ignore[assignment]
        if adjoint is not None and isinstance(getattr(module, "adjoint", None), Adjoint):
            module.adjoint = adjoint  # type: ignore[assignment]
    return made


def _suited(solver: Solver, own: object) -> Solver:
    """``solver``, or ``own`` with its tolerances where that is a splitting and Auto may choose."""
    if not (isinstance(solver, Auto) and isinstance(own, SplittingSolver)):
        return solver
    return dataclasses.replace(
        own,
        rtol=solver.rtol,
        atol=solver.atol,
        max_steps=max(own.max_steps, solver.max_steps),
    )
