"""Phantom gradients: a few damped steps at the solution stand in for the inverse Jacobian."""

from __future__ import annotations

from typing import Literal

import torch

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, Iterated
from equilibria.engine.maps import Map
from equilibria.engine.options import check_number, options
from equilibria.engine.result import BackwardStats
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import (
    forward_levels,
    forward_mode_active,
    outside_compile,
    transforms_active,
)
from equilibria.engine.tree import Leaves

from .detached import solve_detached
from .implicit import attach
from .quarantine import cut_off, failed_samples, quarantine
from .rules import SeriesRule


@options
class Phantom(Adjoint):
    """``steps`` updates z ← (1 − β)z + βT(z) from the detached solution, with a graph.

    Unrolled form (default): the steps are taken at the moving iterate, as in the papers
    (GEQ: 5 steps, β = 0.8). Neumann form: the graph of one evaluation at z* is reused,
    u = β Σₖ (βJᵀ + (1 − β)I)ᵏ g, k < steps, so that memory does not grow with ``steps``. Both
    approximate the implicit gradient and agree with it as ``steps`` grows where T contracts.
    """

    steps: int = 5
    damping: float = 0.8
    form: Literal["unrolled", "neumann"] = "unrolled"

    def __post_init__(self) -> None:
        check_number(self, "steps", low=1, integer=True)
        check_number(self, "damping", low=0.0, high=1.0, low_open=True)
        if self.form not in ("unrolled", "neumann"):
            raise ValueError(f"Phantom(form={self.form!r}): expected 'unrolled' or 'neumann'.")

    def run(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback | None,
        backward: BackwardStats,
    ) -> Iterated:
        derived = torch.is_grad_enabled() or forward_mode_active() or forward_levels() > 0
        if self.form == "neumann" and transforms_active() and derived:
            raise RuntimeError(
                "Phantom(form='neumann') is a first-order rule of plain autograd; under torch.func "
                "or forward-mode AD use Phantom(form='unrolled') or Implicit()."
            )
        done = solve_detached(fn, z0, solver, callback)
        if torch.is_grad_enabled():
            failed = failed_samples(done)
            if failed is not None:
                fn = quarantine(fn, failed)
            if self.form == "unrolled":
                done.value = self._unrolled(fn, done.value, failed)
            else:
                done.value = self._neumann(fn, done.value, backward, failed)
        return done

    def _unrolled(self, fn: Map, solution: Leaves, failed: torch.Tensor | None) -> Leaves:
        z = solution
        for _ in range(self.steps):
            f = fn(z)
            if self.damping == 1.0:
                z = f
            else:
                z = [torch.lerp(a, b, self.damping) for a, b in zip(z, f, strict=True)]
            z = cut_off(failed, z, solution)
        return z

    @outside_compile("the Neumann form reads the autograd graph; compile the map instead")
    def _neumann(
        self, fn: Map, z: Leaves, stats: BackwardStats, failed: torch.Tensor | None
    ) -> Leaves:
        return attach(fn, z, SeriesRule(self.steps, self.damping, stats, failed))
