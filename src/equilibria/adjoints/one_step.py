"""One-step (Jacobian-free) gradients."""

from __future__ import annotations

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import Iterated
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import is_differentiated
from equilibria.engine.tree import Leaves

from .functional import solve_detached
from .graph import carry


@options
class OneStep(Adjoint):
    """The gradient of T(z*) with z* held constant: (I − J)⁻¹ replaced by I.

    The value is z* itself, the one that the solver judged, not T(z*). The cheapest adjoint; a
    descent direction where ‖J‖ is well below 1, and biased always.
    """

    def run(self, fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
        done = solve_detached(fn, z0, solver, callback)
        if is_differentiated():
            done.value = carry(fn, done, lambda part: part.fn(part.z))
        return done
