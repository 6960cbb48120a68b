"""Proximal gradient on the hidden problem, accelerated, with restart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.engine.options import check_number, options
from equilibria.engine.solver import Bounds, Choice, Point, Solver
from equilibria.engine.transforms import functorch_active
from equilibria.engine.tree import Leaves, add, sample_dot, scale_samples, subtract


@dataclass
class MomentumState:
    """The last answer T(y) and each sample's momentum counter t."""

    last: Leaves | None
    t: Tensor  # [B]


@options
class ProximalGradient(Solver):
    """z ← T_τ(y),  y ← z + ((t − 1)/t₊)(z − z₋),  t₊ = (1 + √(1 + 4t²))/2  (FISTA).

    T_τ(z) = prox_{τf}(z − τ∇g(z)) has the fixed points of the layer's own map for every τ > 0, so
    this solves layers whose plain iteration oscillates. The step comes from the bounds
    m ⪯ ∇²g ⪯ L: 1/L with acceleration, 2/(m + L) without. A sample's momentum restarts when it
    points uphill, ⟨y − z, z − z₋⟩ > 0 (O'Donoghue and Candès). State memory: 2 states.
    """

    max_steps: int = 500
    tau: float | None = None
    """The step; None takes it from the problem's bounds."""
    accelerate: bool = True
    fall = 1.0
    accelerated = True

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_number(self, "tau", low=0.0, low_open=True, optional=True)

    @property
    def stride(self) -> float | None:
        return None if self.accelerate else 1.0

    def for_problem(self, bounds: Bounds) -> Choice:
        if self.tau is not None:
            return Choice(self, self.tau, "ProximalGradient with the given step")
        modulus, smoothness = bounds()
        tau = proximal_step(modulus, smoothness, accelerate=self.accelerate)
        return Choice(self, tau, "ProximalGradient with its step from the bounds on the Hessian")

    def init(self, z: Leaves) -> MomentumState:
        dtype = torch.float64 if z[0].dtype == torch.float64 else torch.float32
        return MomentumState(None, torch.ones(z[0].shape[0], dtype=dtype, device=z[0].device))

    def step(self, point: Point, state: MomentumState) -> tuple[Leaves, MomentumState]:
        if not self.accelerate or state.last is None:
            return point.f, MomentumState(point.f, state.t)
        moved = subtract(point.f, state.last)
        # y − z = −(T(y) − y): uphill where the residual opposes the last move.
        uphill = sample_dot(point.residual, moved) < 0
        t = torch.where(uphill, 1.0, state.t)
        following = 0.5 * (1.0 + torch.sqrt(1.0 + 4.0 * t * t))
        momentum = torch.where(uphill, 0.0, (t - 1.0) / following)
        y = add(point.f, scale_samples(momentum, moved))
        return y, MomentumState(point.f, following)

    def loop_state(self, z: Leaves) -> list[Tensor]:
        return [self.init(z).t, *(x.clone() for x in z)]  # with t = 1, the last answer is unused

    def loop_step(self, point: Point, held: list[Tensor]) -> tuple[Leaves, list[Tensor]]:
        y, state = self.step(point, MomentumState(held[1:], held[0]))
        assert state.last is not None
        return y, [state.t.clone(), *(x.clone() for x in state.last)]

    def restart(self, state: MomentumState, stalled: Tensor) -> MomentumState:
        return MomentumState(state.last, torch.where(stalled, 1.0, state.t))


def proximal_step(
    modulus: float | Tensor, smoothness: float | Tensor, *, accelerate: bool
) -> float | Tensor:
    """τ = 1/L with acceleration, 2/(m + L) without (1/L where m ≤ 0 or is not known)."""
    if isinstance(modulus, float) and isinstance(smoothness, float) and 0 < smoothness < math.inf:
        known = not accelerate and 0.0 < modulus < math.inf
        return 2.0 / (modulus + smoothness) if known else 1.0 / smoothness
    m = torch.as_tensor(modulus, dtype=torch.float64)
    upper = torch.as_tensor(smoothness, dtype=torch.float64)
    unknown = torch.isinf(upper) | (upper <= 0)
    unread = functorch_active() and unknown.ndim  # vmap cannot read: the samples fail
    if not unread and bool(unknown.all()):
        raise ValueError(
            "ProximalGradient needs a positive, finite bound on the curvature and found "
            f"L = {float(upper.max()):g}. Give the step itself, ProximalGradient(tau=...), or "
            "bound the norm of W."
        )
    # Of one sample among others: NaN, so that its result code says that it failed.
    tau = torch.where(unknown, math.nan, 1.0 / upper)
    if not accelerate:
        tau = torch.where(torch.isfinite(m) & (m > 0), 2.0 / (m + upper), tau)
    return float(tau) if tau.ndim == 0 else tau
