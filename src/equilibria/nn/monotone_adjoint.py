"""Implicit gradients of a splitting, by the transposed splitting."""

from __future__ import annotations

import dataclasses

import torch

from equilibria.adjoints import Implicit
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, Iterated
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import BackwardStats
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import functorch_active
from equilibria.engine.tree import Leaves
from equilibria.solvers.forward_backward import SplittingIteration

__all__ = ["TransposedSplitting"]

_KRYLOV = Implicit()


@options
class TransposedSplitting(Adjoint):
    """Implicit differentiation whose system u = g + Jᵀu is solved as the forward pass was.

    J is the Jacobian of the splitting's step S. With D = diag prox′ ∈ [0, 1] and V the resolvent,

        forward-backward:   u ← g + (I − α(I − Wᵀ))D u,
        Peaceman–Rachford:  u ← g + (2D − I)(2Vᵀ − I) u,

    the splittings of the transposed problem: the same step α, the same V, and the same contraction
    factor as forward, so they converge wherever the forward solve does. After a solver that is no
    splitting this is ``Implicit()``. The tolerance is the solver's, relative to the gradient that
    leaves the solve, which is about α times u (and never below 4 units of rounding of u); a forward
    solve of fixed steps has the default one of its dtype here.
    """

    def run(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback | None,
        backward: BackwardStats,
    ) -> Iterated:
        return self._implicit(fn, z0, solver).run(fn, z0, solver, callback, backward)

    def _implicit(self, fn: Map, z0: Leaves, solver: Solver) -> Implicit:
        if not isinstance(solver, SplittingIteration):
            return _KRYLOV
        if not torch.is_grad_enabled():
            return _KRYLOV  # no gradient will be asked for
        if solver.fixed_steps:
            solver = dataclasses.replace(
                solver, rtol=None, max_steps=max(solver.max_steps, _BACKWARD_STEPS)
            )
        traced = torch.compiler.is_compiling() or functorch_active()
        if fn.surrogate is not None and not traced:
            share = min(1.0, float(fn.surrogate.near(*fn.args)) / 2)
            rtol = share * solver.relative_tolerance(fn.dtypes(z0)[0], z0[0].device.type)
            least = 4 * torch.finfo(z0[0].dtype).eps
            solver = dataclasses.replace(solver, rtol=max(rtol, least))
        return Implicit(solver=solver)


_BACKWARD_STEPS = 500
