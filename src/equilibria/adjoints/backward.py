"""The linear system of the backward pass, u = g + Jᵀu, by any solver; and what is said of it."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils import _pytree as pytree

from equilibria.engine.iterate import iterate
from equilibria.engine.krylov import LinearIterated, LinearSolver, MatVec
from equilibria.engine.maps import Map
from equilibria.engine.result import BackwardStats, ConvergenceWarning, Result
from equilibria.engine.solver import Solver
from equilibria.engine.tree import Leaves


def solve_adjoint(solver: LinearSolver | Solver, transpose: MatVec, g: Leaves) -> LinearIterated:
    """Solve u = g + Jᵀu; a fixed-point solver starts from g, a Krylov space is spanned by it."""
    if isinstance(solver, LinearSolver):

        def identity_minus(v: Leaves) -> Leaves:
            return [a - b for a, b in zip(v, transpose(v), strict=True)]

        return solver.solve(identity_minus, g)

    def affine(u: Any) -> Any:
        return tuple(a + b for a, b in zip(g, transpose(list(u)), strict=True))

    spec = pytree.tree_structure(tuple(g))
    done = iterate(Map(affine, (), spec, g), g, solver)
    return LinearIterated(done.value, done.result, done.steps, done.relative, done.syncs)


def note_backward(stats: BackwardStats, outcome: LinearIterated) -> None:
    """Count, and warn once a solve (of the layer's call, not of each sample)."""
    stats.solves += 1
    stats.steps, stats.residual = outcome.steps, outcome.relative
    missed = int((outcome.result != int(Result.converged)).sum())
    stats.unconverged += missed
    if missed:
        warnings.warn(
            f"the backward solve missed its tolerance for {missed} of {len(outcome.result)} "
            f"samples (relative residual up to {float(outcome.relative.max()):.1e} after "
            f"{int(outcome.steps.max())} steps): gradients are off by about that much. Raise "
            "max_steps or restart of Implicit(solver=GMRES(...)), or bound the norm of the map.",
            ConvergenceWarning,
            stacklevel=2,
        )
