"""Forward-backward splitting, and what every splitting of a monotone inclusion shares.

    0 ∈ (I − W)z − c + ∂f(z),   I − W ⪰ mI,   L ≥ ‖I − W‖.

A splitting replaces the layer's own map z ↦ prox_f(Wz + c), which may expand, by one that contracts
and has the same solution.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from equilibria.engine.maps import Surrogate
from equilibria.engine.options import check_number, options
from equilibria.engine.solver import Bounds, Choice, Point, Solver
from equilibria.engine.transforms import functorch_active, is_captured
from equilibria.engine.tree import Leaves, accumulation_dtype, map_tensors


class Inclusion(Protocol):
    """0 ∈ (I − W)z − c + ∂f(z); states are tensors [B, ...] or tuples of them."""

    @property
    def modulus(self) -> float:
        """m > 0 with I − W ⪰ mI."""

    def norm_bound(self) -> Tensor:
        """L ≥ ‖I − W‖ up to rounding: one number on the device, cheap, no gradient."""

    def scale(self) -> Tensor:
        """The root mean square of the singular values of I − W: one number on the device."""

    def norm_upper(self) -> float:
        """The same, proven and close, in float64; expensive."""

    def argument(self, z: Any, c: Tensor) -> Any:
        """Wz + c."""

    def step(self, z: Any, c: Tensor) -> Any:
        """T(z) = prox_f(Wz + c), the layer's own map."""

    def prox(self, v: Any, alpha: float | Tensor) -> Any:
        """prox_{αf}(v)."""

    def lifted(self) -> Inclusion:
        """The same inclusion on a space where I + α(I − W) is cheap to invert."""

    def lift(self, z: Any) -> Any:
        """A state on that space."""

    def drop(self, u: Any) -> Any:
        """The way back: ``drop(lift(z)) = z``."""

    def resolvent(self, alpha: float | Tensor) -> Callable[[Any], Any]:
        """V = (I + α(I − W))⁻¹, computed here once and applied many times."""


@dataclass(frozen=True, eq=False)
class Splitting(Surrogate):
    """A map u ↦ S(u, *inputs) that contracts, and how its fixed point gives z.

    The solve is judged by the residual ‖T(z) − z‖ of the layer's own map.
    """

    start: Any
    inputs: tuple[Any, ...]
    """Tensors with the batch in dim 0."""
    read: Callable[[Any], Any]
    """From u to z."""
    reason: str


def blend(a: float | Tensor, x: Any, b: float | Tensor, y: Any) -> Any:
    """ax + by on states."""
    if isinstance(x, Tensor):
        return a * x + b * y
    return tuple(blend(a, p, b, q) for p, q in zip(x, y, strict=True))


@options
class SplittingIteration(Solver):
    """u ← S(u): what the engine runs for a splitting, forward and (on S's transposed Jacobian)
    backward."""

    accelerated = True
    stride = 1.0

    def init(self, z: Leaves) -> None:
        return None

    def step(self, point: Point, state: None) -> tuple[Leaves, None]:
        return point.f, None


@options
class SplittingSolver(SplittingIteration):
    """A solver that makes its own map from a monotone inclusion; iterated as u ← S(u).

    The transposed Jacobian of S is the transposed splitting, with the same contraction factor. So
    ``Implicit(solver=...)`` with a splitting solves its backward system by that splitting.
    """

    alpha: float | None = None
    """The step α; None takes it from m and L."""
    iteration: SplittingIteration = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        SplittingIteration.__post_init__(self)
        check_number(self, "alpha", low=0.0, low_open=True, optional=True)
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(Solver)}
        # Made here, not in a solve: torch.compile traces the use of options, not their making.
        object.__setattr__(self, "iteration", SplittingIteration(**shared))

    @abstractmethod
    def split(self, inclusion: Inclusion, z0: Any, c: Tensor) -> Splitting:
        """The map to iterate for this inclusion, started at z0."""

    def for_map(self) -> Solver:
        """Raises: on a plain map there is nothing to split."""
        self._refuse("a plain map", "Anderson() or Picard()")

    def for_problem(self, bounds: Bounds) -> Choice:
        """Raises: a hidden problem has no W to split off."""
        self._refuse("a hidden problem", "Auto() or ProximalGradient()")

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} needs a monotone layer (MonotoneDEQ), whose W and prior it "
            f"splits, and was given {what}; use {instead} here."
        )


