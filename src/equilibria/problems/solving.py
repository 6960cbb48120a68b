"""Solve a hidden problem: minimize G, or find its stationary point, with gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.result import Solution
from equilibria.engine.solver import Solver
from equilibria.entry import TrajectoryCallback, fixed_point
from equilibria.solvers import Auto

from .problem import HiddenProblem


def minimize(
    problem: HiddenProblem,
    z0: Tensor | None = None,
    *,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    throw: bool = False,
    callback: TrajectoryCallback | None = None,
) -> Solution[Tensor]:
    """argmin_z G(z) as the fixed point of T_τ, for every sample of the batch.

    Any solver of fixed points will do; ``Auto()`` (the default) looks at the problem's bounds
    m ⪯ ∇²g ⪯ L and says in ``Solution.choice`` what it took. Gradients by ``adjoint`` reach the
    input c and all weights. Where G is not convex the answer is a stationary point.
    """
    chooser = Auto() if solver is None else solver

    def bounds() -> tuple[Any, Any]:
        found = problem.curvature()
        return found.lower, found.upper

    choice = chooser.for_problem(bounds)
    # One step a sample must follow its sample when finished ones are dropped (compact=True).
    per_sample = isinstance(choice.tau, Tensor) and choice.tau.ndim == 1
    args = (*problem.inputs(), choice.tau) if per_sample else problem.inputs()

    def step(z: Tensor, *inputs: Tensor) -> Tensor:
        if per_sample:
            return problem.with_inputs(*inputs[:-1]).step(z, inputs[-1])
        return problem.with_inputs(*inputs).step(z, choice.tau)

    start = problem.default_start() if z0 is None else z0
    found = fixed_point(
        step,
        start,
        args,
        solver=choice.solver,
        adjoint=adjoint,
        throw=throw,
        callback=callback,
    )
    # Solvers that extrapolate may end a little outside (ReLU: −1e-6), where G is infinite.
    return dataclasses.replace(found, value=problem.into_domain(found.value), choice=choice.reason)
