"""A forward solve that leaves no graph, wherever it is called from."""

from __future__ import annotations

import torch

from equilibria.engine.iterate import Callback, Iterated, iterate
from equilibria.engine.krylov import GMRES
from equilibria.engine.maps import Map
from equilibria.engine.result import BackwardStats
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import functorch_active, transforms_active
from equilibria.engine.tree import Leaves

from .functional import solve_functional


def solve_detached(fn: Map, z0: Leaves, solver: Solver, callback: Callback | None) -> Iterated:
    """Solve without a graph; the value is a constant for whatever differentiates it later."""
    with torch.no_grad():
        if not transforms_active():
            return iterate(fn, [z.detach() for z in z0], solver, callback)
        done = solve_functional(fn, z0, solver, GMRES(), callback, BackwardStats())
    done.value = [v.detach() for v in done.value]
    return done


def refuse_data_dependence(solver: Solver, name: str) -> None:
    """Inside vmap a solve that stops by its residual cannot be unrolled: say what can."""
    if not functorch_active() or solver.fixed_steps:
        return
    raise RuntimeError(
        f"{name} with a tolerance stops by the data, which torch.func transforms cannot follow. "
        "Use a fixed number of steps (rtol=0, atol=0, max_steps=...) or adjoint=Implicit()."
    )
