"""Auto: let the bounds of the problem choose the solver."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.options import options
from equilibria.engine.solver import Bounds, Choice, Solver, SolverOptions
from equilibria.engine.transforms import functorch_active

from .anderson import Anderson
from .picard import Picard
from .proximal_gradient import ProximalGradient, proximal_step

_EASY = 0.3
_SHARED = tuple(field.name for field in dataclasses.fields(SolverOptions))


@options
class Auto(SolverOptions):
    """Let ``choose_solver`` choose by the contraction factor ρ of the layer's map, and say so.

    The tolerances and limits given here are handed on; ``max_steps`` is 500 for ProximalGradient
    unless it was set. ``Solution.choice`` says what was chosen and why. On a plain fixed point,
    where no bounds are known, it is Anderson.
    """

    def for_map(self) -> Solver:
        return _with_options(self, Anderson)

    def for_problem(self, bounds: Bounds) -> Choice:
        return choose_solver(self, bounds)


def choose_solver(auto: Auto, bounds: Bounds) -> Choice:
    """The solver for a problem with the bounds m ⪯ ∇²g ⪯ L, and the step τ of its map T_τ.

    By the contraction factor ρ = max(|1 − m|, |L − 1|) of the layer's own map. ρ ≤ 0.3: Picard.
    ρ < 1: Anderson, damped by β = min(1, 2/(m + L)), which centers the spectrum of I − J. ρ ≥ 1,
    where plain iteration may oscillate: Anderson on T_τ with τ = 2/(m + L) if m > 0, for then T_τ
    contracts with the factor (L − m)/(L + m); else ProximalGradient, which descends everywhere.
    Where the bounds differ from sample to sample, ProximalGradient with a step for each, so that an
    answer does not depend on the other samples of the batch.
    """
    modulus, smoothness = bounds()
    m = torch.as_tensor(modulus, dtype=torch.float64)
    upper = torch.as_tensor(smoothness, dtype=torch.float64)

    def descent(why: str) -> Choice:
        return momentum(auto, proximal_step(modulus, smoothness, accelerate=True), why)

    if (m.ndim or upper.ndim) and (functorch_active() or bool(torch.isfinite(upper).all())):
        return descent("the bounds differ from sample to sample; a step for each")
    factor = float(torch.maximum((1.0 - m).abs(), (upper - 1.0).abs()).max())
    known = f"contraction factor at most {factor:.3g}"
    if factor <= _EASY:
        reason = f"Picard: {known}, so plain iteration is fastest"
        return Choice(_with_options(auto, Picard), 1.0, reason)
    if factor < 1.0:
        damping = min(1.0, float((2.0 / (m + upper)).min()))
        return Choice(_with_options(auto, Anderson, damping=damping), 1.0, f"Anderson: {known}")
    if not bool(torch.isfinite(upper).all()):
        reason = "Anderson: no bound on the curvature is known (local only)"
        return Choice(_with_options(auto, Anderson), 1.0, reason)
    why = f"plain iteration is no contraction ({known})"
    if not bool((m > 0).all()):
        return descent(f"{why}; G is not certified convex")
    tau = proximal_step(modulus, smoothness, accelerate=False)
    rate = float(((upper - m) / (upper + m)).max())
    reason = (
        f"Anderson on ProximalGradient's step T_τ: {why}; G is strongly convex, and T_τ "
        f"contracts with {rate:.3g}"
    )
    return Choice(_with_options(auto, Anderson), tau, reason)


def momentum(auto: Auto, tau: float | Tensor, why: str) -> Choice:
    """ProximalGradient with this step."""
    return Choice(_with_options(auto, ProximalGradient), tau, f"ProximalGradient: {why}")


def _with_options(auto: Auto, kind: type[Solver], **own: Any) -> Solver:
    shared = {name: getattr(auto, name) for name in _SHARED}
    if kind is ProximalGradient and auto.max_steps == Auto.max_steps:
        shared["max_steps"] = ProximalGradient.max_steps
    return kind(**shared, **own)
