"""Priors ``f``: the separable convex half of a hidden problem, and the activations they induce.

    ``sigma(v) = prox_f(v) = argmin_z f(z) + (z - v)^2 / 2``

An activation that is monotone and 1-Lipschitz is the proximal operator of a convex ``f``
(OptEq, paper 003, Theorem 1: ``f(z) = int (sigma^{-1}(t) - t) dt``). This file holds the face of
every prior and the piecewise linear activations; ``priors_smooth`` has tanh, sigmoid and softplus,
``custom_prior`` a user's own activation.

Conventions. Everything is elementwise, so shapes pass through. ``value``, ``conjugate`` and
``subdifferential`` answer in float32 or better; ``prox`` answers in the type of ``v``. ``f`` is
``+inf`` outside its domain and never NaN for an input that is not NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = [
    "Box",
    "Free",
    "LeakyNonNegative",
    "NonNegative",
    "Prior",
    "ShiftedNonNegative",
    "SoftThreshold",
    "WithL1",
]


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32 or better, the type in which objective values are computed."""
    if not x.is_floating_point():
        raise TypeError(f"a prior takes a real floating point tensor, got dtype {x.dtype}")
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_step(tau: float | Tensor) -> float | Tensor:
    """``tau`` itself; a Python number must be positive and finite (a tensor is not inspected)."""
    if isinstance(tau, Tensor):
        return tau
    if not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau got {tau!r}, takes a positive finite number or a tensor of them")
    return float(tau)


def check_number(owner: object, name: str, value: object, *, least: float = -math.inf) -> None:
    """Raise a ``ValueError`` that names the option unless ``value`` is finite and >= ``least``."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    number = float(value) if isinstance(value, (int, float)) else math.nan
    if not (real and math.isfinite(number) and number >= least):
        wanted = "a finite number" if least == -math.inf else f"a finite number >= {least:g}"
        raise ValueError(f"{type(owner).__name__}: {name} got {value!r}, takes {wanted}")


def graph_zero(z: Tensor) -> Tensor:
    """Zeros shaped like ``z`` that stay in its autograd graph (with derivative 0)."""
    return torch.where(z.isfinite(), z, 0.0) * 0.0


class Prior(ABC):
    """``f: R -> (-inf, inf]``, closed and convex, applied to each entry of ``z``.

    A prior is an immutable description without parameters or state, shared freely between
    problems, devices and types.
    """

    has_conjugate: ClassVar[bool] = False

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """``f(z)`` elementwise, the shape of ``z``; ``+inf`` outside the domain."""

    @abstractmethod
    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        """``prox_{tau f}(v) = argmin_z f(z) + (z - v)^2/(2 tau)``, for every ``tau > 0``.

        ``tau`` is a number or a tensor that broadcasts to ``v``. Shape and type of ``v``.
        """

    @abstractmethod
    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The ends ``(lower, upper)`` of the interval ``df(z)``, each the shape of ``z``.

        Outside the domain the interval is empty, written ``(+inf, -inf)``.
        """

    @property
    def expansion(self) -> float:
        """``sup sigma'``, at most 1; ``f`` is ``1/expansion - 1`` strongly convex."""
        return 1.0

    def activation(self, v: Tensor) -> Tensor:
        """``sigma(v) = prox_f(v)``."""
        return self.prox(v)

    def conjugate(self, y: Tensor) -> Tensor:
        """``f*(y) = sup_z y z - f(z)`` where a closed form exists (see ``has_conjugate``)."""
        raise NotImplementedError(
            f"{type(self).__name__} has no closed-form conjugate; check has_conjugate first"
        )

    def subgradient_distance(self, z: Tensor, g: Tensor) -> Tensor:
        """``dist(0, df(z) + g)`` elementwise; ``+inf`` outside the domain."""
        lower, upper = self.subdifferential(z)
        g = at_least_float32(g)
        return torch.maximum(lower + g, -(upper + g)).clamp(min=0.0)


