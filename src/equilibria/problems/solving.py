"""Solve a hidden problem: minimize G, or find its stationary point, with gradients."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equilibria.adjoints.graph import host_may_read
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.maps import Surrogate
from equilibria.engine.result import Solution
from equilibria.engine.solver import Choice, SolverOptions
from equilibria.engine.tree import per_sample
from equilibria.entry import TrajectoryCallback, fixed_point
from equilibria.solvers import Auto
from equilibria.solvers.auto import momentum
from equilibria.solvers.forward_backward import proximal_slack

from .fused import fused_solve, serves
from .kernels import inner
from .objective import shortened
from .problem import HiddenProblem, Problem
from .splitting import Composite, split


def minimize(
    problem: HiddenProblem,
    z0: Tensor | None = None,
    *,
    solver: SolverOptions | None = None,
    adjoint: Adjoint | None = None,
    throw: bool = False,
    callback: TrajectoryCallback | None = None,
) -> Solution[Tensor]:
    """argmin_z G(z) as the fixed point of T_τ, for every sample of the batch.

    Any solver of fixed points will do; ``Auto()`` (the default) looks at the problem's bounds
    m ⪯ ∇²g ⪯ L and says in ``Solution.choice`` what it took. Gradients by ``adjoint`` reach the
    input c and all weights. Where G is not convex the answer is a stationary point.

    A solver that extrapolates may end a little outside of the prior's domain, and its answer is
    moved to the nearest point inside. ``stats.residual`` is that of the point before, r; at the
    value it is at most (1 + Lip T)r, since T(z) lies in the domain, so no farther than r from z.
    """
    start = problem.default_start() if z0 is None else z0
    zero_start = z0 is None and type(problem) is Problem
    return minimize_from(
        problem,
        start,
        zero_start=zero_start,
        solver=solver,
        adjoint=adjoint,
        throw=throw,
        callback=callback,
    )


def minimize_from(
    problem: HiddenProblem,
    start: Tensor,
    *,
    bounds: Callable[[], tuple[Any, Any] | None] = lambda: None,
    zero_start: bool,
    solver: SolverOptions | None = None,
    adjoint: Adjoint | None = None,
    throw: bool = False,
    callback: TrajectoryCallback | None = None,
) -> Solution[Tensor]:
    """``minimize`` for a caller that knows more, which saves work.

    ``bounds`` gives (m, L) good enough to choose a solver by, or None; the start may be zero.
    """
    if isinstance(problem, Composite):
        return split(
            problem, start, solver=solver, adjoint=adjoint, throw=throw, callback=callback
        )[0]
    unit = problem.unit_step()
    choice = choice_for(problem, Auto() if solver is None else solver, bounds, unit)
    # A compiler follows the general path; the fused path has nothing left to fuse.
    plain = callback is None and not throw and not torch.compiler.is_compiling()
    if plain and isinstance(problem, Problem) and serves(problem, choice, adjoint):
        quick = fused_solve(problem, start, choice, adjoint, zero_start=zero_start)
        return dataclasses.replace(quick, choice=choice.reason)
    tau = choice.tau
    same = isinstance(tau, float) and isinstance(unit, float) and tau == unit
    step, args = step_of(problem, tau, judged=not same and not torch.compiler.is_compiling())
    found = fixed_point(
        step,
        start,
        args,
        solver=choice.solver,
        adjoint=adjoint,
        coupled=problem.couples_batch,
        throw=throw,
        callback=callback,
    )
    if isinstance(problem, Problem) and not problem.ridge and not torch.compiler.is_compiling():
        warn_refuted(problem, start, found.value)
    # Solvers that extrapolate may end a little outside (ReLU: −1e-6), where G is infinite.
    return dataclasses.replace(found, value=problem.into_domain(found.value), choice=choice.reason)


_FLAT = 0.05


class BoundsWarning(UserWarning):
    """A Hessian left the bounds that were given for it, so the step was wrong."""


@torch.no_grad()
def warn_refuted(problem: Problem, start: Tensor, end: Tensor) -> None:
    """Warn where the mean curvature between two states lies outside of bounds that were given."""
    bounds = problem.curvature()
    if bounds.basis != "given" or not host_may_read(start):
        return
    a = start.detach()
    still = per_sample((end.detach() == a).flatten(1).all(1), a)
    # What diverged is given back as it began.
    b = torch.where(still, problem.step(a, problem.unit_step()), end.detach())
    square = inner(b - a, b - a)
    mean = inner(problem.gradient(b) - problem.gradient(a), b - a) / square
    low, high = bounds.ends(square)
    rounding = 64 * torch.finfo(a.dtype).eps * (inner(a, a) / square).sqrt()
    slack = (1e-3 + rounding) * torch.maximum(low.abs(), high.abs())
    outside = (mean < low - slack) | (mean > high + slack)
    if bool(outside.any()):
        warnings.warn(
            f"bounds=({float(low.min()):.4g}, {float(high.max()):.4g}) are wrong: between the "
            f"start and the answer the mean curvature is {float(mean[outside][0]):.4g}. Correct "
            "them, or leave them out to have them estimated.",
            BoundsWarning,
            stacklevel=4,
        )


def choice_for(
    problem: HiddenProblem,
    solver: SolverOptions,
    nominal: Callable[[], tuple[Any, Any] | None] = lambda: None,
    unit: float | Tensor = 1.0,
) -> Choice:
    """What the problem is solved with, by its nominal bounds (m, L), else by the proven ones."""

    def bounds() -> tuple[Any, Any]:
        known = nominal()
        if known is not None:
            return known
        found = problem.curvature()
        return found.lower * unit, found.upper * unit

    if isinstance(unit, float) and unit == 1.0:
        return solver.for_problem(bounds)
    flat = isinstance(unit, float) and bool((torch.as_tensor(bounds()[0]) < _FLAT).any())
    if flat and isinstance(solver, Auto):
        # Anderson's method may stall where the active set of a prior changes for long.
        return momentum(solver, unit, f"the step 1/L, as m/L is below {_FLAT:g}")
    chosen = solver.for_problem(bounds)
    # In units of 1/L, unless the user gave a step.
    given = getattr(solver, "tau", None) is not None
    return chosen if given else dataclasses.replace(chosen, tau=chosen.tau * unit)


def step_of(
    problem: HiddenProblem, tau: float | Tensor, *, judged: bool
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """T_τ of the problem, and its arguments.

    ``judged``: its solve is judged by the residual of T: a small τ makes small steps, not answers.
    """
    # One step per sample must follow its sample when finished ones are dropped (compact=True).
    own_tau = (tau,) if isinstance(tau, Tensor) and tau.ndim == 1 else ()
    searched = own_tau and isinstance(problem, Problem) and problem.curvature().basis == "estimated"

    def bound(args: tuple[Tensor, ...]) -> tuple[HiddenProblem, float | Tensor]:
        split = len(args) - len(own_tau)
        return problem.with_inputs(*args[:split]), args[-1] if own_tau else tau

    def step(z: Tensor, *args: Tensor) -> Tensor:
        inner, tau = bound(args)
        if searched and isinstance(inner, Problem):
            tau, found = shortened(args[-1], inner.effective_prior.prox, inner.gradient, z)
            if not torch.is_grad_enabled():
                return found
        return inner.step(z, tau)

    def own(z: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        inner, _ = bound(args)
        inside = inner.into_domain(z)
        return inside, inner.step(inside, inner.unit_step())

    def near(*args: Tensor) -> float | Tensor:
        inner, tau = bound(args)
        return proximal_slack(tau / inner.unit_step())

    map_ = Surrogate(step, own, near, None) if judged else step
    return map_, (*problem.inputs(), *own_tau)
