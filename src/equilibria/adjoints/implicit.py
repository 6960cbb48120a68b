"""Implicit differentiation: gradients of z* = T(z*, θ) from z* alone.

    dL/dθ = (∂T/∂θ)ᵀu,   (I − J)ᵀu = dL/dz,   J = ∂T/∂z at z*.

The system for u is solved by products with Jᵀ, all taken from one evaluation graph of T. It is
itself a fixed point, of an affine map u ↦ g + Jᵀu; when a graph is asked for (second derivatives),
the same rule is applied to it, so every order is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, in_state_dtype, iterate
from equilibria.engine.krylov import GMRES, LinearSolver, MatVec
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import BackwardStats, Iterated
from equilibria.engine.solver import Solver, SolverOptions
from equilibria.engine.transforms import outside_compile, transforms_active
from equilibria.engine.tree import (
    Leaves,
    add,
    join_samples,
    keep_samples,
    part_samples,
    power_of_two,
    sample_norm,
    scale_samples,
    subtract,
)

from .backward import Backward, refuse_batches, solve_adjoint
from .functional import Explicit, backward_functional, make_explicit, solve_functional
from .graph import (
    Evaluation,
    blown_up,
    cleaned,
    cut_off,
    evaluate,
    evaluate_isolated,
    lend,
    without_gradient,
)


@dataclass
class Rule:
    """What stands for (I − Jᵀ)⁻¹; samples that ``failed`` [B] get zero."""

    stats: BackwardStats
    failed: Tensor | None
    apply: Callable[[MatVec, Leaves], Leaves]
    """u ≈ (I − Jᵀ)⁻¹g of (v ↦ Jᵀv, g)."""
    how: Backward | None = None
    """How u is solved for where it is differentiated; None where it may not be."""

    def mask(self, g: Leaves) -> Leaves:
        return g if self.failed is None else keep_samples(~self.failed, g)

    def solve(self, transpose: MatVec, g: Leaves) -> Leaves:
        """u, transpose(v) = Jᵀv."""
        if self.failed is None:
            return self.apply(transpose, g)
        if self.stats.masked < 0:
            self.stats.masked = int(self.failed.sum())
        # A failed sample is a constant: also to samples that it is coupled to.
        return self.apply(lambda v: self.mask(transpose(v)), self.mask(g))

    def differentiable(
        self, explicit: Explicit, z: Leaves, sources: Sequence[Tensor], g: Leaves
    ) -> Leaves:
        """(∂T/∂sources)ᵀu as a differentiable function of z, sources and g."""
        if self.how is None:
            raise RuntimeError(
                "Phantom(form='neumann') has no second derivative; use Phantom(form='unrolled') or "
                "Implicit()."
            )
        return backward_functional(explicit, z, sources, self.mask(g), self.how)


def solving(how: Backward, failed: Tensor | None = None) -> Rule:
    """u solves u = g + Jᵀu: exact to the solver's tolerance, and differentiable to any order."""
    return Rule(how.stats, failed, how.solve, how)


