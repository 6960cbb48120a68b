"""Twins of the linear layer by other kernels (GEQ full, Table 4): polynomial and sigmoid."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from equilibria.engine.options import check_number
from equilibria.engine.tree import per_sample
from equilibria.problems import HiddenProblem, Polynomial, Problem, Sigmoidal
from equilibria.problems.kernels import SIGMOID_CURVATURE, inner
from equilibria.problems.priors import at_least_float32
from equilibria.solvers import Anderson, ProximalGradient

from .layer import LayerOptions, WeightedLayer


class _ScalarKernelLayer(WeightedLayer):
    """G(z) = 1ᵀf(z) + ½‖z‖² − φ(⟨c, z⟩) − ½‖Wz‖², c = Ux + b in the space of z."""

    default_solver = ProximalGradient()
    shown: ClassVar[tuple[str, ...]] = (*WeightedLayer.shown, "radius")

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        radius: float | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(channels, mid, features=channels, **options)
        self.radius = radius
        check_number(self, "radius", low=0.0, low_open=True, optional=True)

    def features(self, x: Tensor) -> Tensor:
        """c = Ux + b, scaled into the ball ‖c‖ ≤ radius where one was given."""
        c = super().features(x)
        if self.radius is None:
            return c
        # In units in which no square leaves the dtype; and no square root near zero.
        largest = at_least_float32(c.detach().abs().flatten(1).amax(1))
        unit = largest.clamp_min(self.radius)
        d, radius = c / per_sample(unit, c), self.radius / unit
        size = torch.maximum(inner(d, d), radius.square()).sqrt()
        return (d * per_sample(self.radius / size, c)).to(c.dtype)

    def start(self, problem: HiddenProblem, x: Tensor) -> Tensor:
        return problem.default_start()


class PolynomialEq(_ScalarKernelLayer):
    """T(z) = prox_f(WᵀWz + d(a + ⟨c, z⟩)ᵈ⁻¹c), c = Ux + b (GEQ full, Table 4, has a = 0).

    As printed (``offset=0``) z = 0 is an equilibrium for every input; it is kept with a warning and
    a start away from zero. Also with a = 1, G is bounded below only where c is small: for d = 2 it
    is strongly convex, and the equilibrium unique, when ‖W‖² + 2‖c‖² < 1; for d ≥ 3 it is never
    bounded on z ≥ 0 and an equilibrium near zero is all that can be hoped for. ‖c‖ grows with the
    number of pixels, so give ``radius`` to hold ‖c‖ ≤ radius.

    Args:
        channels, mid: channels of z and Ux; of Wz.
        degree, offset: d ≥ 2; a, 1.0 or 0.0.
        radius: scale c into the ball of this radius, sample by sample; None: leave it.
        options: see ``LayerOptions``. The solver is ProximalGradient() if not given; Anderson()
            where d is odd and above 2, for then no bound on the curvature is known from which to
            take a step.
    """

    shown = (*_ScalarKernelLayer.shown, "degree", "offset")

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        degree: int = 2,
        offset: float = 1.0,
        radius: float | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        if options.get("solver") is None and degree in range(3, 99, 2):
            options["solver"] = Anderson()
        super().__init__(channels, mid, radius=radius, **options)
        self.degree, self.offset = degree, offset
        # Checks both options, and warns of the kernel as printed, before the first input.
        Polynomial(torch.zeros(1, 1), torch.zeros(1, 1), degree, offset)

    def problem(self, x: Tensor) -> Problem:
        """G(·; x). In training mode this moves W's power iteration."""
        c = self.features(x)
        return Problem(self.prior, Polynomial(self.operator(), c, self.degree, self.offset))

    def nominal_bounds(self, problem: HiddenProblem) -> tuple[Any, Any] | None:
        norm = self.nominal_norm()
        if norm is None or self.degree != 2:
            return None
        c = problem.inputs()[0].detach()
        return 1.0 - norm**2 - 2.0 * inner(c, c), 1.0


class SigmoidEq(_ScalarKernelLayer):
    """T(z) = prox_f(WᵀWz + (1 − tanh²⟨c, z⟩)c), c = Ux + b (GEQ full, Table 4).

    Strongly convex, with one equilibrium, for the inputs with ‖W‖² + 0.7698‖c‖² < 1
    (docs/facts.md, fact 6); bounded below for every input when ‖W‖ < 1. ``radius`` and the other
    options as in PolynomialEq; scaling into the ball does not expand, so that ‖U‖₂ bounds x ↦ c.
    """

    def problem(self, x: Tensor) -> Problem:
        """G(·; x). In training mode this moves W's power iteration."""
        c = self.features(x)
        return Problem(self.prior, Sigmoidal(self.operator(), c))

    def nominal_bounds(self, problem: HiddenProblem) -> tuple[Any, Any] | None:
        norm = self.nominal_norm()
        if norm is None:
            return None
        c = problem.inputs()[0].detach()
        bend = SIGMOID_CURVATURE * inner(c, c)
        return 1.0 - norm**2 - bend, 1.0 + bend
