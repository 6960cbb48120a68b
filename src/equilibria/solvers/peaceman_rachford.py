"""Peaceman–Rachford splitting: reflect in the prior, reflect in the linear part."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from equilibria.engine.options import options
from equilibria.engine.tree import map_tensors

from .forward_backward import Inclusion, Splitting, SplittingSolver, blend


def peaceman_rachford_factor(m: float, upper: float, alpha: float) -> float:
    """√(1 − 4αm/(1 + 2αm + α²L²)) ≥ the Lipschitz constant of the step.

    With w = Vu the reflection is (2V − I)u = (I − αM)w against u = (I + αM)w, M = I − W, and
    (1 − 2αt + α²s)/(1 + 2αt + α²s) falls in t = ⟨Mw, w⟩/‖w‖² ≥ m and rises in s ≤ L²; the other
    reflection, 2prox − I, is nonexpansive.
    """
    square = alpha * alpha * upper * upper
    return math.sqrt(max(0.0, 1.0 - 4.0 * alpha * m / (1.0 + 2.0 * alpha * m + square)))


@options
class PeacemanRachford(SplittingSolver):
    """u ← (2V − I)(2 prox_{αf} − I)u + 2αVc,  z = prox_{αf}(u),  V = (I + α(I − W))⁻¹.

    Converges for every α > 0, with the factor √(1 − 4αm/(1 + 2αm + α²L²)): about 1 − m/L a step
    where forward-backward has 1 − m²/(2L²). V is computed once a solve (a dense inverse, or one by
    FFT for convolutions) and serves the backward pass too. The default step is √n/‖I − W‖_F, one
    over the root mean square of the singular values.

    The engine iterates u and judges z: ``stats.residual`` is ‖T(z) − z‖ of the layer's own map. A
    warm start z becomes u = z − α((I − W)z − c), which is the fixed point where z is the solution.
    """

    max_steps: int = 500
    patience: int = 96

    def split(self, inclusion: Inclusion, z0: Any, c: Tensor) -> Splitting:
        """The Peaceman–Rachford step, on the space where the resolvent is cheap."""
        space = inclusion.lifted()
        alpha = self.step_size(inclusion)
        inverse = space.resolvent(alpha)
        source, start = inclusion.lift(c), inclusion.lift(z0)

        def step(u: Any, shift: Tensor, *_: Tensor) -> Any:
            reflected = blend(2.0, space.prox(u, alpha), -1.0, u)
            return blend(2.0, inverse(_add(reflected, shift)), -1.0, reflected)

        def read(u: Any) -> Any:
            return inclusion.drop(space.prox(u, alpha))

        def own(u: Any, _: Tensor, c: Tensor) -> tuple[Any, Any]:
            z = read(u)
            return z, inclusion.step(z, c)

        def near(*_: Tensor) -> float | Tensor:
            # With w = V(2z − u + αc): S(u) − u = 2(w − z) and ‖T(z) − z‖ ≤ ‖(I/α + M)(w − z)‖.
            return 2.0 * alpha / (1.0 + alpha * inclusion.modulus)

        first = blend(1.0 - alpha, start, alpha, space.argument(start, source))
        # A failed sample returns a number, at which gradients of shared weights can be taken.
        first = map_tensors(lambda part: part.nan_to_num(0.0, 0.0, 0.0), first)
        given = "step α = √n/‖I − W‖_F" if self.alpha is None else "given step α"
        reason = f"PeacemanRachford with the {given}"
        inputs = (alpha * source, c)
        return Splitting(step, own, near, None, first, inputs, read, reason)

    def step_size(self, inclusion: Inclusion) -> float | Tensor:
        """α as given; or √n/‖I − W‖_F as a number on the device."""
        return inclusion.scale().reciprocal() if self.alpha is None else self.alpha


def _add(z: Any, c: Tensor) -> Any:
    """z + c, c in the first part of a state of several."""
    return z + c if isinstance(z, Tensor) else (z[0] + c, *z[1:])
