"""One-step (Jacobian-free) gradients."""

from __future__ import annotations

import torch

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, Iterated
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import BackwardStats
from equilibria.engine.solver import Solver
from equilibria.engine.tree import Leaves

from .detached import solve_detached
from .quarantine import cut_off, failed_samples, quarantine


@options
class OneStep(Adjoint):
    """z = T(z*) with z* held constant: the gradient with (I − J)⁻¹ replaced by I.

    The cheapest adjoint; a descent direction where ‖J‖ is well below 1, and biased always.
    """

    def run(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback | None,
        backward: BackwardStats,
    ) -> Iterated:
        done = solve_detached(fn, z0, solver, callback)
        if torch.is_grad_enabled():
            failed = failed_samples(done)
            if failed is not None:
                fn = quarantine(fn, failed)
            done.value = cut_off(failed, fn(done.value), done.value)
        return done
