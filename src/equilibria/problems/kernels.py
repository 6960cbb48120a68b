"""Couplings q(z; x) that tie the state to the input (GEQ full, Table 4), and their curvature.

Each gives q, ∇q, Hessian-vector products and bounds on the spectrum of ∇²q. The layer map is
T(z) = prox_f(−∇q(z)). Here: linear, polynomial, sigmoid; gaussian.py has the Gaussian kernel.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from equilibria.problems.norms import exact
from equilibria.problems.operators import LinearOperator, as_operator

__all__ = ["Coupling", "Curvature", "DegenerateKernelWarning", "Linear", "Polynomial", "Sigmoidal"]

SIGMOID_CURVATURE = 4.0 / (3.0 * math.sqrt(3.0))  # max of |2t(1 − t²)| over −1 ≤ t ≤ 1


class DegenerateKernelWarning(UserWarning):
    """The polynomial kernel as printed has T(0) = 0 for every input."""


@dataclass(frozen=True)
class Curvature:
    """lower·I ⪯ ∇²q ⪯ upper·I: floats for the whole batch or one number per sample [B].

    ``rigorous`` says that the bounds are proven (in exact arithmetic, with the slack that float64
    needs), not estimated; ``note`` says for which z they hold and where they come from.
    """

    lower: float | Tensor
    upper: float | Tensor
    rigorous: bool
    note: str


def per_sample_sum(t: Tensor) -> Tensor:
    """Sum over all but the batch, in float32 or better. [B, ...] → [B]."""
    dtype = torch.promote_types(t.dtype, torch.float32)
    return t.sum(tuple(range(1, t.ndim)), dtype=dtype)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ per sample, in float32 or better, whatever the memory formats. [B, ...] → [B]."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return per_sample_sum(a.to(dtype) * b.to(dtype))


def _scaled(weight: Tensor, t: Tensor) -> Tensor:
    """weight[b]·t[b] in the dtype of t. [B], [B, ...] → [B, ...]."""
    return (weight.reshape(-1, *[1] * (t.ndim - 1)) * t).to(t.dtype)


class Coupling(ABC):
    """q(z; x) with ∇q, ∇²q·v and bounds on the spectrum of ∇²q. z [B, *state]."""

    def __init__(self, W: LinearOperator | Tensor | nn.Module, c: Tensor) -> None:
        if not c.is_floating_point():
            raise TypeError(f"c must be a floating-point tensor [B, ...], got {c.dtype}.")
        if c.ndim < 2:
            raise ValueError(f"c must be [B, ...], batch first; got shape {tuple(c.shape)}.")
        self.operator = as_operator(W)
        self.c = c
        self._norm_upper: float | None = None

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """q(z). [B, *state] → [B], float32 or better."""

    @abstractmethod
    def grad(self, z: Tensor) -> Tensor:
        """∇q(z). [B, *state] → [B, *state]."""

    def descent(self, z: Tensor) -> Tensor:
        """−∇q(z), what the layer's map takes; it may be had without a pass for the sign."""
        return -self.grad(z)

    @abstractmethod
    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        """∇²q(z)·v. [B, *state] each → [B, *state]."""

    @abstractmethod
    def curvature(self) -> Curvature:
        """Bounds on the spectrum of ∇²q(z) that hold for every z."""

    @abstractmethod
    def local_curvature(self, z: Tensor) -> Curvature:
        """Bounds on the spectrum of ∇²q at this z, per sample."""

    @abstractmethod
    def check_state(self, z: Tensor) -> None:
        """Raise ValueError unless z has the shape of a state of this coupling."""

    @abstractmethod
    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        """A state to start a solver from; ``shape`` [B, *state] where c does not determine it."""

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors [B, ...] through which the coupling depends on the sample: c."""
        return (self.c,)

    def with_inputs(self, *inputs: Tensor) -> Self:
        """The same coupling on other tensors in place of ``inputs()``, not checked anew."""
        other = object.__new__(type(self))  # copy.copy is not traced by every torch.compile
        other.__dict__.update(self.__dict__)
        (other.c,) = inputs
        return other

    def norm_upper(self) -> float:
        """Rigorous ‖W‖₂, computed on first use and kept: the weights are taken as constant."""
        if self._norm_upper is None:
            self._norm_upper = self.operator.norm_upper()
        return self._norm_upper


class _WithLinearTerm(Coupling):
    """q(z) = −φ(⟨c, z⟩) − ½‖Wz‖² with a scalar φ; c has the shape of z.

    ∇q = −φ′(t)c − WᵀWz and ∇²q = −φ″(t)ccᵀ − WᵀW with t = ⟨c, z⟩.
    """

    def __init__(self, W: LinearOperator | Tensor | nn.Module, c: Tensor) -> None:
        super().__init__(W, c)
        try:
            self.operator.output_shape(c.shape[1:])
        except ValueError as error:
            raise ValueError(
                f"{type(self).__name__}: c has the shape of the state z, here "
                f"{tuple(c.shape)}, and W does not take it. {error}"
            ) from None

    @abstractmethod
    def _phi(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def _slope(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def _bend(self, t: Tensor) -> Tensor: ...

    def check_state(self, z: Tensor) -> None:
        if z.shape != self.c.shape:
            raise ValueError(
                f"{type(self).__name__}: the state has the shape of c, {tuple(self.c.shape)}, "
                f"got {tuple(z.shape)}."
            )

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        """z₀ = 0, in the shape of c."""
        start = torch.zeros_like(self.c, requires_grad=False)
        if shape is not None and tuple(shape) != tuple(start.shape):
            self.check_state(start.new_empty(shape))
        return start

    def _gram(self, z: Tensor) -> Tensor:
        return self.operator.adjoint(self.operator(z), z.shape[1:])

    def value(self, z: Tensor) -> Tensor:
        self.check_state(z)
        wz = self.operator(z)
        return -self._phi(inner(self.c, z)) - 0.5 * inner(wz, wz)

    def grad(self, z: Tensor) -> Tensor:
        self.check_state(z)
        return -(self._gram(z) + _scaled(self._slope(inner(self.c, z)), self.c))

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        self.check_state(z)
        self.check_state(v)
        weight = self._bend(inner(self.c, z)) * inner(self.c, v)
        return -(self._gram(v) + _scaled(weight, self.c))

    def _squared_norm(self) -> Tensor:
        """‖c‖² per sample in float64, rounded up. [B]."""
        c = exact(self.c)
        return inner(c, c) * (1.0 + 2e-16 * (c[0].numel() + 4))

    @torch.no_grad()
    def local_curvature(self, z: Tensor) -> Curvature:
        """−max(φ″(t), 0)‖c‖² − ‖W‖² ≤ ∇²q ≤ max(−φ″(t), 0)‖c‖², t = ⟨c, z⟩."""
        self.check_state(z)
        bend = self._bend(inner(exact(self.c), exact(z))) * self._squared_norm()
        return Curvature(
            lower=-bend.clamp_min(0.0) - self.norm_upper() ** 2,
            upper=(-bend).clamp_min(0.0),
            rigorous=True,
            note="at this z, from φ″(⟨c, z⟩), ‖c‖ and the upper bound on ‖W‖₂",
        )


class Linear(_WithLinearTerm):
    """q(z) = −⟨c, z⟩ − ½‖Wz‖², −∇q = WᵀWz + c (OptEq; GEQ Eq 3–4). c has the shape of z."""

    def _phi(self, t: Tensor) -> Tensor:
        return t

    def _slope(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def _bend(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def grad(self, z: Tensor) -> Tensor:
        self.check_state(z)
        return -(self._gram(z) + self.c)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        self.check_state(v)
        return -self._gram(v)

    def curvature(self) -> Curvature:
        """−‖W‖² ≤ ∇²q ≤ 0."""
        return Curvature(-(self.norm_upper() ** 2), 0.0, True, "every z: ∇²q = −WᵀW")

    def local_curvature(self, z: Tensor) -> Curvature:
        self.check_state(z)
        return self.curvature()


class Polynomial(_WithLinearTerm):
    """q(z) = −(a + ⟨c, z⟩)ᵈ − ½‖Wz‖² (GEQ full, Table 4, has a = 0). c has the shape of z.

    As printed (offset a = 0) the kernel is degenerate: T(0) = 0 for every input, for d = 2 the map
    is homogeneous, and for d ≥ 3 the objective is unbounded below on z ≥ 0. It is kept, with a
    warning and a start away from zero; a = 1, the default, is the usable one.

    Args:
        degree: d ≥ 2.
        offset: a, 1.0 or 0.0.
    """

    def __init__(
        self,
        W: LinearOperator | Tensor | nn.Module,
        c: Tensor,
        degree: int = 2,
        offset: float = 1.0,
    ) -> None:
        super().__init__(W, c)
        if isinstance(degree, bool) or not isinstance(degree, int):
            raise TypeError(f"Polynomial(degree={degree!r}): expected an integer of at least 2.")
        if degree < 2:
            raise ValueError(
                f"Polynomial(degree={degree}) is out of range: expected an integer of at least 2 "
                "(degree 1 is the Linear coupling)."
            )
        if offset not in (0.0, 1.0):
            raise ValueError(f"Polynomial(offset={offset!r}): expected 0.0 (as printed) or 1.0.")
        if offset == 0.0:
            warnings.warn(
                "Polynomial(offset=0.0), the kernel as printed, is degenerate: z = 0 is an "
                "equilibrium for every input. Start away from zero (default_start does), or use "
                "offset=1.0.",
                DegenerateKernelWarning,
                stacklevel=2,
            )
        self.degree = degree
        self.offset = float(offset)

    def _phi(self, t: Tensor) -> Tensor:
        return (self.offset + t) ** self.degree

    def _slope(self, t: Tensor) -> Tensor:
        return self.degree * (self.offset + t) ** (self.degree - 1)

    def _bend(self, t: Tensor) -> Tensor:
        return self.degree * (self.degree - 1) * (self.offset + t) ** (self.degree - 2)

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        """z₀ = 0 for offset 1; c/‖c‖ for offset 0, where zero would be returned at once."""
        start = super().default_start(shape)
        if self.offset:
            return start
        c = self.c.detach()
        size = inner(c, c).sqrt()
        return _scaled(1.0 / size.clamp_min(torch.finfo(size.dtype).tiny), c)

    @torch.no_grad()
    def curvature(self) -> Curvature:
        """d = 2: −2‖c‖² − ‖W‖² ≤ ∇²q ≤ 0. d ≥ 3: unbounded below, and above for odd d."""
        w2 = self.norm_upper() ** 2
        if self.degree == 2:
            return Curvature(
                -2.0 * self._squared_norm() - w2, 0.0, True, "every z: ∇²q = −2ccᵀ − WᵀW"
            )
        return Curvature(
            -math.inf,
            math.inf if self.degree % 2 else 0.0,
            True,
            f"degree {self.degree}: ∇²q is unbounded over z; use local_curvature",
        )


class Sigmoidal(_WithLinearTerm):
    """q(z) = −tanh⟨c, z⟩ − ½‖Wz‖², −∇q = WᵀWz + (1 − tanh²⟨c, z⟩)c (GEQ full, Table 4)."""

    def _phi(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def _slope(self, t: Tensor) -> Tensor:
        return 1.0 - torch.tanh(t).square()

    def _bend(self, t: Tensor) -> Tensor:
        h = torch.tanh(t)
        return -2.0 * h * (1.0 - h.square())

    @torch.no_grad()
    def curvature(self) -> Curvature:
        """−k‖c‖² − ‖W‖² ≤ ∇²q ≤ k‖c‖² with k = 4/(3√3) = 0.7698 (docs/facts.md, fact 6)."""
        bend = SIGMOID_CURVATURE * self._squared_norm()
        return Curvature(
            -bend - self.norm_upper() ** 2,
            bend,
            True,
            "every z: ∇²q = 2t(1 − t²)ccᵀ − WᵀW, |2t(1 − t²)| ≤ 4/(3√3)",
        )
