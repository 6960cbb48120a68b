"""Unrolled: differentiate the solver's own steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, iterate
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import Iterated, Result
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import functorch_active, transforms_active
from equilibria.engine.tree import Leaves, repeat_samples, unflatten, where_sample

from .graph import (
    Constants,
    blown_up,
    changed_in_place,
    cleaned,
    cut_off,
    finite_samples,
    host_may_read,
    isolate,
    lend,
    survey,
    without_gradient,
)


@options
class Unrolled(Adjoint):
    """Back-propagate through every step; exact for the iterate returned, at the cost of memory.

    The only adjoint through which z0 receives a gradient. Where a sample fails, the steps are taken
    again with a healthy sample in its place. A fixed-step solve on a GPU, or compiled, does not
    wait to learn of it: there samples are judged by T(z0), at the cost of one evaluation, and one
    that overflows later can spoil shared weights. With ``checkpoint=True`` each evaluation of the
    map is recomputed in the backward pass, so that only iterates are stored.
    """

    checkpoint: bool = False

    def run(self, fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
        if functorch_active() and not solver.fixed_steps:
            raise RuntimeError(
                "Unrolled with a tolerance stops by the data, which torch.func transforms cannot "
                "follow. Use a fixed number of steps (rtol=0, atol=0, max_steps=...) or "
                "adjoint=Implicit()."
            )
        if self.checkpoint and transforms_active():
            raise RuntimeError(
                "Unrolled(checkpoint=True) recomputes by plain autograd; under torch.func or "
                "forward-mode AD use checkpoint=False, or Implicit(), which stores no steps."
            )
        if not torch.is_grad_enabled():
            return iterate(fn, z0, solver, callback)
        if solver.fixed_steps and not host_may_read(z0[0]):
            return self._run_unseen(fn, z0, solver, callback)
        done = iterate(self._stored(fn), z0, solver, callback)
        part = isolate(fn, done)
        if part is None:
            done.value = without_gradient(fn, done.value, *z0)
        elif part.failed is not None:
            # The graph holds NaN or infinity, and 0·NaN is NaN: take the steps again without it.
            again = self._stored(part.fn)
            start = [lend(z, part.failed) for z in z0]
            if not part.apart:
                again = _pinned(again, part.failed, start)
            healthy = iterate(again, start, solver)
            done.value = cut_off(part.failed, healthy.value, [x.detach() for x in done.value])
            # Steps that rounding magnifies are not the same ones again: say what these reached.
            for name in ("result", "steps", "residual", "relative"):
                ends = getattr(done, name), getattr(healthy, name)
                setattr(done, name, torch.where(part.failed, *ends))
            if done.counts is not None:
                done.counts = {Result(c): n for c, n in Counter(done.result.tolist()).items()}
            done.evaluations += healthy.evaluations
            done.syncs += healthy.syncs
        return done

    def _stored(self, fn: Map) -> Map:
        """The map, recomputed in the backward pass where that was asked for."""
        if not self.checkpoint:
            return fn
        if not torch.compiler.is_compiling():
            fn = _unchanged(fn)
        return fn.wrapped(lambda inner, *given: checkpoint(inner, *given, use_reentrant=False))

    def _run_unseen(self, fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
        """Fixed steps of which the host sees nothing: samples whose T(z0) is not finite are out."""
        with torch.no_grad():
            first = fn([z.detach() for z in z0])
        sick = ~finite_samples(first)
        if fn.coupled and solver.joins:  # one answer a group, which fails as a whole
            sick = repeat_samples(sick.view(-1, fn.group).any(1), fn.group)
        again = self._stored(cleaned(fn, sick))
        done = iterate(again, [lend(z, sick) for z in z0], solver, callback)
        done.evaluations += 1
        done.result = done.result.masked_fill(sick, int(Result.nonfinite))
        done.residual = done.residual.masked_fill(sick, torch.nan)
        done.relative = done.relative.masked_fill(sick, torch.nan)
        done.value = cut_off(blown_up(done.result), done.value, [z.detach() for z in z0])
        return done


def _pinned(fn: Map, failed: Tensor, at: Leaves) -> Map:
    """The map with the states of failed samples held at ``at``."""

    def held(inner: Callable[..., Any], z: Any, *args: Any) -> Any:
        leaves = where_sample(failed, at, pytree.tree_leaves(z))
        return inner(unflatten(leaves, fn.spec), *args)

    return fn.wrapped(held)


def _unchanged(fn: Map) -> Map:
    """The map, which raises if what it uses was changed in place by others since its last call."""
    constants = Constants(fn, survey(fn.fn))

    def checked(inner: Callable[..., Any], *given: Any) -> Any:
        if constants.changed():
            raise changed_in_place()
        out = inner(*given)
        constants.note()
        return out

    return fn.wrapped(checked)
