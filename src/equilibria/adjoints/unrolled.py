"""Unrolled: differentiate the solver's own steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, Iterated, iterate
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import BackwardStats, Result
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import functorch_active, transforms_active
from equilibria.engine.tree import Leaves

from .detached import refuse_data_dependence
from .quarantine import cut_off, failed_samples, pinned, quarantine, sick_samples


@options
class Unrolled(Adjoint):
    """Back-propagate through every step; exact for the iterate returned, at the cost of memory.

    The only adjoint through which z0 receives a gradient. A sample that overflows in a fixed-step
    solve can spoil the gradients of shared weights here (nothing is known of it in time); with a
    tolerance it cannot. With ``checkpoint=True`` each
    evaluation of the map is recomputed in the backward pass, so that only iterates are stored.
    """

    checkpoint: bool = False

    def run(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback | None,
        backward: BackwardStats,
    ) -> Iterated:
        refuse_data_dependence(solver, "Unrolled")
        if self.checkpoint and transforms_active():
            raise RuntimeError(
                "Unrolled(checkpoint=True) recomputes by plain autograd; under torch.func or "
                "forward-mode AD use checkpoint=False, or Implicit(), which stores no steps."
            )
        if not torch.is_grad_enabled() or functorch_active():
            return iterate(fn, z0, solver, callback)
        if solver.fixed_steps:
            return self._run_fixed(fn, z0, solver, callback)
        done = iterate(self._stored(fn, z0), z0, solver, callback)
        failed = failed_samples(done)
        if failed is not None:
            # Their graph holds NaN or infinity, and 0·NaN is NaN: take the steps again without it.
            clean = self._stored(quarantine(fn, failed), z0)
            again = iterate(pinned(clean, failed, z0), z0, solver)
            done.value = cut_off(failed, again.value, [x.detach() for x in done.value])
        return done

    def _stored(self, fn: Map, like: Leaves) -> Map:
        """The map, recomputed in the backward pass where that was asked for."""
        if not self.checkpoint:
            return fn
        inner = fn.fn

        def recomputed(z: Any, *args: Any) -> Any:
            return checkpoint(inner, z, *args, use_reentrant=False)

        return Map(recomputed, fn.args, fn.spec, like, fn.surrogate)

    def _run_fixed(
        self, fn: Map, z0: Leaves, solver: Solver, callback: Callback | None
    ) -> Iterated:
        """No sample is known to have failed in time: NaN inputs are solved as zero, and said."""
        sick = sick_samples(fn, z0[0])
        if sick is None:
            return iterate(self._stored(fn, z0), z0, solver, callback)
        clean = self._stored(quarantine(fn, torch.ones_like(sick)), z0)
        done = iterate(clean, z0, solver, callback)
        done.result = torch.where(sick, int(Result.nonfinite), done.result).to(torch.int8)
        done.value = cut_off(failed_samples(done), done.value, [z.detach() for z in z0])
        return done
