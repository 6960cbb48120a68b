"""The entry points: where a map, a solver and an adjoint meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .adjoints import Implicit
from .adjoints.graph import failed_samples, has_batch, isolate
from .adjoints.implicit import attach_linear
from .engine.adjoint import Adjoint
from .engine.complexes import RealForm
from .engine.iterate import Callback
from .engine.krylov import LinearSolver
from .engine.maps import Map
from .engine.result import Iterated, Result, Solution, Stats, report_failures
from .engine.solver import SolverOptions
from .engine.transforms import outside_compile, transforms_active, uncached
from .engine.tree import Leaves, flatten_state, per_sample, power_of_two, scale_samples, unflatten
from .solvers import Anderson, NewtonKrylov

# Made once: torch.compile traces their use but not their construction.
_SOLVER, _ADJOINT, _ROOT = Anderson(), Implicit(), NewtonKrylov()
_ROOT_ADJOINT = Implicit(solver=_ROOT.linear)  # what solves with J solves with Jᵀ

TrajectoryCallback = Callable[[int, Any, Tensor], None]


def fixed_point(
    fn: Callable[..., Any],
    z0: Any,
    args: Any = (),
    *,
    solver: SolverOptions | None = None,
    adjoint: Adjoint | None = None,
    coupled: bool = False,
    throw: bool = False,
    callback: TrajectoryCallback | None = None,
    aux: bool = False,
) -> Solution[Any]:
    """Solve z = fn(z, *args) from z0, with gradients.

    Args:
        fn: The map T. Takes the state and ``args``, returns the state's shape.
        z0: Where to start: a floating or complex tensor [B, ...] or a tree (tuple, list, dict) of
            such tensors. To warm-start, give the value of an earlier solution.
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
        aux: Say that ``fn`` returns (T(z), aux), aux anything that it computes beside the state.
            ``Solution.aux`` is that of the value returned: ``fn`` is called once more there, with a
            graph, so that gradients of a loss of aux are right.

    Returns:
        A ``Solution``: ``value`` as z0, ``result`` codes [B], ``stats`` (steps, residual, …).
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable as fn(z, *args), got {type(fn).__name__}.")
    if throw and transforms_active():
        raise ValueError("throw=True cannot be used under torch.func transforms; read sol.result.")
    adjoint = _ADJOINT if adjoint is None else adjoint
    solver = _SOLVER if solver is None else solver
    check_ways(solver, adjoint)
    chosen = solver.for_map()
    view = RealForm(z0)
    kept: list[Any] = []
    state_of = _without_aux(fn, kept) if aux else fn
    map_ = Map(view.on_parts(state_of), args, view.spec, view.leaves, coupled=coupled)
    with uncached(view.leaves[0]):
        done = adjoint.run(map_, view.leaves, chosen, _observer(callback, view))
        value, beside = view.restored(done.value), None
        if aux:
            beside = _aux(map_, done, kept, lambda: fn(value, *map_.args)[1])
            done.evaluations += 1
    solution = _solution(value, done, beside)
    counts = done.counts
    if counts is None and throw:  # fixed steps: running out of them is no failure
        found = solution.counts()
        counts = found if {Result.diverged, Result.nonfinite} & found.keys() else None
    if counts is not None:
        about = "fixed_point", chosen, view.leaves[0].dtype
        report_failures(counts, *about, raise_with=solution if throw else None)
    return solution


def root(
    f: Callable[..., Any],
    z0: Any,
    args: Any = (),
    *,
    solver: NewtonKrylov | None = None,
    adjoint: Implicit | None = None,
    coupled: bool = False,
    throw: bool = False,
) -> Solution[Any]:
    """Solve f(z, *args) = 0 from z0, with gradients.

    Args:
        f: The function; its value has the structure and the shapes of z. It must be differentiable
            twice by autograd.
        z0: Where to start: a floating or complex tensor [B, ...] or a tree (tuple, list, dict) of
            such tensors.
        args: A tuple of further arguments (anything else is one argument). Gradients reach them,
            and everything that ``f`` captures, alike.
        solver: ``NewtonKrylov()`` if not given.
        adjoint: The implicit function theorem, dz = −(∂f/∂z)⁻¹ ∂f; if not given,
            ``Implicit(solver=GMRES(restart=50))``, with the Krylov space of the default solver.
        coupled: Say that ``f`` makes the samples of a batch depend on each other; they are then
            solved as one system. Without it coupling is found out where samples do not converge.
        throw: Raise ``NotConvergedError`` (which holds the solution) where the default warns.

    Returns:
        A ``Solution``: ``value`` as z0, ``result`` codes [B], and ``stats`` with ``residual`` =
        ‖f(z)‖ of the returned z, ``relative`` = ‖f(z)‖/‖J(z)w‖ (see ``NewtonKrylov``), and
        ``evaluations``, which counts products with the Jacobian too.
    """
    if not callable(f):
        raise TypeError(f"f must be callable as f(z, *args), got {type(f).__name__}.")
    solver = _ROOT if solver is None else solver
    adjoint = _ROOT_ADJOINT if adjoint is None else adjoint
    ways: tuple[object, object] = solver, adjoint
    if not isinstance(ways[0], NewtonKrylov):
        raise TypeError(
            f"solver must be NewtonKrylov(...), got {solver!r}. To use a fixed-point solver, write "
            "fixed_point(lambda z: z - f(z), z0, solver=...)."
        )
    if not isinstance(ways[1], Implicit):
        raise TypeError(f"adjoint must be Implicit(...), got {adjoint!r}.")
    if transforms_active():
        raise RuntimeError(
            "root has no rule for torch.func or forward-mode AD; call it outside of the transform, "
            "or write fixed_point(lambda z: z - f(z), z0), which has."
        )
    view = RealForm(z0)
    map_ = Map(view.on_parts(f), args, view.spec, view.leaves, coupled=coupled)
    with uncached(view.leaves[0]):
        done = _find_root(map_, view.leaves, solver, adjoint)
    solution = _solution(view.restored(done.value), done)
    about = "root", solver, view.leaves[0].dtype
    report_failures(done.counts or {}, *about, raise_with=solution if throw else None)
    return solution


