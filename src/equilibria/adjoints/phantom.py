"""Phantom gradients: a few damped steps at the solution stand in for the inverse Jacobian."""

from __future__ import annotations

from typing import Literal

import torch

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback
from equilibria.engine.krylov import MatVec
from equilibria.engine.maps import Map
from equilibria.engine.options import check_number, options
from equilibria.engine.result import Iterated
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import is_differentiated, transforms_active
from equilibria.engine.tree import Leaves, add

from .functional import solve_detached
from .graph import Isolated, carry, cut_off
from .implicit import Rule, attach_isolated


@options
class Phantom(Adjoint):
    """The gradient of ``steps`` updates z ← (1 − β)z + βT(z) from the detached solution.

    Unrolled form (default): the steps are taken at the moving iterate, as in the papers
    (GEQ: 5 steps, β = 0.8). Neumann form: the graph of one evaluation at z* is reused,
    u = β Σₖ (βJᵀ + (1 − β)I)ᵏ g, k < steps, so that memory does not grow with ``steps``. Both
    approximate the implicit gradient and agree with it as ``steps`` grows where T contracts.

    The value is the solver's own, which its residual and result code speak of; the papers return
    the last of the updates.
    """

    steps: int = 5
    damping: float = 0.8
    form: Literal["unrolled", "neumann"] = "unrolled"

    def __post_init__(self) -> None:
        check_number(self, "steps", low=1, integer=True)
        check_number(self, "damping", low=0.0, high=1.0, low_open=True)
        if self.form not in ("unrolled", "neumann"):
            raise ValueError(f"Phantom(form={self.form!r}): expected 'unrolled' or 'neumann'.")

    def run(self, fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
        derived = is_differentiated()
        if self.form == "neumann" and transforms_active() and derived:
            raise RuntimeError(
                "Phantom(form='neumann') is a first-order rule of plain autograd; under torch.func "
                "or forward-mode AD use Phantom(form='unrolled') or Implicit()."
            )
        done = solve_detached(fn, z0, solver, callback)
        if derived:
            # A compiler cannot read the autograd graph, but evaluates what is the same once.
            if self.form == "unrolled" or torch.compiler.is_compiling():
                done.value = carry(fn, done, self._unrolled)
            else:
                stats = done.backward
                done.value = attach_isolated(fn, done, lambda bad: Rule(stats, bad, self._series))
        return done

    def _unrolled(self, part: Isolated) -> Leaves:
        z = part.z
        for _ in range(self.steps):
            at = z
            if self.form == "neumann":  # at z*, with the gradient of z
                at = [a + (b - b.detach()) for a, b in zip(part.z, z, strict=True)]
            f = part.fn(at)
            if self.damping != 1.0:
                f = [torch.lerp(a, b, self.damping) for a, b in zip(z, f, strict=True)]
            z = cut_off(part.failed, f, part.z)
        return z

    def _series(self, transpose: MatVec, g: Leaves) -> Leaves:
        """u = β Σₖ (βJᵀ + (1 − β)I)ᵏ g, k < steps: Neumann's series, of first order only."""
        term = [self.damping * x for x in g]
        total = term
        for _ in range(self.steps - 1):
            pairs = zip(term, transpose(term), strict=True)
            term = [torch.add((1.0 - self.damping) * t, p, alpha=self.damping) for t, p in pairs]
            total = add(total, term)
        return total
