"""Twins of the linear layer by other kernels (GEQ full, Table 4): polynomial and sigmoid."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.options import check_number
from equilibria.engine.solver import Solver
from equilibria.problems import (
    Coupling,
    HiddenProblem,
    NonNegative,
    Polynomial,
    Prior,
    Problem,
    Sigmoidal,
)
from equilibria.problems.kernels import SIGMOID_CURVATURE, inner
from equilibria.solvers import Anderson, ProximalGradient

from .constraints import Constraint, NormBounded
from .weighted import WeightedLayer

__all__ = ["PolynomialEq", "SigmoidEq"]


class _ScalarKernelLayer(WeightedLayer):
    """G(z) = 1ᵀf(z) + ½‖z‖² − φ(⟨c, z⟩) − ½‖Wz‖², c = Ux + b in the space of z."""

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        in_channels: int | None,
        kernel_size: int | None,
        radius: float | None,
        prior: Prior,
        constraint: Constraint,
        bias: bool,
        solver: Solver | None,
        adjoint: Adjoint | None,
    ) -> None:
        super().__init__(
            channels,
            mid,
            in_channels=in_channels,
            features=channels,
            kernel_size=kernel_size,
            prior=prior,
            constraint=constraint,
            bias=bias,
            solver=ProximalGradient() if solver is None else solver,
            adjoint=adjoint,
        )
        self.radius = radius
        check_number(self, "radius", low=0.0, low_open=True, optional=True)

    def features(self, x: Tensor) -> Tensor:
        """c = Ux + b, scaled into the ball ‖c‖ ≤ radius where one was given."""
        c = super().features(x)
        if self.radius is None:
            return c
        size = inner(c, c).clamp_min(self.radius**2).sqrt()  # no square root near zero
        return (c * (self.radius / size).view(-1, *[1] * (c.ndim - 1))).to(c.dtype)

    @abstractmethod
    def _coupling(self, c: Tensor) -> Coupling:
        """The coupling of this kernel on the features c."""

    def problem(self, x: Tensor) -> Problem:
        """G(·; x). In training mode this moves W's power iteration."""
        return Problem(self.prior, self._coupling(self.features(x)))

    def start(self, problem: HiddenProblem, x: Tensor) -> Tensor:
        return problem.default_start()

    def input_norm_upper(self) -> float:
        """‖U‖₂: scaling into a ball does not expand."""
        return super().input_norm_upper()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, radius={self.radius}"


class PolynomialEq(_ScalarKernelLayer):
    """T(z) = prox_f(WᵀWz + d(a + ⟨c, z⟩)ᵈ⁻¹c), c = Ux + b (GEQ full, Table 4, has a = 0).

    As printed (``offset=0``) z = 0 is an equilibrium for every input; it is kept with a warning and
    a start away from zero. Also with a = 1, G is bounded below only where c is small: for d = 2 it
    is strongly convex, and the equilibrium unique, when ‖W‖² + 2‖c‖² < 1; for d ≥ 3 it is never
    bounded on z ≥ 0 and an equilibrium near zero is all that can be hoped for. ‖c‖ grows with the
    number of pixels, so give ``radius`` to hold ‖c‖ ≤ radius.

    Args:
        channels, mid, in_channels, kernel_size, prior, constraint, bias, adjoint: as in OptEq.
        degree: d ≥ 2.
        offset: a, 1.0 or 0.0.
        radius: scale c into the ball of this radius, sample by sample; None: leave it.
        solver: ProximalGradient() if not given; Anderson() where d is odd and above 2, for then
            no bound on the curvature is known from which to take a step.
    """

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        degree: int = 2,
        offset: float = 1.0,
        in_channels: int | None = None,
        kernel_size: int | None = None,
        radius: float | None = None,
        prior: Prior = NonNegative(),  # noqa: B008
        constraint: Constraint = NormBounded(bound=0.95),  # noqa: B008
        bias: bool = True,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        if solver is None and degree in range(3, 99, 2):
            solver = Anderson()
        super().__init__(
            channels,
            mid,
            in_channels=in_channels,
            kernel_size=kernel_size,
            radius=radius,
            prior=prior,
            constraint=constraint,
            bias=bias,
            solver=solver,
            adjoint=adjoint,
        )
        self.degree, self.offset = degree, offset
        # Checks both options, and warns of the kernel as printed, before the first input.
        Polynomial(torch.zeros(1, 1), torch.zeros(1, 1), degree, offset)

    def _coupling(self, c: Tensor) -> Coupling:
        return Polynomial(self.operator(), c, self.degree, self.offset)

    def nominal_bounds(self, problem: HiddenProblem) -> tuple[Any, Any] | None:
        norm = self.nominal_norm()
        if norm is None or self.degree != 2:
            return None
        c = problem.inputs()[0].detach()
        return 1.0 - norm**2 - 2.0 * inner(c, c), 1.0

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, degree={self.degree}, offset={self.offset:g}"


class SigmoidEq(_ScalarKernelLayer):
    """T(z) = prox_f(WᵀWz + (1 − tanh²⟨c, z⟩)c), c = Ux + b (GEQ full, Table 4).

    Strongly convex, with one equilibrium, for the inputs with ‖W‖² + 0.7698‖c‖² < 1
    (docs/facts.md, fact 6); bounded below for every input when ‖W‖ < 1. ``radius`` as in
    PolynomialEq.

    Args:
        channels, mid, in_channels, kernel_size, prior, constraint, bias, adjoint: as in OptEq.
        radius: scale c into the ball of this radius, sample by sample; None: leave it.
        solver: ProximalGradient() if not given.
    """

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        in_channels: int | None = None,
        kernel_size: int | None = None,
        radius: float | None = None,
        prior: Prior = NonNegative(),  # noqa: B008
        constraint: Constraint = NormBounded(bound=0.95),  # noqa: B008
        bias: bool = True,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        super().__init__(
            channels,
            mid,
            in_channels=in_channels,
            kernel_size=kernel_size,
            radius=radius,
            prior=prior,
            constraint=constraint,
            bias=bias,
            solver=solver,
            adjoint=adjoint,
        )

    def _coupling(self, c: Tensor) -> Coupling:
        return Sigmoidal(self.operator(), c)

    def nominal_bounds(self, problem: HiddenProblem) -> tuple[Any, Any] | None:
        norm = self.nominal_norm()
        if norm is None:
            return None
        c = problem.inputs()[0].detach()
        bend = SIGMOID_CURVATURE * inner(c, c)
        return 1.0 - norm**2 - bend, 1.0 + bend
