"""Sequential averaging (SAM): the fixed point of least R (Xie et al. 2021, Eq 11)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from equilibria.engine.options import check_number, options
from equilibria.engine.solver import Point, Solver
from equilibria.engine.tree import Leaves


@runtime_checkable
class HasGradient(Protocol):
    """What is asked of a regularizer R: its gradient. ``problems.Regularizer`` has it."""

    def grad(self, z: Tensor) -> Tensor:
        """∂R(z), shaped as z [B, ...]."""


@options
class SequentialAveraging(Solver):
    """z ← β_k S_{λ_k}(z) + (1 − β_k)T(z),  S_λ(z) = (1 − γλ)z − γ∂R(z)  (Eq 11).

    γ = 1/(2L_z), β_k = η/k^ρ, λ_k = η/k^c, η = min{√(2L_z), L_z/2, 1/2}, k = 1, 2, …, where L_z is
    a Lipschitz constant of ∂R. For a nonexpansive T, a convex R with one minimizer z̄ on the fixed
    points of T, and ρ, c > 0 with ρ + 2c < 1, z_k tends to z̄ (Theorem 5): of many fixed points, the
    one with the least R. A non-convex R is allowed and nothing is then promised.

    It is slow: ‖T(z) − z‖ falls like k^{−ρ} and meets no usual tolerance. So the default is a fixed
    number of steps, as in Algorithm 1. With ``rtol`` or ``atol`` a sample ends when it is close to
    *a* fixed point, which does not say that R is least there. Leaves are regularized one by one.
    """

    rtol: float | None = 0.0
    """0 with ``atol=0``: exactly ``max_steps`` steps."""
    max_steps: int = 20
    """K; the paper takes 20 on CIFAR-10 and 5 on ImageNet."""
    regularizer: HasGradient | None = None
    """R, anything with ``grad(z)``; None is ½‖z‖², which finds the fixed point of least norm."""
    lipschitz: float | None = None
    """L_z; None takes it from ``regularizer.curvature()`` (1 for ½‖z‖²)."""
    rho: float = 0.3
    """ρ: how fast the averaging fades. The bias of z_k falls like k^{−ρ}."""
    c: float = 0.3
    """c: how fast the extra strong convexity λ_k fades."""
    joins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_number(self, "lipschitz", low=0.0, low_open=True, optional=True)
        check_number(self, "rho", low=0.0, low_open=True)
        check_number(self, "c", low=0.0, low_open=True)
        if not self.rho + 2.0 * self.c < 1.0:
            raise ValueError(
                f"SequentialAveraging(rho={self.rho!r}, c={self.c!r}): Theorem 5 needs "
                f"rho + 2c < 1, got {self.rho + 2.0 * self.c:g}. Lower rho or c; 0.3 and 0.3 do."
            )
        if self.regularizer is not None and not isinstance(self.regularizer, HasGradient):
            raise TypeError(
                f"SequentialAveraging(regularizer={self.regularizer!r}): expected a regularizer "
                "such as SquaredNorm(), an object with grad(z), or None for ½‖z‖²."
            )
        _ = self.smoothness  # a bound that is missing is an error here, not in the first solve

    @property
    def smoothness(self) -> float:
        """L_z, a Lipschitz constant of ∂R."""
        if self.lipschitz is not None:
            return float(self.lipschitz)
        if self.regularizer is None:
            return 1.0
        bound = math.inf
        if hasattr(self.regularizer, "curvature"):
            found = self.regularizer.curvature()
            bound = max(abs(float(found.lower)), abs(float(found.upper)))
        if not 0.0 < bound < math.inf:
            raise ValueError(
                f"SequentialAveraging(regularizer={self.regularizer!r}): no positive finite "
                f"Lipschitz constant of its gradient is known (found {bound:g}). Give one that "
                "holds where the iterates are, lipschitz=..."
            )
        return bound

    def schedule(self, k: int) -> tuple[float, float, float]:
        """(β_k, λ_k, γ) for k = 1, 2, …"""
        bound = self.smoothness
        eta = min(math.sqrt(2.0 * bound), bound / 2.0, 0.5)
        return eta / k**self.rho, eta / k**self.c, 1.0 / (2.0 * bound)

    def init(self, z: Leaves) -> int:
        return 1

    def step(self, point: Point, state: int) -> tuple[Leaves, Any]:
        beta, decay, gamma = self.schedule(state)
        keep = beta * (1.0 - gamma * decay)
        following = []
        for z, f in zip(point.z, point.f, strict=True):
            push = z if self.regularizer is None else self.regularizer.grad(z)
            following.append((1.0 - beta) * f + (keep * z - (beta * gamma) * push))
        return following, state + 1