@outside_compile("root reads after each step which samples are done; compile f instead")
def _find_root(fn: Map, z0: Leaves, solver: NewtonKrylov, adjoint: Implicit) -> Iterated:
    with torch.no_grad():
        done, norm = solver.solve(fn, [z.detach().clone() for z in z0])
    if not torch.is_grad_enabled():
        return done
    inverse = 1.0 / power_of_two(norm)

    def step(f: Callable[..., Any], z: Any, *args: Any) -> Any:
        # z + f(z)/‖J‖: of z + f(z) alone rounding would leave nothing of a small f.
        image = scale_samples(inverse, flatten_state(f(z, *args), "f(z)")[0])
        pairs = zip(flatten_state(z)[0], image, strict=True)
        return unflatten([x + y.to(x.dtype) for x, y in pairs], fn.spec)

    done.value = adjoint.attached(fn.wrapped(step), done)
    return done


def check_ways(solver: object, adjoint: object) -> None:
    """Raise unless these say how to solve and how to differentiate."""
    if not isinstance(solver, SolverOptions):
        raise TypeError(
            f"solver must be a solver object such as Anderson(memory=5) or Auto(), got {solver!r}."
        )
    if not isinstance(adjoint, Adjoint):
        raise TypeError(f"adjoint must be an object such as Implicit(), got {adjoint!r}.")


def _without_aux(fn: Callable[..., Any], kept: list[Any]) -> Callable[..., Any]:
    """The state alone of a map that returns (T(z), aux); aux goes to ``kept`` if it holds one."""

    def state(z: Any, *args: Any) -> Any:
        found = fn(z, *args)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(
                "fixed_point(aux=True): fn must return a tuple (T(z), aux), got "
                f"{type(found).__name__}."
            )
        if kept:  # else nothing is changed, which a compiler forbids
            kept[0] = found[1]
        return found[0]

    return state


def _aux(fn: Map, done: Iterated, kept: list[Any], at_value: Callable[[], Any]) -> Any:
    """The aux of the answer; its graph leaves out the samples that failed, as the answer's does."""
    tracing = torch.compiler.is_compiling() or transforms_active()
    failed = None if tracing or not torch.is_grad_enabled() else failed_samples(done)
    if failed is None:
        return at_value()
    with torch.no_grad():
        plain = at_value()
    part = isolate(fn, done)
    if part is None:
        return plain
    kept.append(None)
    part.fn(part.z)
    live = kept.pop()

    def joined(a: Any, b: Any) -> Any:
        if not isinstance(b, Tensor) or not b.requires_grad:
            return a
        # A number of the whole batch holds the failed samples too: then it has no gradient.
        lost = per_sample(failed, b) if has_batch(b, failed) else a != b
        return torch.where(lost, a, b)

    return pytree.tree_map(joined, plain, live)


def _observer(callback: TrajectoryCallback | None, view: RealForm) -> Callback:
    if callback is None:
        return None
    return lambda step, z, norm: callback(step, view.restored([x.detach() for x in z]), norm)


def _solution(value: Any, done: Iterated, aux: Any = None) -> Solution[Any]:
    counted = done.evaluations, done.syncs, done.backward
    stats = Stats(done.steps, done.residual, done.relative, *counted)
    return Solution(value, done.result, stats, aux=aux)


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

    ``b`` is a tensor [B, ...] or a tree of them; ``solver`` is ``GMRES(restart=50)`` (default) or
    ``CG()`` where A is symmetric (for complex b: Hermitian) positive definite. Gradients reach b
    and what ``matvec`` captures.
    ``stats.residual`` and ``stats.relative`` hold ‖b − Ax‖ and ‖b − Ax‖/‖b‖ of the x returned (of
    the batch, for each sample, where A couples samples).
    """
    solver = _ROOT.linear if solver is None else solver
    if not isinstance(solver, LinearSolver):
        raise TypeError(f"solver must be GMRES(...) or CG(...), got {solver!r}.")
    if transforms_active():
        raise RuntimeError(
            "linear_solve has no rule for torch.func or forward-mode AD; write the system as a "
            "fixed point, fixed_point(lambda x: x + b - A(x), b), which has."
        )
    view = RealForm(b, "b")
    right = view.leaves
    start: Leaves | None = None
    if x0 is not None:
        start, found = flatten_state(view.real(x0), "x0")
        shapes = [[tuple(x.shape) for x in leaves] for leaves in (start, right)]
        if found != view.spec or shapes[0] != shapes[1]:
            raise ValueError(f"x0 must be shaped as b, {shapes[1]}, but is {shapes[0]}.")
    product = Map(view.on_parts(matvec), (), view.spec, right)
    with torch.no_grad(), uncached(right[0]):
        done = solver.solve(product, [x.detach() for x in right], start)
    if torch.is_grad_enabled():
        with uncached(right[0]):
            done.value = attach_linear(product, right, done, solver)
    done.evaluations = product.evaluations
    solution = _solution(view.restored(done.value), done)
    about = "linear_solve", solver, right[0].dtype
    report_failures(solution.counts(), *about, raise_with=solution if throw else None)
    return solution
