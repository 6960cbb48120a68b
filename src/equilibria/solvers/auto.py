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
from .proximal_gradient import ProximalGradient

_EASY = 0.3
_SHARED = tuple(f.name for f in dataclasses.fields(Solver))


@options
class Auto(Solver):
    """Choose by the contraction factor ρ = max(|1 − m|, |L − 1|) of the layer's map, and say so.

    ρ ≤ 0.3: Picard (a step gains half a digit, nothing beats it). ρ < 1: Anderson. ρ ≥ 1, where
    plain iteration may oscillate: ProximalGradient, which converges wherever m > 0 and descends
    everywhere. The tolerances and limits given here are handed on; ``max_steps`` is at least 500
    for ProximalGradient unless it was set. ``Solution.choice`` says what was chosen and why.
    On a plain fixed point, where no bounds are known, Auto is Anderson.
    """

    def for_problem(self, bounds: Bounds) -> Choice:
        modulus, smoothness = bounds()
        m = torch.as_tensor(modulus, dtype=torch.float64)
        upper = torch.as_tensor(smoothness, dtype=torch.float64)
        factor = float(torch.maximum((1.0 - m).abs(), (upper - 1.0).abs()).max())
        known = f"contraction factor at most {factor:.3g}"
        if factor <= _EASY:
            return Choice(self._as(Picard), 1.0, f"Picard: {known}, so plain iteration is fastest")
        if factor < 1.0:
            return Choice(self._as(Anderson), 1.0, f"Anderson: {known}")
        if not bool(torch.isfinite(upper).all()):
            return Choice(
                self._as(Anderson), 1.0, "Anderson: no bound on the curvature is known (local only)"
            )
        chosen = self._as(ProximalGradient)
        convex = "strongly convex" if bool((m > 0).all()) else "not certified convex"
        choice = chosen.for_problem(lambda: (modulus, smoothness))
        reason = f"ProximalGradient: plain iteration is no contraction ({known}); G is {convex}"
        return Choice(chosen, choice.tau, reason)

    def _as(self, kind: type[Solver]) -> Solver:
        shared = {name: getattr(self, name) for name in _SHARED}
        if kind is ProximalGradient and self.max_steps == Solver.max_steps:
            shared["max_steps"] = ProximalGradient.max_steps
        return kind(**shared)

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
