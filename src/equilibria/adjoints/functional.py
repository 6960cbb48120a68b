"""Implicit differentiation under torch.func and forward-mode AD.

Transforms need every dependency of a solve as an explicit input. The map's closure is made
explicit by watching one evaluation and substituting tensors in later ones. The rules of u = g + Jᵀu
(reverse), t = c + Jt (forward) and of vmap are solves of the same kind, so transforms nest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from equilibria.engine.iterate import Callback, iterate
from equilibria.engine.krylov import GMRES, LinearSolver
from equilibria.engine.maps import Map
from equilibria.engine.result import BackwardStats, Iterated, report_failures
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import forward_levels, forward_mode_active, transforms_active
from equilibria.engine.tree import Leaves, add, keep_samples

from .backward import Backward
from .graph import (
    Constants,
    Substitute,
    blown_up,
    changed_in_place,
    clean,
    has_batch,
    has_nan,
    lend,
    survey,
    watch,
)

Explicit = Callable[[Leaves, Sequence[Tensor]], Leaves]
"""(leaves of z, dependencies) ↦ leaves of T(z)."""


@dataclass(frozen=True)
class _Problem:
    """z = fn(z, deps) by ``solver``. Without one it is affine, solved as ``how`` says, and its
    offset is the first ``count`` dependencies."""

    fn: Explicit
    count: int
    how: Backward
    solver: Solver | None = None
    callback: Callback = None
    counted: list[int] = field(default_factory=lambda: [0, 0])
    """Evaluations and syncs of a forward solve, told by the host."""
    constants: list[Constants] = field(default_factory=list)
    """Of the map, as they were after a forward solve."""


def solve_functional(
    fn: Map, z0: Leaves, solver: Solver, rule: LinearSolver | Solver, callback: Callback
) -> Iterated:
    """Solve with rules for vmap, reverse and forward mode."""
    if forward_levels() > 1:
        raise RuntimeError(
            "forward-mode AD over forward-mode AD has no rule here; use reverse over forward or "
            "forward over reverse, as torch.func.hessian does (jacfwd of jacrev)."
        )
    # What may hold a row per sample is a dependency too: NaN of failed samples is cleaned there.
    sources = [t for t in watch(fn, z0) if _tracked(t) or (has_nan(t) and has_batch(t, z0[0]))]
    closure = survey(fn.fn)
    explicit = make_explicit(fn, sources, closure.modules)
    how = Backward(rule, BackwardStats(), len(z0[0]), fn.coupled)
    problem = _Problem(explicit, len(z0), how, solver, callback)
    out = _SolveFunction.apply(problem, *z0, *sources)
    problem.constants.append(Constants(fn, closure))
    # Copies: the caller may write into them, a backward pass reads z*.
    value, (code, steps, residual, relative) = [x.clone() for x in out[: len(z0)]], out[len(z0) :]
    evaluations, syncs = problem.counted
    numbers = code, steps, residual, relative, evaluations, syncs
    return Iterated(value, *numbers, coupled=how.coupled, backward=how.stats)


def solve_detached(fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
    """Solve without a graph; the value is a constant for whatever differentiates it later."""
    with torch.no_grad():
        if not transforms_active():
            return iterate(fn, [z.detach() for z in z0], solver, callback)
        done = solve_functional(fn, z0, solver, GMRES(), callback)
    done.value = [v.detach() for v in done.value]
    return done


def make_explicit(
    fn: Map, sources: Sequence[Tensor], modules: Sequence[nn.Module], *, all_used: bool = False
) -> Explicit:
    """T as a function of z and of the tensors it depends on, wherever it finds them.

    Modules are remembered with the tensors they hold now: ``functional_call`` puts others
    in their place before a backward pass. ``all_used`` says that T is known to use every source.
    """
    held = [(m, dict([*m.named_parameters(), *m.named_buffers()])) for m in modules]

    def explicit(z: Leaves, deps: Sequence[Tensor]) -> Leaves:
        mode = Substitute(sources, deps)
        with contextlib.ExitStack() as stack:
            for module, tensors in held:
                stack.enter_context(_reparametrize_module(module, tensors))
            stack.enter_context(mode)
            out = fn(z)
        out = mode.swapped(out)
        if all_used and len(mode.met) < len(mode.swap):
            raise RuntimeError(
                "the map uses a tensor where Python does not see it (inside a torch.jit module), "
                "so that a gradient with create_graph=True would leave it out. Call the module as "
                "it was before scripting or tracing, or use Unrolled()."
            )
        return out

    return explicit


def _tracked(t: Tensor) -> bool:
    if t.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return True
    return forward_mode_active() and forward_ad.unpack_dual(t).tangent is not None


def _pull(fn: Callable[..., Any], *primals: Any) -> Callable[[Any], Any]:
    return torch.func.vjp(fn, *primals)[1]


def _push(fn: Callable[[Any], Any], primal: Any, tangent: Any) -> Any:
    """The product of fn's Jacobian with a tangent, by reverse mode twice, because forward mode does
    not nest inside a dual level."""
    value, pull = torch.func.vjp(fn, primal)[:2]
    start = pytree.tree_map(torch.zeros_like, value)
    return _pull(lambda w: pull(w)[0], start)(tangent)[0]


class _SolveFunction(torch.autograd.Function):
    @staticmethod
    def forward(problem: _Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = problem.count
        z0, deps = [t.detach() for t in tensors[:n]], [t.detach() for t in tensors[n:]]
        with torch.no_grad():
            done = _run(problem, z0, deps)
        value = [v.clone() for v in done.value]  # not views: a tangent need not lie as they do
        return (*value, done.result, done.steps, done.residual, done.relative)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        problem: _Problem = inputs[0]
        n = problem.count
        ctx.problem = problem
        ctx.mark_non_differentiable(*output[n:])
        ctx.save_for_backward(*output[: n + 1], *inputs[1 + n :])
        ctx.save_for_forward(*output[: n + 1], *inputs[1 + n :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        problem: _Problem = ctx.problem
        n = problem.count
        if any(held.changed() for held in problem.constants):
            raise changed_in_place()
        z, deps, failed = _saved(ctx)
        g = keep_samples(~failed, grads[:n])
        found = backward_functional(problem.fn, z, deps, g, problem.how)
        return (None, *([None] * n), *found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        problem: _Problem = ctx.problem
        fn, n = problem.fn, problem.count
        z, deps, failed = _saved(ctx)
        pairs = zip(deps, tangents[1 + n :], strict=True)
        moves = [torch.zeros_like(d) if t is None else t for d, t in pairs]
        offset = keep_samples(~failed, _push(lambda d: fn(z, d), deps, moves))

        def tangent(t: Leaves, given: Sequence[Tensor]) -> Leaves:
            start, at, rest = given[:n], list(given[n : 2 * n]), given[2 * n :]
            return add(start, _push(lambda x: fn(x, rest), at, t))

        t = _solve_affine(tangent, offset, [*z, *deps], problem.how)
        return (*t, None, None, None, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], problem: _Problem, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        if problem.callback is not None:
            raise RuntimeError("a callback cannot follow a solve under vmap; call it without one.")
        size, n, dims = info.batch_size, problem.count, in_dims[1:]
        given = [t if d is None else t.movedim(d, 0) for t, d in zip(tensors, dims, strict=True)]
        z0 = [
            t.unsqueeze(0).expand(size, *t.shape) if d is None else t
            for t, d in zip(given[:n], dims[:n], strict=True)
        ]
        dep_dims = [None if d is None else 0 for d in dims[n:]]
        shapes = [t.shape for t in z0]

        def batched(z: Leaves, deps: Sequence[Tensor]) -> Leaves:
            stacked = [x.unflatten(0, s[:2]) for x, s in zip(z, shapes, strict=True)]
            out = torch.vmap(problem.fn, in_dims=(0, dep_dims))(stacked, list(deps))
            return [x.flatten(0, 1) for x in out]

        wide = _Problem(batched, n, problem.how, problem.solver, constants=problem.constants)
        out = _SolveFunction.apply(wide, *[x.flatten(0, 1) for x in z0], *given[n:])
        split = tuple(x.unflatten(0, shapes[0][:2]) for x in out)
        return split, (0,) * len(split)


def _saved(ctx: Any) -> tuple[Leaves, list[Tensor], Tensor]:
    """z* and the dependencies with failed samples cleaned, and which samples [B] failed."""
    n, saved = ctx.problem.count, ctx.saved_tensors
    failed = blown_up(saved[n])
    z = [lend(x, failed) for x in saved[:n]]
    return z, [clean(d, failed) for d in saved[n + 1 :]], failed


def backward_functional(
    fn: Explicit, z: Leaves, deps: Sequence[Tensor], g: Leaves, how: Backward
) -> Leaves:
    """(∂T/∂deps)ᵀu with u = g + Jᵀu, differentiable in z, deps and g to any order."""
    n = len(z)

    def adjoint(u: Leaves, given: Sequence[Tensor]) -> Leaves:
        offset, at, rest = given[:n], list(given[n : 2 * n]), given[2 * n :]
        return add(offset, _pull(lambda x: fn(x, rest), at)(u)[0])

    u = _solve_affine(adjoint, g, [*z, *deps], how)
    return list(_pull(lambda d: fn(z, d), list(deps))(u)[0])


def _solve_affine(fn: Explicit, offset: Leaves, rest: Sequence[Tensor], how: Backward) -> Leaves:
    """x = offset + Lx with L = fn(·, (0, rest)), differentiable in offset and rest."""
    affine = _Problem(fn, len(offset), how)
    return list(_SolveFunction.apply(affine, *offset, *offset, *rest)[: len(offset)])


def _run(problem: _Problem, z0: Leaves, deps: list[Tensor]) -> Iterated:
    how, n = problem.how, problem.count
    if problem.solver is None:
        still = [torch.zeros_like(d) for d in deps[:n]] + deps[n:]
        offset = problem.fn([torch.zeros_like(z) for z in z0], deps)
        return how.outcome(lambda v: problem.fn(v, still), offset)

    def plain(z: Any) -> Any:
        return tuple(problem.fn(list(z), deps))

    spec = pytree.tree_structure(tuple(z0))
    fn = Map(plain, (), spec, z0, coupled=how.coupled, group=how.group)
    done = iterate(fn, z0, problem.solver, problem.callback)
    how.coupled = how.coupled or done.coupled
    problem.counted[:] = done.evaluations, done.syncs
    if done.counts is not None:
        report_failures(done.counts, "fixed_point", problem.solver, z0[0].dtype)
    return done
