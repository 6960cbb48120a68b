"""Implicit differentiation: gradients of z* = T(z*, θ) from z* alone.

    dL/dθ = (∂T/∂θ)ᵀu,   (I − J)ᵀu = dL/dz,   J = ∂T/∂z at z*.

The system for u is solved by products with Jᵀ, all taken from one evaluation graph of T. The
equation u = g + Jᵀu is itself a fixed point, of an affine map that depends on g, z* and θ; when
a graph is asked for (second derivatives), the same rule is applied to it, so every order is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, Iterated, iterate
from equilibria.engine.krylov import GMRES, LinearSolver
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import BackwardStats
from equilibria.engine.solver import Solver, SolverOptions
from equilibria.engine.spectral import pull
from equilibria.engine.transforms import outside_compile, transforms_active
from equilibria.engine.tree import Leaves

from .capture import Evaluation, evaluate
from .functional import Explicit, make_explicit, solve_functional
from .quarantine import cut_off, evaluate_isolated, without_gradient
from .rules import Rule, SolveRule


@options
class Implicit(Adjoint):
    """The implicit function theorem; memory does not grow with the number of solver steps.

    Gradients reach the arguments and everything that the map captures. The backward tolerance is
    relative to the incoming gradient, so that the scale of the loss does not matter. Samples whose
    forward solve diverged or met NaN get a zero gradient, and are counted.
    """

    solver: LinearSolver | SolverOptions = GMRES()
    """Backward: GMRES (default), CG where J is symmetric, or any fixed-point solver."""

    def __post_init__(self) -> None:
        if not isinstance(self.solver, (LinearSolver, SolverOptions)):
            raise TypeError(
                f"Implicit(solver={self.solver!r}): expected GMRES(...), CG(...) or a fixed-point "
                "solver such as Anderson(...)."
            )

    def run(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback | None,
        backward: BackwardStats,
    ) -> Iterated:
        given = self.solver
        # Auto is Anderson here; a splitting, which refuses plain maps, is taken as it is.
        own = given if isinstance(given, (LinearSolver, Solver)) else given.for_map()
        if transforms_active():
            return solve_functional(fn, z0, solver, own, callback, backward)
        with torch.no_grad():
            done = iterate(fn, [z.detach() for z in z0], solver, callback)
        if torch.is_grad_enabled():
            done.value = _attach_outside_compile(fn, done, own, backward)
        return done


@outside_compile("Implicit reads the autograd graph; compile the map instead")
def _attach_outside_compile(
    fn: Map, done: Iterated, solver: LinearSolver | Solver, stats: BackwardStats
) -> Leaves:
    def rule(failed: Tensor | None) -> Rule:
        if failed is not None:
            stats.masked = -1 if done.counts is None else int(failed.sum())
        return SolveRule(solver, stats, failed, coupled=done.coupled)

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
    explicit = make_explicit(fn, graph.sources, graph.modules)
    return list(_ImplicitFunction.apply(explicit, graph, rule, len(z), *z, *graph.sources))


def attach_linear(
    product: Map, b: Leaves, x: Leaves, solver: LinearSolver, stats: BackwardStats, coupled: bool
) -> Leaves:
    """Leaves with the value of x = A⁻¹b, differentiable in b and what A captures."""

    def richardson(state: Any, right: Any) -> Any:
        return tuple(p + q - r for p, q, r in zip(state, right, product(list(state)), strict=True))

    spec = pytree.tree_structure(tuple(b))
    rule = SolveRule(solver, stats, coupled=coupled)
    fn = Map(richardson, (tuple(b),), spec, b)
    return attach(fn, x, evaluate(fn, x), rule)


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
        graph: Evaluation = ctx.graph
        rule: Rule = ctx.rule
        n = len(graph.inside)
        nothing = [None] * (4 + n)
        if torch.is_grad_enabled():
            saved = ctx.saved_tensors
            z, sources = list(saved[:n]), list(saved[n:])
            found = rule.differentiable(ctx.explicit, z, sources, list(grads))
            return (*nothing, *found)

        def transpose(v: Leaves) -> Leaves:
            return pull(graph.outputs, graph.inside, v)

        u = rule.solve(transpose, [g.detach() for g in grads])
        return (*nothing, *pull(graph.outputs, graph.stand_ins, u))
