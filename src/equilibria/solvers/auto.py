"""Auto: the solver that the problem's certificate asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.options import options
from equilibria.engine.solver import Bounds, Choice, Point, Solver
from equilibria.engine.tree import Leaves

from .anderson import Anderson
from .picard import Picard
from .proximal_gradient import ProximalGradient, proximal_step

_EASY = 0.3
_SHARED = tuple(f.name for f in dataclasses.fields(Solver))


@options
class Auto(Solver):
    """Choose by the contraction factor ρ = max(|1 − m|, |L − 1|) of the layer's map, and say so.

    ρ ≤ 0.3: Picard (a step gains half a digit, nothing beats it). ρ < 1: Anderson, damped by
    β = min(1, 2/(m + L)), which centers the spectrum of I − J. ρ ≥ 1, where plain iteration may
    oscillate: Anderson on T_τ with τ = 2/(m + L) if m > 0, for then T_τ contracts with the factor
    (L − m)/(L + m); else ProximalGradient, which descends everywhere. Where the bounds differ from
    sample to sample, ProximalGradient with a step for each: it serves all of them, so that an
    answer does not depend on batch mates. The tolerances and limits given here are handed on;
    ``max_steps`` is at least 500 for ProximalGradient unless it was set.
    ``Solution.choice`` says what was chosen and why. On a plain fixed point, where no bounds are
    known, Auto is Anderson.
    """

    def for_problem(self, bounds: Bounds) -> Choice:
        modulus, smoothness = bounds()
        m = torch.as_tensor(modulus, dtype=torch.float64)
        upper = torch.as_tensor(smoothness, dtype=torch.float64)
        if (m.ndim or upper.ndim) and bool(torch.isfinite(upper).all()):
            return self._descent(
                (modulus, smoothness), "the bounds differ from sample to sample; a step for each"
            )
        factor = float(torch.maximum((1.0 - m).abs(), (upper - 1.0).abs()).max())
        known = f"contraction factor at most {factor:.3g}"
        if factor <= _EASY:
            return Choice(self._as(Picard), 1.0, f"Picard: {known}, so plain iteration is fastest")
        if factor < 1.0:
            damping = min(1.0, float((2.0 / (m + upper)).min()))
            return Choice(self._as(Anderson, damping=damping), 1.0, f"Anderson: {known}")
        if not bool(torch.isfinite(upper).all()):
            return Choice(
                self._as(Anderson), 1.0, "Anderson: no bound on the curvature is known (local only)"
            )
        why = f"plain iteration is no contraction ({known})"
        if bool((m > 0).all()):
            tau = proximal_step(modulus, smoothness, accelerate=False)
            rate = float(((upper - m) / (upper + m)).max())
            reason = (
                f"Anderson on ProximalGradient's step T_τ: {why}; G is strongly convex, and T_τ "
                f"contracts with {rate:.3g}"
            )
            return Choice(self._as(Anderson), tau, reason)
        return self._descent((modulus, smoothness), f"{why}; G is not certified convex")

    def _descent(self, bounds: tuple[float | Tensor, float | Tensor], why: str) -> Choice:
        chosen = self._as(ProximalGradient)
        tau = chosen.for_problem(lambda: bounds).tau
        return Choice(chosen, tau, f"ProximalGradient: {why}")

    def _as(self, kind: type[Solver], **own: Any) -> Solver:
        shared = {name: getattr(self, name) for name in _SHARED}
        if kind is ProximalGradient and self.max_steps == Solver.max_steps:
            shared["max_steps"] = ProximalGradient.max_steps
        return kind(**shared, **own)

    def for_map(self) -> Solver:
        return self._as(Anderson)

    def init(self, z: Leaves) -> Any:
        return self.for_map().init(z)

    def step(self, point: Point, state: Any) -> tuple[Leaves, Any]:
        return self.for_map().step(point, state)

    def restart(self, state: Any, stalled: Tensor) -> Any:
        return self.for_map().restart(state, stalled)

    def take(self, state: Any, index: Tensor) -> Any:
        return self.for_map().take(state, index)
