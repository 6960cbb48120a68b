"""0 ∈ (I − W)z − c + ∂f(z): what a monotone layer solves, in the form that splittings ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.transforms import functorch_active
from equilibria.problems.monotone_operator import MonotoneOperator, States
from equilibria.problems.priors import Prior

__all__ = ["MonotoneInclusion"]


class MonotoneInclusion:
    """The inclusion of a prior f and a monotone W; its solution is z = prox_f(Wz + c).

    With several tiers a state is a tuple and c belongs to the first; with one it is a tensor.
    """

    def __init__(self, operator: MonotoneOperator, prior: Prior, tiers: int) -> None:
        self.operator = operator
        self.prior = prior
        self.tiers = tiers

    @property
    def modulus(self) -> float:
        """m > 0 with I − W ⪰ mI."""
        return self.operator.m

    def norm_bound(self) -> Tensor:
        """L ≥ ‖I − W‖ up to rounding: one number on the device, cheap, no gradient."""
        return self.operator.norm_bound()

    def scale(self) -> Tensor:
        """The root mean square of the singular values of I − W: one number on the device."""
        return self.operator.scale()

    def norm_upper(self) -> float:
        """The same, proven and close, in float64; dear."""
        return self.operator.norm_uppers()[0]

    def argument(self, z: Any, c: Tensor) -> Any:
        """Wz + c, in the memory format of z."""
        parts = self.parts(z)
        image = self.operator(parts)
        image = (image[0] + c, *image[1:])
        return self.state(tuple(_formatted(v, p) for v, p in zip(image, parts, strict=True)))

    def prox(self, v: Any, alpha: float | Tensor) -> Any:
        """prox_{αf}(v); on a torus that stands for a plane also zero on its border."""
        border = self.operator.border
        return self.state(tuple(self._prox(part, alpha, border) for part in self.parts(v)))

    def _prox(self, v: Tensor, alpha: float | Tensor, border: int) -> Tensor:
        if not border:
            return self.prior.prox(v, alpha)
        return F.pad(self.prior.prox(_cropped(v, border), alpha), (border,) * 4)

    def step(self, z: Any, c: Tensor) -> Any:
        """T(z) = σ(Wz + c), the layer's own map."""
        return self.prox(self.argument(z, c), 1.0)

    def lifted(self) -> MonotoneInclusion:
        """The same inclusion where the resolvent is cheap."""
        return MonotoneInclusion(self.operator.lifted(), self.prior, self.tiers)

    def lift(self, z: Any) -> Any:
        """A state (or c) on that space: zero on the border."""
        border = self.operator.lifted().border - self.operator.border
        if not border:
            return z
        if isinstance(z, Tensor):
            return F.pad(z, (border,) * 4)
        return tuple(F.pad(part, (border,) * 4) for part in z)

    def drop(self, u: Any) -> Any:
        """The way back, in the memory format of u."""
        border = self.operator.lifted().border - self.operator.border
        if not border:
            return u
        return self.state(tuple(_formatted(_cropped(part, border), part) for part in self.parts(u)))

    def resolvent(self, alpha: float | Tensor) -> Callable[[Any], Any]:
        """V = (I + α(I − W))⁻¹, computed here once."""
        inverse = self.operator.resolvent(alpha)

        def apply(u: Any) -> Any:
            parts = self.parts(u)
            found = zip(inverse(parts), parts, strict=True)
            return self.state(tuple(_formatted(v, part) for v, part in found))

        return apply

    def into_domain(self, z: Any) -> Any:
        """z moved to the nearest point where f is finite (solvers that extrapolate leave it)."""

        def moved(part: Tensor) -> Tensor:
            outside = torch.isinf(self.prior.value(part))
            return torch.where(outside, self.prior.prox(part, 1e-12), part)

        return self.state(tuple(map(moved, self.parts(z))))

    def parts(self, z: Any) -> States:
        """A state as a tuple."""
        return (z,) if self.tiers == 1 else tuple(z)

    def state(self, parts: States) -> Any:
        """A tuple as a state."""
        return parts[0] if self.tiers == 1 else parts


def _cropped(z: Tensor, border: int) -> Tensor:
    return z[..., border:-border, border:-border]


def _formatted(value: Tensor, like: Tensor) -> Tensor:
    """``value`` in the memory format of ``like``: FFT and circular padding lose it."""
    if value.ndim != 4 or functorch_active():  # vmap knows no memory formats
        return value
    last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    return value.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