def interval(inside: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """``(lower, upper)`` where ``inside`` holds, the empty interval elsewhere."""
    return torch.where(inside, lower, math.inf), torch.where(inside, upper, -math.inf)


@dataclass(frozen=True)
class Free(Prior):
    """``f(z) = 0``: no prior. ``sigma(v) = v``, ``f*(y) = 0`` at ``y = 0``, else ``+inf``."""

    has_conjugate: ClassVar[bool] = True

    def value(self, z: Tensor) -> Tensor:
        return graph_zero(at_least_float32(z))

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        check_step(tau)
        return v

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        zero = graph_zero(at_least_float32(z))
        return zero, zero

    def conjugate(self, y: Tensor) -> Tensor:
        return torch.where(y == 0, graph_zero(at_least_float32(y)), math.inf)


@dataclass(frozen=True)
class NonNegative(Prior):
    """``f(z) = 0`` for ``z >= 0``, else ``+inf``. ``sigma = relu``.

    ``f*(y) = 0`` for ``y <= 0``, else ``+inf``.
    """

    has_conjugate: ClassVar[bool] = True

    def value(self, z: Tensor) -> Tensor:
        return torch.where(z >= 0, graph_zero(at_least_float32(z)), math.inf)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        check_step(tau)
        return torch.relu(v)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        zero = graph_zero(at_least_float32(z))
        return interval(z >= 0, torch.where(z == 0, -math.inf, zero), zero)

    def conjugate(self, y: Tensor) -> Tensor:
        return torch.where(y <= 0, graph_zero(at_least_float32(y)), math.inf)


@dataclass(frozen=True)
class Box(Prior):
    """``f(z) = 0`` for ``lower <= z <= upper``, else ``+inf``.

    ``sigma(v) = min(max(v, lower), upper)`` (clipped ReLU for ``Box(0, 1)``, hardtanh for
    ``Box(-1, 1)``); ``f*(y) = max(lower y, upper y)``. One or both ends may be infinite.
    """

    lower: float = 0.0
    upper: float = 1.0
    has_conjugate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.lower < self.upper or self.lower == math.inf or self.upper == -math.inf:
            raise ValueError(
                f"Box: lower got {self.lower!r} and upper got {self.upper!r}, "
                "takes lower < upper (an end may be infinite)"
            )

    def _ends(self, z: Tensor) -> tuple[Tensor, Tensor]:
        # Compare in the type of z: what prox returned must count as inside after rounding.
        lower = torch.full((), self.lower, dtype=z.dtype, device=z.device)
        return lower, torch.full((), self.upper, dtype=z.dtype, device=z.device)

    def value(self, z: Tensor) -> Tensor:
        lower, upper = self._ends(z)
        zero = graph_zero(at_least_float32(z))
        return torch.where((z >= lower) & (z <= upper), zero, math.inf)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        check_step(tau)
        return v.clamp(min=self.lower, max=self.upper)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = self._ends(z)
        zero = graph_zero(at_least_float32(z))
        down = torch.where(z == lower, -math.inf, zero)
        up = torch.where(z == upper, math.inf, zero)
        return interval((z >= lower) & (z <= upper), down, up)

    def conjugate(self, y: Tensor) -> Tensor:
        y = at_least_float32(y)
        high = y * self.upper if math.isfinite(self.upper) else torch.where(y > 0, math.inf, 0 * y)
        low = y * self.lower if math.isfinite(self.lower) else torch.where(y < 0, math.inf, 0 * y)
        return torch.where(y >= 0, high, low)


@dataclass(frozen=True)
class SoftThreshold(Prior):
    """``f(z) = weight |z|``. ``sigma(v) = sign(v) max(|v| - weight, 0)``.

    ``f*(y) = 0`` for ``|y| <= weight``, else ``+inf``.
    """

    weight: float = 1.0
    has_conjugate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "weight", self.weight, least=0.0)

    def value(self, z: Tensor) -> Tensor:
        return self.weight * at_least_float32(z).abs()

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        threshold = check_step(tau) * self.weight
        return (torch.relu(v - threshold) - torch.relu(-v - threshold)).to(v.dtype)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        zero = graph_zero(at_least_float32(z))
        lower = torch.where(z > 0, zero + self.weight, zero - self.weight)
        return lower, torch.where(z < 0, zero - self.weight, zero + self.weight)

    def conjugate(self, y: Tensor) -> Tensor:
        return torch.where(y.abs() <= self.weight, graph_zero(at_least_float32(y)), math.inf)


