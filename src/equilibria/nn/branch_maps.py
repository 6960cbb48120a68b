"""The map of one layer at one input, so that several can be solved as one fixed point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints.quarantine import failed_codes
from equilibria.engine.result import Solution
from equilibria.problems import HiddenProblem
from equilibria.solvers.forward_backward import SplittingSolver

from .deq_base import MonitoredMapLayer
from .layer import EquilibriumLayer
from .map_layer import MapLayer
from .monotone import MonotoneDEQ
from .observing import report

__all__ = ["BranchMap", "branch_map", "solve_branch"]


@dataclass(frozen=True)
class BranchMap:
    """z ↦ step(z, *args), started at ``start``; ``finish`` brings the answer into the domain."""

    step: Callable[..., Any]
    start: Any
    args: tuple[Any, ...]
    finish: Callable[[Any], Any]
    tell: Callable[[Solution[Any]], None]
    """Hands the branch's solution to who observes it."""


def branch_map(layer: nn.Module, x: Tensor, z0: Any) -> BranchMap:
    """T_τ of the layer's problem with the τ that its own solver would take, or T of its map.

    Of a monotone layer with a splitting solver it is the map of that splitting.
    """
    if isinstance(layer, EquilibriumLayer):
        return _of_problem(layer, x, z0)
    if isinstance(layer, MapLayer):
        return _of_map(layer, x, z0)
    raise TypeError(
        f"joint=True needs branches that are an EquilibriumLayer or a MapLayer, got "
        f"{type(layer).__name__}; use joint=False, which asks each branch to solve by itself."
    )


def solve_branch(layer: Any, x: Tensor, z0: Any, options: dict[str, Any]) -> Solution[Any]:
    """The branch's own solve, told to who observes it."""
    if isinstance(layer, MonitoredMapLayer):
        return layer.observed_solve(x, z0, **options)
    found: Solution[Any] = layer.solve(x, z0, **options)
    report(layer, found)
    return found


def _of_map(layer: MapLayer, x: Tensor, z0: Any) -> BranchMap:
    if isinstance(layer, MonotoneDEQ) and isinstance(layer.solver, SplittingSolver):
        return _of_inclusion(layer, layer.solver, x, z0)
    injected = layer.injected(x)
    start = layer.start(x, *injected) if z0 is None else z0
    check = getattr(layer, "check_state", None)
    if check is not None:
        check(start, x)
    bound = getattr(layer, "bound_step", None)
    step = layer.step if bound is None else bound()

    def tell(solution: Solution[Any]) -> None:
        if isinstance(layer, MonitoredMapLayer):
            layer.after_solve(solution.value, failed_codes(solution.result), *injected)
            layer.tell(solution, step, injected)
        else:
            report(layer, solution)

    return BranchMap(step, start, injected, lambda z: z, tell)


def _of_inclusion(layer: MonotoneDEQ, solver: SplittingSolver, x: Tensor, z0: Any) -> BranchMap:
    """The step of the layer's own splitting: σ(Wz + c) may expand, and this contracts always."""
    splitting = layer.split(solver, x, z0)
    return BranchMap(
        splitting.step,
        splitting.start,
        splitting.inputs,
        splitting.read,
        lambda solution: report(layer, solution),
    )


def _of_problem(layer: EquilibriumLayer, x: Tensor, z0: Tensor | None) -> BranchMap:
    problem, start = layer.posed(x, z0)

    def bounds() -> tuple[Any, Any]:
        nominal = getattr(layer, "nominal_bounds", None)
        known = None if nominal is None else nominal(problem)
        if known is not None:
            return known  # type: ignore[no-any-return]
        found = problem.curvature()
        return found.lower, found.upper

    def tell(solution: Solution[Any]) -> None:
        report(layer, solution)

    tau = layer.solver.for_problem(bounds).tau
    step: Callable[..., Any]
    args: tuple[Any, ...] = problem.inputs()
    if torch.compiler.is_compiling():
        # Nothing looks at the arguments of a traced solve (as in ``minimize``).
        step, args = (lambda z: problem.step(z, tau)), ()
    elif isinstance(tau, Tensor) and tau.ndim == 1:
        # One step a sample must follow its sample when finished ones are dropped (compact=True).
        step, args = _PerSample(problem), (*args, tau)
    else:
        step = _Shared(problem, tau)
    return BranchMap(step, start, args, problem.into_domain, tell)


@dataclass(frozen=True, eq=False)
class _Shared:
    problem: HiddenProblem
    tau: Any

    def __call__(self, z: Tensor, *inputs: Tensor) -> Tensor:
        return self.problem.with_inputs(*inputs).step(z, self.tau)


@dataclass(frozen=True, eq=False)
class _PerSample:
    problem: HiddenProblem

    def __call__(self, z: Tensor, *inputs: Tensor) -> Tensor:
        return self.problem.with_inputs(*inputs[:-1]).step(z, inputs[-1])