def proximal_slack(tau: float | Tensor) -> float | Tensor:
    """About ‖T_τ(z) − z‖ / ‖T(z) − z‖ of a proximal step, T = T_1; a little more where τ < 1.

    The quotient lies between τ and 1: ‖T_τ(z) − z‖ grows with τ, and ‖T_τ(z) − z‖/τ falls.
    """
    if isinstance(tau, Tensor):
        return torch.maximum((2.0 * tau).clamp(max=1.0), tau)
    return max(min(1.0, 2.0 * tau), tau)


def forward_backward_factor(m: float, upper: float, alpha: float) -> float:
    """√(1 − 2αm + α²L²) ≥ the Lipschitz constant of the step (Nguyen 2022, Proposition 3)."""
    return math.sqrt(max(0.0, 1.0 - 2.0 * alpha * m + alpha * alpha * upper * upper))


@options
class ForwardBackward(SplittingSolver):
    """z ← prox_{αf}(z − α((I − W)z − c)), α in the open interval (0, 2m/L²)  (Nguyen 2022, Eq 3.5).

    A contraction with the factor √(1 − 2αm + α²L²) (Proposition 3), which is least, √(1 − m²/L²),
    at α = m/L², the default; at the end 2m/L² it is exactly 1 (the paper closes the interval). A
    step outside is an error, but not checked inside torch.compile and torch.func. One product with
    W a step, no inverse; many steps where m/L is small.
    """

    max_steps: int = 2000
    patience: int = 400

    def split(self, inclusion: Inclusion, z0: Any, c: Tensor) -> Splitting:
        """The forward-backward step on the layer's own state, in float32 or better: a step of
        α·(T(z) − z) would be lost in the rounding of half precision."""
        alpha, dtype = self.step_size(inclusion), c.dtype
        wide = accumulation_dtype(dtype)

        def step(u: Any, c: Tensor) -> Any:
            image = inclusion.argument(read(u), c)
            return inclusion.prox(blend(1.0 - alpha, u, alpha, image), alpha)

        def read(u: Any) -> Any:
            return map_tensors(lambda part: part.to(dtype), u)

        def own(u: Any, c: Tensor) -> tuple[Any, Any]:
            z = read(u)
            return z, inclusion.step(z, c)

        given = "step α = m/L²" if self.alpha is None else "given step α"
        reason = f"ForwardBackward with the {given}"
        slack, start = proximal_slack(alpha), map_tensors(lambda part: part.to(wide), z0)
        return Splitting(step, own, lambda *_: slack, dtype, start, (c,), read, reason)

    def step_size(self, inclusion: Inclusion) -> float | Tensor:
        """α as given, checked; or m/L² as a number on the device."""
        m, bound = inclusion.modulus, inclusion.norm_bound()
        if self.alpha is None:
            return m / bound.square()
        if torch.compiler.is_compiling() or functorch_active() or is_captured(bound):
            return self.alpha
        if not self.alpha < 2.0 * m / float(bound) ** 2:
            # The cheap bound on L is some percent too large: judge by the close one.
            upper = inclusion.norm_upper()
            if not self.alpha < 2.0 * m / upper**2:
                raise ValueError(
                    f"ForwardBackward(alpha={self.alpha:g}) is outside (0, 2m/L²) = (0, "
                    f"{2.0 * m / upper**2:.4g}) of this layer (m = {m:g}, L = ‖I − W‖ ≤ "
                    f"{upper:.4g}), where the step need not contract. Take alpha=None (m/L²), a "
                    "smaller number, or PeacemanRachford(), which takes every α > 0."
                )
        return self.alpha
