"""W = (1 − m)I − AᵀA + B − Bᵀ: every W with I − W ⪰ mI has this form (Winston and Kolter, Prop 1).

⟨(I − W)z, z⟩ = m‖z‖² + ‖Az‖² ≥ m‖z‖², whatever A and B: the skew part B − Bᵀ adds nothing. A
monotone layer solves 0 ∈ (I − W)z − c + ∂f(z). States are tuples of tensors [B, ...], one a tier.
An operator holds tensors and no module state, so gradients flow to whatever its weights came from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.transforms import functorch_active
from equilibria.problems.norms import UNIT, dense_norm, exact, sum_error
from equilibria.problems.parts import replaced
from equilibria.problems.priors import Prior, at_least_float32

States = tuple[Tensor, ...]
Resolvent = Callable[[States], States]

_EPS = torch.finfo(torch.float64).eps


def gram_bound(matrices: Tensor, squarings: int = 5) -> Tensor:
    """‖M‖₂ ≤ ‖(MᴴM)^{2^k}‖_F^{1/2^{k+1}} of each matrix, [..., m, n] → [...]; no SVD, no waiting.

    At most n^{1/2^{k+2}} above the norm: 5% for n = 500, k = 5. A slack covers rounding.
    """
    tiny = torch.finfo(matrices.dtype).tiny
    peak = matrices.abs().amax((-2, -1)).clamp_min(tiny)  # squares of what is left fit any dtype
    scaled = matrices / peak[..., None, None]
    g = scaled.mH @ scaled
    power = 2.0 * peak.double().log()
    for k in range(squarings + 1):
        if k:
            g = g @ g
        size = torch.linalg.matrix_norm(g).clamp_min(tiny)
        g = g / size[..., None, None]
        power = power + size.double().log() / 2**k
    slack = 1.0 + 8 * matrices.shape[-1] * torch.finfo(matrices.dtype).eps
    return (0.5 * power).exp() * slack


class MonotoneOperator(ABC):
    """W with I − W ⪰ mI."""

    m: float

    @abstractmethod
    def __call__(self, z: States) -> States:
        """Wz."""

    @abstractmethod
    def adjoint(self, g: States) -> States:
        """Wᵀg."""

    @abstractmethod
    def norm_bound(self) -> Tensor:
        """L ≥ ‖I − W‖₂ up to rounding: one float64 number on the device, without a gradient."""

    @abstractmethod
    def scale(self) -> Tensor:
        """‖I − W‖_F/√n, the root mean square of its singular values: one number on the device."""

    @abstractmethod
    def norm_uppers(self) -> tuple[float, float]:
        """Proven upper bounds on ‖I − W‖₂ and ‖W‖₂, from float64; expensive."""

    @abstractmethod
    def modulus_lower(self) -> float:
        """A proven lower bound on the modulus of this W, with the rounding of its making."""

    @abstractmethod
    def resolvent(self, alpha: float | Tensor) -> Resolvent:
        """V = (I + α(I − W))⁻¹ on ``lifted()``, computed once, in float32 or better."""

    @abstractmethod
    def double(self) -> MonotoneOperator:
        """The same numbers in float64, detached."""

    @abstractmethod
    def rounding(self, z: States, *, transposed: bool = False) -> States:
        """|fl(Wz) − Wz| (or of Wᵀz) entrywise at most this, operator and z being in float64."""

    def lifted(self) -> MonotoneOperator:
        """The operator on the space where its resolvent is cheap; itself for most."""
        return self

    @property
    def border(self) -> int:
        """How many pixels around each map of this space are held at zero."""
        return 0


class DenseMonotone(MonotoneOperator):
    """W as a matrix, composed once: weights a, b [n, n]; z ([B, n],).

    ``dtype`` is the precision of the products (autocast); composition is in float32 or better.
    """

    def __init__(self, a: Tensor, b: Tensor, m: float, dtype: torch.dtype | None = None) -> None:
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or b.shape[0] != b.shape[1]:
            raise ValueError(
                "DenseMonotone takes A [k, n] and B [n, n], got "
                f"{tuple(a.shape)} and {tuple(b.shape)}."
            )
        wide_a, wide_b = at_least_float32(a), at_least_float32(b)
        eye = torch.eye(b.shape[0], dtype=wide_b.dtype, device=b.device)
        w = (1.0 - m) * eye - wide_a.mT @ wide_a + wide_b - wide_b.mT
        self.weight, self.m = w.to(b.dtype if dtype is None else dtype), m

    def __call__(self, z: States) -> States:
        return (F.linear(z[0], self.weight),)

    def adjoint(self, g: States) -> States:
        return (g[0] @ self.weight,)

    def _difference(self) -> Tensor:
        """I − W, in float32 or better."""
        w = at_least_float32(self.weight)
        return torch.eye(w.shape[0], dtype=w.dtype, device=w.device) - w

    def norm_bound(self) -> Tensor:
        with torch.no_grad():
            return gram_bound(self._difference().detach())

    def scale(self) -> Tensor:
        m = self._difference().detach()
        size: Tensor = torch.linalg.matrix_norm(m)
        return size / math.sqrt(m.shape[0])

    def norm_uppers(self) -> tuple[float, float]:
        twin = self.double()
        difference = twin._difference()
        off = 2 * UNIT * float(difference.norm())  # of the subtraction
        return dense_norm(difference).upper + off, dense_norm(twin.weight).upper

    def modulus_lower(self) -> float:
        """λ_min of the symmetric part of I − W, which may exceed m, less what rounding can do."""
        m = self.double()._difference()
        symmetric = 0.5 * (m + m.mT)
        least = float(torch.linalg.eigvalsh(symmetric)[0])
        return least - 16 * _EPS * (len(m) + 4) * float(symmetric.norm())

    def resolvent(self, alpha: float | Tensor) -> Resolvent:
        m = self._difference()
        eye = torch.eye(m.shape[0], dtype=m.dtype, device=m.device)
        # inv_ex: no check of singularity, which cannot be here and would make a GPU wait.
        transposed = torch.linalg.inv_ex(eye + alpha * m).inverse.mT

        def apply(u: States) -> States:
            with torch.autocast(u[0].device.type, enabled=False):
                return ((u[0].to(transposed.dtype) @ transposed).to(u[0].dtype),)

        return apply

    def double(self) -> DenseMonotone:
        return replaced(self, weight=exact(self.weight))

    def rounding(self, z: States, *, transposed: bool = False) -> States:
        size = self.weight.abs() if transposed else self.weight.abs().mT
        return (sum_error(self.weight.shape[0] + 2) * (z[0].abs() @ size),)


class MonotoneInclusion:
    """The inclusion of a prior f and a monotone W; its solution is z = prox_f(Wz + c).

    With several tiers a state is a tuple and c belongs to the first; with one it is a tensor.
    """

    def __init__(self, operator: MonotoneOperator, prior: Prior, tiers: int) -> None:
        self.operator, self.prior, self.tiers = operator, prior, tiers

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
        """The same, proven and close, in float64; expensive."""
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

        def prox(part: Tensor) -> Tensor:
            if not border:
                return self.prior.prox(part, alpha)
            return F.pad(self.prior.prox(_cropped(part, border), alpha), (border,) * 4)

        return self.state(tuple(map(prox, self.parts(v))))

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
        return self.state(tuple(map(self.prior.into_domain, self.parts(z))))

    def parts(self, z: Any) -> States:
        return (z,) if self.tiers == 1 else tuple(z)

    def state(self, parts: States) -> Any:
        return parts[0] if self.tiers == 1 else parts


def _cropped(z: Tensor, border: int) -> Tensor:
    return z[..., border:-border, border:-border]


def _formatted(value: Tensor, like: Tensor) -> Tensor:
    """``value`` in the memory format of ``like``: FFT and circular padding lose it."""
    if value.ndim != 4 or functorch_active():  # vmap knows no memory formats
        return value
    last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    return value.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
