"""The entry points: where a map, a solver and an adjoint meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .adjoints import Implicit
from .adjoints.implicit import attach_linear
from .engine.adjoint import Adjoint
from .engine.iterate import Callback
from .engine.krylov import GMRES, LinearSolver
from .engine.maps import Map
from .engine.precision import uncached
from .engine.result import (
    BackwardStats,
    NotConvergedError,
    Result,
    Solution,
    Stats,
    describe_failures,
    warn_failures,
)
from .engine.solver import Solver
from .engine.transforms import transforms_active
from .engine.tree import Leaves, flatten_state, sample_norm, unflatten
from .solvers import Anderson

# Made once: torch.compile traces their use but not their construction.
_SOLVER, _ADJOINT, _LINEAR = Anderson(), Implicit(), GMRES()

TrajectoryCallback = Callable[[int, Any, Tensor], None]


def fixed_point(
    fn: Callable[..., Any],
    z0: Any,
    args: Any = (),
    *,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    coupled: bool = False,
    throw: bool = False,
    callback: TrajectoryCallback | None = None,
) -> Solution[Any]:
    """Solve z = fn(z, *args) from z0, with gradients.

    Args:
        fn: The map T. Takes the state and ``args``, returns the state's shape.
        z0: Where to start: a floating tensor [B, ...] or a tree (tuple, list, dict) of such
            tensors. To warm-start, give the value of an earlier solution.
        args: A tuple of further arguments (anything else is one argument). Gradients reach them,
            and everything that ``fn`` captures, alike. With ``compact=True`` every tensor among
            them must carry the batch in dim 0.
        solver: How to solve; ``Anderson()`` if not given.
        adjoint: How gradients pass the answer; ``Implicit()`` if not given.
        coupled: Say that ``fn`` makes the samples of a batch depend on each other (batch
            statistics, a regularizer across the batch). The batch is then solved as one: it has
            converged when every sample has, at the same z, and ``stats`` hold the batch's numbers.
            Without it coupling is found out, at the cost of solves by sample before.
        throw: Raise ``NotConvergedError`` (which holds the solution) where the default warns.
        callback: Called after each evaluation with (step, z, ‖T(z) − z‖ [B]), for trajectories. It
            must not change z. A callback that reads values makes a GPU solve wait at each step.

    Returns:
        A ``Solution``: ``value`` as z0, ``result`` codes [B], ``stats`` (steps, residual, …).
    """
    solver = _SOLVER if solver is None else solver
    adjoint = _ADJOINT if adjoint is None else adjoint
    _check_arguments(fn, solver, adjoint)
    solver = solver.for_map()
    leaves, spec = flatten_state(z0)
    given = args if isinstance(args, tuple) else (args,)
    map_ = Map(fn, given, spec, leaves, coupled=coupled)
    observe = _observer(callback, spec)
    backward = BackwardStats()
    under_transform = transforms_active()
    if throw and under_transform:
        raise ValueError("throw=True cannot be used under torch.func transforms; read sol.result.")
    with uncached(leaves[0]):
        done = adjoint.run(map_, leaves, solver, observe, backward)
    stats = Stats(done.steps, done.residual, done.relative, done.evaluations, done.syncs, backward)
    solution: Solution[Any] = Solution(unflatten(done.value, spec), done.result, stats)
    about: dict[str, Any] = {"options": solver, "dtype": leaves[0].dtype}
    if done.counts is not None and set(done.counts) != {Result.converged}:
        if throw:
            raise NotConvergedError(describe_failures(done.counts, **about) or "", solution)
        warn_failures(done.counts, stacklevel=2, **about)
    elif throw and done.counts is None:
        counts = solution.counts()
        if Result.diverged in counts or Result.nonfinite in counts:
            raise NotConvergedError(describe_failures(counts, **about) or "", solution)
    return solution


def _check_arguments(fn: object, solver: object, adjoint: object) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be callable as fn(z, *args), got {type(fn).__name__}.")
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver must be a solver object such as Anderson(memory=5), got {solver!r}."
        )
    if not isinstance(adjoint, Adjoint):
        raise TypeError(f"adjoint must be an object such as Implicit(), got {adjoint!r}.")


def _observer(callback: TrajectoryCallback | None, spec: Any) -> Callback | None:
    if callback is None:
        return None

    def observe(step: int, z: Leaves, residual: Tensor) -> None:
        callback(step, unflatten([x.detach() for x in z], spec), residual)

    return observe


def _check_start(x0: Any, right: Leaves, spec: Any) -> Leaves:
    start, found = flatten_state(x0, "x0")
    shapes = [tuple(x.shape) for x in start], [tuple(x.shape) for x in right]
    if found != spec or shapes[0] != shapes[1]:
        raise ValueError(f"x0 must be shaped as b, {shapes[1]}, but is {shapes[0]}.")
    return start


def linear_solve(
    matvec: Callable[[Any], Any],
    b: Any,
    *,
    x0: Any = None,
    solver: LinearSolver | None = None,
    throw: bool = False,
) -> Solution[Any]:
    """Solve A x = b, A given by ``matvec(x)``, for each sample of the batch by itself.

    Where A turns out to couple samples, the batch is solved as one system.

    ``b`` is a tensor [B, ...] or a tree of them; ``solver`` is ``GMRES()`` (default) or ``CG()``
    where A is symmetric positive definite. Gradients reach b and what ``matvec`` captures.
    ``stats.residual`` and ``stats.relative`` hold ‖b − Ax‖ and ‖b − Ax‖/‖b‖ of the x returned (of
    the batch, for each sample, where A couples samples).
    """
    solver = _LINEAR if solver is None else solver
    if not isinstance(solver, LinearSolver):
        raise TypeError(f"solver must be GMRES(...) or CG(...), got {solver!r}.")
    if transforms_active():
        raise RuntimeError(
            "linear_solve has no rule for torch.func or forward-mode AD; write the system as a "
            "fixed point, fixed_point(lambda x: x + b - A(x), b), which has."
        )
    right, spec = flatten_state(b, "b")
    start = None if x0 is None else _check_start(x0, right, spec)
    product = Map(matvec, (), spec, right)
    with torch.no_grad(), uncached(right[0]):
        done = solver.solve(product, [x.detach() for x in right], start)
    backward = BackwardStats()
    value = done.value
    if torch.is_grad_enabled():
        with uncached(right[0]):
            value = attach_linear(product, right, value, solver, backward, done.coupled)
    norm = sample_norm([x.detach() for x in right])
    if done.coupled:
        norm = sample_norm([norm.unsqueeze(0)]).expand_as(norm)
    residual = done.relative * norm
    stats = Stats(done.steps, residual, done.relative, product.evaluations, done.syncs, backward)
    solution: Solution[Any] = Solution(unflatten(value, spec), done.result, stats)
    counts = solution.counts()
    if throw and set(counts) != {Result.converged}:
        message = describe_failures(counts, "linear_solve", solver, right[0].dtype)
        raise NotConvergedError(message or "", solution)
    warn_failures(counts, 2, "linear_solve", solver, right[0].dtype)
    return solution