@options
class Implicit(Adjoint):
    """The implicit function theorem; memory does not grow with the number of solver steps.

    Gradients reach the arguments and everything that the map captures. The backward tolerance is
    relative to the incoming gradient, so that the scale of the loss does not matter. Samples whose
    forward solve diverged or met NaN get a zero gradient, and are counted.
    """

    solver: LinearSolver | SolverOptions = GMRES()
    """Backward: GMRES (default), CG where J is symmetric, or any fixed-point solver. With a fixed
    number of steps (``GMRES(rtol=0, restart=8)``: so many products) torch.compile traces it."""

    def __post_init__(self) -> None:
        if not isinstance(self.solver, (LinearSolver, SolverOptions)):
            raise TypeError(
                f"Implicit(solver={self.solver!r}): expected GMRES(...), CG(...) or a fixed-point "
                "solver such as Anderson(...)."
            )

    def run(self, fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
        if transforms_active():
            return solve_functional(fn, z0, solver, self._own_solver(), callback)
        with torch.no_grad():
            done = iterate(fn, [z.detach() for z in z0], solver, callback)
        if torch.is_grad_enabled():
            done.value = self.attached(fn, done)
        return done

    def attached(self, fn: Map, done: Iterated) -> Leaves:
        """The answer of a solve of z = fn(z), however it was found, with its gradient."""
        solver = self._own_solver()
        if torch.compiler.is_compiling() and _is_blind(solver):
            return _attach_compiled(fn, done, solver)
        return _attach_outside_compile(fn, done, solver)

    def _own_solver(self) -> LinearSolver | Solver:
        given = self.solver
        # Auto is Anderson here; a splitting, which refuses plain maps, is taken as it is.
        return given if isinstance(given, (LinearSolver, Solver)) else given.for_map()


def _is_blind(solver: LinearSolver | Solver) -> bool:
    """Whether a backward solve reads no number, so that it can be traced by a compiler."""
    if isinstance(solver, Solver):
        return solver.fixed_steps
    return isinstance(solver, GMRES) and solver.rtol == solver.atol == 0.0


def _attach_compiled(fn: Map, done: Iterated, solver: LinearSolver | Solver) -> Leaves:
    """The same inside torch.compile, which traces T(z*) itself: what T depends on needs not be
    searched for. Products with Jᵀ are those of T evaluated once more in the backward pass."""
    if torch.is_autocast_enabled(done.value[0].device.type):  # which a backward pass is not under
        return in_state_dtype(fn, done.value, lambda cast: _attach_compiled(cast, done, solver))
    failed = blown_up(done.result)
    part = cleaned(fn, failed)
    z = [lend(x, failed).detach() for x in done.value]

    def step(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.bare(list(leaves)))

    group = fn.group if fn.coupled else 1
    found = _CompiledFunction.apply(step, solver, group, len(z), *step(*z), *z)
    return cut_off(failed, list(found), done.value)


class _CompiledFunction(torch.autograd.Function):
    """(T(z*), z*) ↦ z*; the gradient to T(z*) is u = g + Jᵀu."""

    @staticmethod
    def forward(
        ctx: Any, step: Any, solver: Any, group: int, n: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.solver, ctx.group = step, solver, group
        ctx.save_for_backward(*tensors[n:])
        return tuple(t.view_as(t) for t in tensors[n:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        z, solver, group = ctx.saved_tensors, ctx.solver, ctx.group
        pulled = torch.func.vjp(ctx.step, *z)[1]

        def transpose(v: Leaves) -> Leaves:
            return list(pulled(tuple(v)))

        def joined(v: Leaves) -> Leaves:
            return subtract(v, join_samples(transpose(part_samples(v)), group))

        if isinstance(solver, GMRES):
            u = part_samples(solver.solve_blind(joined, join_samples(grads, group)))
        else:
            u = solve_adjoint(solver, transpose, list(grads), coupled=group > 1, group=group).value
        return (None, None, None, None, *u, *[None] * len(z))


@outside_compile("Implicit reads the autograd graph; compile the map instead")
def _attach_outside_compile(fn: Map, done: Iterated, solver: LinearSolver | Solver) -> Leaves:
    stats = done.backward
    how = Backward(solver, stats, len(done.result), done.coupled)

    def rule(failed: Tensor | None) -> Rule:
        if failed is not None:
            stats.masked = -1 if done.counts is None else int(failed.sum())
        return solving(how, failed)

    return attach_isolated(fn, done, rule)


def attach_isolated(fn: Map, done: Iterated, rule: Callable[[Tensor | None], Rule]) -> Leaves:
    """The answer of a solve with the gradient of a rule, which is made for the failed samples."""
    taken = evaluate_isolated(fn, done, lambda part: evaluate(part.fn, part.z))
    if taken is None:
        rule(torch.ones_like(done.result, dtype=torch.bool))
        return without_gradient(fn, done.value)
    part, graph = taken
    return cut_off(part.failed, attach(part.fn, part.z, graph, rule(part.failed)), done.value)


def attach(fn: Map, z: Leaves, graph: Evaluation, rule: Rule) -> Leaves:
    """Leaves with the value of z whose gradient the rule gives; ``graph``: of fn at z."""
    if not graph.sources:
        return z
    explicit = make_explicit(fn, graph.sources, graph.closure.modules, all_used=True)
    found = _ImplicitFunction.apply(explicit, graph, rule, len(z), *z, *graph.sources)
    return [x.clone() for x in found]  # the caller may write into them, a backward pass reads z*


def attach_linear(product: Map, b: Leaves, done: Iterated, solver: LinearSolver) -> Leaves:
    """The answer x = A⁻¹b of a solve, differentiable in b and what A captures."""
    with torch.no_grad():
        ones = [torch.ones_like(x) for x in done.value]
        size = sample_norm(product(ones)) / sample_norm(ones)
    # One for all that A couples: rows in units of their own would make it unsymmetric for CG.
    inverse = 1.0 / power_of_two(size.amax().expand_as(size) if done.coupled else size)

    def richardson(state: Any, right: Any) -> Any:
        # x + (b − Ax)/‖A‖, about: of x + b − Ax rounding would leave nothing of a small A.
        return tuple(add(state, scale_samples(inverse, subtract(right, product(list(state))))))

    spec = pytree.tree_structure(tuple(b))
    how = Backward(solver, done.backward, len(done.result), done.coupled)
    fn = Map(richardson, (tuple(b),), spec, b)
    return attach(fn, done.value, evaluate(fn, done.value), solving(how))


class _ImplicitFunction(torch.autograd.Function):
    """(z*, sources) ↦ z*, with the implicit gradient to the sources."""

    @staticmethod
    def forward(
        ctx: Any, explicit: Explicit, graph: Evaluation, rule: Rule, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.explicit, ctx.graph, ctx.rule = explicit, graph, rule
        outputs = tuple(t.view_as(t) for t in tensors[:count])
        # Sources are saved so that autograd notices when one is changed before a second order.
        ctx.save_for_backward(*outputs, *tensors[count:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_batches(grads)
        graph: Evaluation = ctx.graph
        rule: Rule = ctx.rule
        n = len(graph.inside)
        nothing = [None] * (4 + n)
        if torch.is_grad_enabled():
            saved = ctx.saved_tensors
            z, sources = list(saved[:n]), list(saved[n:])
            graph.check_unchanged(lambda: ctx.explicit(z, sources))
            found = rule.differentiable(ctx.explicit, z, sources, list(grads))
            return (*nothing, *found)

        def transpose(v: Leaves) -> Leaves:
            return graph.pull(graph.inside, v)

        u = rule.solve(transpose, [g.detach() for g in grads])
        return (*nothing, *graph.pull(graph.stand_ins, u))