@dataclass(frozen=True)
class ShiftedNonNegative(Prior):
    """``f(z) = weight z`` for ``z >= 0``, else ``+inf``. ``sigma(v) = relu(v - weight)``.

    ``f*(y) = 0`` for ``y <= weight``, else ``+inf``. A negative weight shifts to the left.
    """

    weight: float = 1.0
    has_conjugate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "weight", self.weight)

    def value(self, z: Tensor) -> Tensor:
        return torch.where(z >= 0, self.weight * at_least_float32(z), math.inf)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return torch.relu(v - check_step(tau) * self.weight).to(v.dtype)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        slope = graph_zero(at_least_float32(z)) + self.weight
        return interval(z >= 0, torch.where(z == 0, -math.inf, slope), slope)

    def conjugate(self, y: Tensor) -> Tensor:
        return torch.where(y <= self.weight, graph_zero(at_least_float32(y)), math.inf)


@dataclass(frozen=True)
class LeakyNonNegative(Prior):
    """``f(z) = (1/slope - 1) min(z, 0)^2 / 2``. ``sigma(v) = max(v, 0) + slope min(v, 0)``.

    ``prox_{tau f}(v) = slope v / (slope + tau (1 - slope))`` for ``v < 0``;
    ``f*(y) = slope y^2 / (2 (1 - slope))`` for ``y <= 0``, else ``+inf``. ``0 < slope <= 1``.
    """

    slope: float = 0.01
    has_conjugate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "slope", self.slope)
        if not 0 < self.slope <= 1:
            raise ValueError(
                f"LeakyNonNegative: slope got {self.slope!r}, takes 0 < slope <= 1 "
                "(slope 0 is NonNegative, slope 1 is Free)"
            )

    def value(self, z: Tensor) -> Tensor:
        below = at_least_float32(z).clamp(max=0.0)
        return (0.5 * (1.0 / self.slope - 1.0)) * below * below

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        factor = self.slope / (self.slope + check_step(tau) * (1.0 - self.slope))
        return torch.where(v >= 0, v, v * factor).to(v.dtype)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        derivative = (1.0 / self.slope - 1.0) * at_least_float32(z).clamp(max=0.0)
        return derivative, derivative

    def conjugate(self, y: Tensor) -> Tensor:
        y = at_least_float32(y)
        if self.slope == 1.0:
            return torch.where(y == 0, graph_zero(y), math.inf)
        below = y.clamp(max=0.0)
        return torch.where(y <= 0, (0.5 * self.slope / (1.0 - self.slope)) * below**2, math.inf)


@dataclass(frozen=True)
class WithL1(Prior):
    """``f(z) + weight |z|`` for any prior ``f``, with an exact prox.

    With ``a = prox_{tau f}(v - tau weight)`` and ``b = prox_{tau f}(v + tau weight)``,

        ``prox_{tau (f + weight |.|)}(v) = a if a > 0, b if b < 0, else 0``.

    Proof. ``p`` is the prox iff ``v - p`` lies in ``tau df(p) + tau weight d|p|`` (the sum rule
    holds: ``|.|`` is finite). For ``p > 0`` this says ``p = a``, for ``p < 0`` it says ``p = b``.
    Otherwise ``a <= 0 <= b`` (prox is monotone and ``a <= b``), so 0 is in the interval dom f;
    ``a <= 0`` gives ``v - tau weight <= tau sup df(0)`` and ``b >= 0`` gives
    ``v + tau weight >= tau inf df(0)``, so ``[v - tau weight, v + tau weight]`` meets
    ``tau df(0)``, which is the condition for ``p = 0``. No assumption on ``f`` beyond
    separability is used; ``WithL1(Free(), w)`` is ``SoftThreshold(w)``.
    """

    prior: Prior
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "weight", self.weight, least=0.0)

    @property
    def expansion(self) -> float:
        return self.prior.expansion

    def value(self, z: Tensor) -> Tensor:
        return self.prior.value(z) + self.weight * at_least_float32(z).abs()

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        shift = check_step(tau) * self.weight
        wide = at_least_float32(v)  # v -+ shift may leave the range of half precision
        right = self.prior.prox(wide - shift, tau)
        left = self.prior.prox(wide + shift, tau)
        zero = torch.zeros((), dtype=wide.dtype, device=wide.device)
        return torch.where(right > 0, right, torch.where(left < 0, left, zero)).to(v.dtype)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = self.prior.subdifferential(z)
        down, up = SoftThreshold(self.weight).subdifferential(z)
        return lower + down, upper + up
