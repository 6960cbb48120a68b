"""Phantom gradients: a few damped steps at the solution stand in for the inverse Jacobian."""

from __future__ import annotations

from typing import Literal

import torch

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback, Iterated
from equilibria.engine.jacobian import pull
from equilibria.engine.maps import Map
from equilibria.engine.options import check_number, options
from equilibria.engine.result import BackwardStats
from equilibria.engine.solver import Solver
from equilibria.engine.transforms import outside_compile, transforms_active
from equilibria.engine.tree import Leaves

from .detached import solve_detached


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
        if self.form == "neumann" and transforms_active():
            raise RuntimeError(
                "Phantom(form='neumann') is a first-order rule of plain autograd; under torch.func "
                "or forward-mode AD use Phantom(form='unrolled') or Implicit()."
            )
        done = solve_detached(fn, z0, solver, callback)
        if torch.is_grad_enabled():
            if self.form == "unrolled":
                done.value = self._unrolled(fn, done.value)
            else:
                done.value = self._neumann(fn, done.value)
        return done

    def _unrolled(self, fn: Map, z: Leaves) -> Leaves:
        for _ in range(self.steps):
            f = fn(z)
            if self.damping == 1.0:
                z = f
            else:
                z = [torch.lerp(a, b, self.damping) for a, b in zip(z, f, strict=True)]
        return z

    @outside_compile("the Neumann form reads the autograd graph; compile the map instead")
    def _neumann(self, fn: Map, z: Leaves) -> Leaves:
        inside = [x.detach().requires_grad_() for x in z]
        outputs = fn(inside)
        values = [f.detach() for f in outputs]
        if not any(f.requires_grad for f in outputs):
            return values

        def series(grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            term = [self.damping * g for g in grads]
            total = list(term)
            for _ in range(self.steps - 1):
                pulled = pull(outputs, inside, term)
                term = [
                    torch.add((1.0 - self.damping) * t, p, alpha=self.damping)
                    for t, p in zip(term, pulled, strict=True)
                ]
                total = [a + b for a, b in zip(total, term, strict=True)]
            return tuple(total)

        return list(_Series.apply(series, *outputs))


class _Series(torch.autograd.Function):
    """f ↦ f, whose incoming gradient is replaced by a Neumann series of it."""

    @staticmethod
    def forward(ctx, series, *outputs):  # type: ignore[no-untyped-def]
        ctx.series = series
        return tuple(f.view_as(f) for f in outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        return (None, *ctx.series(grads))
