"""Implicit differentiation: gradients of z* = T(z*, θ) from z* alone.

    dL/dθ = (∂T/∂θ)ᵀu,   (I − J)ᵀu = dL/dz,   J = ∂T/∂z at z*.

The system for u is solved by products with Jᵀ, all taken from one evaluation graph of T. The
equation u = g + Jᵀu is itself a fixed point, of an affine map that depends on g, z* and θ; when
a graph is asked for (second derivatives), the same rule is applied to it, so every order is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, Iterated, iterate
from equilibria.engine.jacobian import pull
from equilibria.engine.krylov import GMRES, LinearSolver, MatVec
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import BackwardStats, Result
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import outside_compile, transforms_active
from equilibria.engine.tree import Leaves, where_sample

from .backward import note_backward, solve_adjoint
from .capture import Evaluation, evaluate
from .functional import backward_functional, make_explicit, solve_functional

_BLOWN = {Result.diverged, Result.nonfinite}


@options
class Implicit(Adjoint):
    """The implicit function theorem; memory does not grow with the number of solver steps.

    Gradients reach the arguments and everything that the map captures. The backward tolerance is
    relative to the incoming gradient, so that the scale of the loss does not matter. Samples whose
    forward solve diverged or met NaN get a zero gradient, and are counted.
    """

    solver: LinearSolver | Solver = GMRES()
    """Backward: GMRES (default), CG where J is symmetric, or any fixed-point solver."""

    def __post_init__(self) -> None:
        if not isinstance(self.solver, (LinearSolver, Solver)):
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
        if transforms_active():
            return solve_functional(fn, z0, solver, self.solver, callback, backward)
        with torch.no_grad():
            done = iterate(fn, [z.detach() for z in z0], solver, callback)
        if torch.is_grad_enabled():
            done.value = _attach_outside_compile(fn, done, self.solver, backward)
        return done


@outside_compile("Implicit reads the autograd graph; compile the map instead")
def _attach_outside_compile(
    fn: Map, done: Iterated, solver: LinearSolver | Solver, stats: BackwardStats
) -> Leaves:
    blown = None
    if done.counts is None or _BLOWN & set(done.counts):
        blown = (done.result == int(Result.diverged)) | (done.result == int(Result.nonfinite))
        stats.masked = sum((done.counts or {}).get(code, 0) for code in _BLOWN)
    return attach(fn, done.value, _Rule(solver, stats, blown))


@dataclass
class _Rule:
    """How the backward system is solved, and where its numbers go."""

    solver: LinearSolver | Solver
    stats: BackwardStats
    blown: Tensor | None = None  # samples whose gradient is to be zero

    def mask(self, g: Leaves) -> Leaves:
        if self.blown is None:
            return g
        return where_sample(~self.blown, g, [torch.zeros_like(x) for x in g])

    def solve(self, transpose: MatVec, g: Leaves) -> Leaves:
        """u with u − transpose(u) = g."""
        outcome = solve_adjoint(self.solver, transpose, self.mask(g))
        note_backward(self.stats, outcome)
        return self.mask(outcome.value)


def attach(fn: Map, z: Leaves, rule: _Rule) -> Leaves:
    """Leaves with the value of z whose gradient is the implicit one."""
    graph = evaluate(fn, z, rule.blown)
    if not graph.sources:
        return z
    return list(_ImplicitFunction.apply(fn, graph, rule, len(z), *z, *graph.sources))


def attach_linear(
    product: Map, b: Leaves, x: Leaves, solver: LinearSolver, stats: BackwardStats
) -> Leaves:
    """Leaves with the value of x = A⁻¹b, differentiable in b and what A captures."""

    def richardson(state: Any, right: Any) -> Any:
        return tuple(p + q - r for p, q, r in zip(state, right, product(list(state)), strict=True))

    spec = pytree.tree_structure(tuple(b))
    return attach(Map(richardson, (tuple(b),), spec, b), x, _Rule(solver, stats))


class _ImplicitFunction(torch.autograd.Function):
    """(z*, sources) ↦ z*, with the implicit gradient to the sources."""

    @staticmethod
    def forward(
        ctx: Any, fn: Map, graph: Evaluation, rule: _Rule, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.fn, ctx.graph, ctx.rule = fn, graph, rule
        outputs = tuple(t.view_as(t) for t in tensors[:count])
        ctx.save_for_backward(*outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        graph: Evaluation = ctx.graph
        rule: _Rule = ctx.rule
        n = len(graph.inside)
        nothing = [None] * (4 + n)
        if torch.is_grad_enabled():
            z, sources = list(ctx.saved_tensors), graph.sources
            explicit = make_explicit(ctx.fn, sources)
            found = backward_functional(
                explicit, z, sources, rule.mask(list(grads)), rule.solver, rule.stats
            )
            return (*nothing, *found)

        def transpose(v: Leaves) -> Leaves:
            return pull(graph.outputs, graph.inside, v)

        u = rule.solve(transpose, [g.detach() for g in grads])
        return (*nothing, *pull(graph.outputs, graph.stand_ins, u))
