"""Unrolled: differentiate the solver's own steps."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import checkpoint

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, Iterated, iterate
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import BackwardStats
from equilibria.engine.solver import Solver
from equilibria.engine.tree import Leaves

from .detached import refuse_data_dependence


@options
class Unrolled(Adjoint):
    """Back-propagate through every step; exact for the iterate returned, at the cost of memory.

    The only adjoint through which z0 receives a gradient. With ``checkpoint=True`` each
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
        if self.checkpoint:
            inner = fn.fn

            def recomputed(z: Any, *args: Any) -> Any:
                return checkpoint(inner, z, *args, use_reentrant=False)

            fn = Map(recomputed, fn.args, fn.spec, z0)
        return iterate(fn, z0, solver, callback)
