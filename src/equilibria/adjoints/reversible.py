"""Reversible: steps that can be undone, so that none is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, iterate, shown
from equilibria.engine.maps import Map, Surrogate
from equilibria.engine.options import options
from equilibria.engine.result import Iterated
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import outside_compile, transforms_active
from equilibria.engine.tree import (
    Leaves,
    add,
    keep_samples,
    sample_norm,
    where_sample,
    without_graph,
)

from .backward import refuse_batches
from .graph import cut_off, evaluate, evaluate_isolated, lend, without_gradient

_LOST = 1e-3  # how far from z0 the undone steps may end, relative to the states


@options
class Reversible(Adjoint):
    """y ← (1 − β)y + βT(z),  z ← (1 − β)z + βT(y): the exact gradient of these steps.

    The backward pass undoes them one by one, z ← (z − βT(y))/(1 − β) and so on, and differentiates
    each where it was taken (McCallum et al. 2025). Memory is that of one evaluation of T, whatever
    the number of steps; a step costs two evaluations, and two more with their products backward.

    It goes with ``Picard(damping=β)``, β < 1, which says when to stop; y and z start from z0, which
    receives a gradient. Undoing n steps enlarges rounding errors up to (1 − β)⁻ⁿ times, so y and z
    are kept in float64: small β or few steps are exact to the rounding of T. Steps whose undoing
    does not end at z0 again are an error: their gradient would be wrong.
    """

    def run(self, fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
        beta = _damping(fn, solver)
        pair = _Pair(fn, beta, [z.dtype for z in z0])
        start = [z.detach().double() for z in z0]
        n = len(z0)
        watch = shown(callback, lambda both, norm: (pair.narrow(both[n:]), norm))
        with torch.no_grad():
            plain = replace(solver, damping=1.0)  # type: ignore[call-arg]
            done = iterate(pair.map(start), [*start, *start], plain, watch)
        if done.coupled and not fn.coupled:
            raise RuntimeError(
                "Reversible: the map makes the samples of a batch depend on each other, which was "
                "found out after some steps; say so from the start, fixed_point(..., coupled=True)."
            )
        done.evaluations = pair.evaluations
        both, done.value = done.value, pair.narrow(done.value[n:])
        if torch.is_grad_enabled():
            taken = done.steps if solver.fixed_steps else done.steps - 1
            done.value = _attach(fn, done, z0, both, _Steps(pair, taken))
        return done


def _damping(fn: Map, solver: Solver) -> float:
    """β of the steps, or an error that says what goes with this adjoint."""
    if transforms_active():
        raise RuntimeError(
            "Reversible undoes its steps by plain autograd; under torch.func or forward-mode AD "
            "use Unrolled() with a fixed number of steps, or Implicit()."
        )
    damping = getattr(solver, "damping", None)
    if solver.stride is None or damping is None or damping >= 1.0:
        raise ValueError(
            f"adjoint=Reversible() got solver={solver!r}: it takes Picard(damping=β) with β < 1, "
            "such as Picard(damping=0.5, max_steps=30)."
        )
    if fn.surrogate is not None:
        raise ValueError(
            "adjoint=Reversible() needs the layer's own map, but the problem is solved through "
            "another one; use Implicit() or Unrolled()."
        )
    return float(damping)


class _Pair:
    """(y, z) ↦ the next pair, on float64; and T in its own dtype."""

    def __init__(self, fn: Map, beta: float, dtypes: list[torch.dtype]) -> None:
        self.fn, self.beta, self.dtypes = fn, beta, dtypes
        self.evaluations = 0

    def narrow(self, leaves: Sequence[Tensor]) -> Leaves:
        return [x.to(d) for x, d in zip(leaves, self.dtypes, strict=True)]

    def mixed(self, old: Sequence[Tensor], image: Leaves) -> tuple[Tensor, ...]:
        """(1 − β)·old + β·image."""
        pairs = zip(old, image, strict=True)
        return tuple((1.0 - self.beta) * x + self.beta * f for x, f in pairs)

    def undone(self, new: Leaves, image: Leaves) -> Leaves:
        """old, from new = (1 − β)·old + β·image."""
        pairs = zip(new, image, strict=True)
        return [(x - self.beta * f) / (1.0 - self.beta) for x, f in pairs]

    def map(self, start: Leaves) -> Map:
        def image(x: Sequence[Tensor], args: Any) -> Leaves:
            self.evaluations += 1
            return self.fn.with_args(args)(self.narrow(x))

        def step(both: Any, *args: Any) -> Any:
            y = self.mixed(both[0], image(both[1], args))
            return y, self.mixed(both[1], image(y, args))

        def own(both: Any, *args: Any) -> tuple[Any, Any]:
            return tuple(self.narrow(both[1])), tuple(image(both[1], args))

        coarse = max(self.dtypes, key=lambda d: torch.finfo(d).eps)
        given = Surrogate(step, own, lambda *args: self.beta, coarse)
        spec = pytree.tree_structure((tuple(start), tuple(start)))
        fn = self.fn
        return Map(given, fn.args, spec, start, coupled=fn.coupled, group=fn.group)


@dataclass
class _Steps:
    """The steps of a solve: of which map, how many of each sample, [B], and what T depends on."""

    pair: _Pair
    taken: Tensor
    sources: list[Tensor] = field(default_factory=list)


@outside_compile("Reversible reads the autograd graph; use Unrolled() in compiled code")
def _attach(fn: Map, done: Iterated, z0: Leaves, both: Leaves, steps: _Steps) -> Leaves:
    found = evaluate_isolated(fn, done, lambda part: evaluate(part.fn, part.z))
    if found is None:
        return without_gradient(fn, done.value, *z0)
    part, graph = found
    if not graph.sources and not any(z.requires_grad for z in z0):
        return done.value
    if part.failed is not None:
        # Copies of a healthy sample that stand still.
        both = [lend(x, part.failed) for x in both]
        steps.taken = torch.where(part.failed, 0, steps.taken)
    # Once each: what is an argument and captured too has a stand-in for either.
    steps.pair.fn, steps.sources = part.fn, list({id(s): s for s in graph.sources}.values())
    value = _ReversibleFunction.apply(steps, len(z0), *done.value, *both, *z0, *steps.sources)
    return cut_off(part.failed, list(value), done.value)


class _ReversibleFunction(torch.autograd.Function):
    """(z, last pair, z0, sources) ↦ z, with the gradient of the steps that led there."""

    @staticmethod
    def forward(ctx: Any, steps: _Steps, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.steps, ctx.count = steps, n
        ctx.save_for_backward(*tensors[n:])
        return tuple(t.clone() for t in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Reversible has no second derivative; use Unrolled() with a fixed number of steps, "
                "or Implicit()."
            )
        refuse_batches(grads)
        n, steps, saved = ctx.count, ctx.steps, ctx.saved_tensors
        y, z = list(saved[:n]), list(saved[n : 2 * n])
        g_z = [g.double() for g in grads]
        g_y = [torch.zeros_like(g) for g in g_z]
        total = {id(s): torch.zeros_like(s) for s in steps.sources}
        for step in range(int(steps.taken.max()), 0, -1):
            active = steps.taken >= step
            z, g_z, g_y = _undo(steps.pair, active, z, y, g_z, g_y, total)
            y, g_y, g_z = _undo(steps.pair, active, y, z, g_y, g_z, total)
        _check_undone(steps, [y, z], list(saved[2 * n : 3 * n]), list(saved[n : 2 * n]))
        start = steps.pair.narrow(add(g_y, g_z))
        return (None, None, *[None] * (3 * n), *start, *total.values())


def _check_undone(steps: _Steps, found: list[Leaves], start: Leaves, end: Leaves) -> None:
    """Raise unless both states are back at the start."""
    size = sample_norm([t.double() for t in (*start, *end)])
    off = [sample_norm([a - b for a, b in zip(x, start, strict=True)]) for x in found]
    lost = torch.maximum(*off) / size.clamp_min(torch.finfo(size.dtype).tiny)
    wrong = (steps.taken > 0) & ~(lost <= _LOST)
    if bool(wrong.any()):
        raise RuntimeError(
            f"Reversible: {int(steps.taken.max())} steps with damping={steps.pair.beta:g} cannot "
            f"be undone in float64: they end {float(lost[wrong].max()):.2g} of the state from z0, "
            "so the gradient would be wrong. Take fewer steps (max_steps, rtol) or a smaller "
            "damping, or use Implicit() or Unrolled()."
        )


def _undo(
    pair: _Pair,
    active: Tensor,
    new: Leaves,
    at: Leaves,
    g_new: Leaves,
    g_at: Leaves,
    total: dict[int, Tensor],
) -> tuple[Leaves, Leaves, Leaves]:
    """old, its gradient and that of ``at``, where new = (1 − β)·old + βT(at) for active samples;
    adds the gradient to what T depends on."""
    graph = evaluate(pair.fn, pair.narrow(at))
    old = where_sample(active, pair.undone(new, without_graph(graph.outputs)), new)
    weight = keep_samples(active, [pair.beta * g for g in g_new])
    pulled = graph.pull([*graph.inside, *graph.stand_ins], pair.narrow(weight))
    for source, g in zip(graph.sources, pulled[len(at) :], strict=True):
        if id(source) not in total:
            raise RuntimeError(
                "Reversible: the map depends on other tensors in an earlier step than at the "
                "answer, so that their gradients would be lost; use Unrolled()."
            )
        total[id(source)] += g
    g_at = [a + g for a, g in zip(g_at, pulled, strict=False)]
    g_old = where_sample(active, [(1.0 - pair.beta) * g for g in g_new], g_new)
    return old, g_old, g_at
