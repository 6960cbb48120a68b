"""Couplings q(z; x) that tie the state to the input (GEQ full, Table 4), and their curvature.

Each gives q, ∇q, Hessian-vector products and bounds on the spectrum of ∇²q. The layer map is
T(z) = prox_f(−∇q(z)). Here: linear, polynomial, sigmoid, and OptEq's activation between W and Wᵀ;
gaussian.py has the Gaussian kernel.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from equilibria.engine.options import check_number
from equilibria.engine.tree import per_sample
from equilibria.problems.norms import (
    FUNCTION,
    UNIT,
    NormBound,
    exact,
    norm_upper,
    sum_error,
)
from equilibria.problems.operators import (
    IDENTITY,
    IdentityOperator,
    LinearOperator,
    Weights,
    as_operator,
)
from equilibria.problems.parts import Part
from equilibria.problems.priors import Prior, at_least_float32, per_sample_sum

T = TypeVar("T")
Reasoned = tuple[float | None, str]  # a constant or None, and why

SIGMOID_CURVATURE = 4.0 / (3.0 * math.sqrt(3.0))  # max of |2t(1 − t²)| over −1 ≤ t ≤ 1


class DegenerateKernelWarning(UserWarning):
    """The polynomial kernel as printed has T(0) = 0 for every input."""


def as_number(values: Tensor) -> float | Tensor:
    """A tensor without dimensions as a float; any other as it is."""
    return values if values.ndim else float(values)


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
    basis: Literal["", "given", "estimated"] = ""
    """Where bounds that are not rigorous come from: the user, or a sample of the spectrum, from
    which nothing may be concluded."""

    def ends(self, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Both bounds in the type and on the device of ``like``; without it in float64."""
        dtype, device = (torch.float64, None) if like is None else (like.dtype, like.device)
        low, high = (torch.as_tensor(t, dtype=dtype) for t in (self.lower, self.upper))
        return low.to(device=device), high.to(device=device)

    def envelope(self) -> Curvature:
        """Of the Moreau envelope: h ↦ h/(1 + h), increasing; it has no bound where h ≤ −1."""
        low, high = self.ends()
        high = torch.where(high > -1.0, 1.0 - 1.0 / (1.0 + high), math.inf)
        low = torch.where(low > -1.0, 1.0 - 1.0 / (1.0 + low), -math.inf)
        note = f"envelope of: {self.note}"
        return replace(self, lower=as_number(low), upper=as_number(high), note=note)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ per sample, in float32 or better, whatever the memory formats. [B, ...] → [B]."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return per_sample_sum(a.to(dtype) * b.to(dtype))


def _scaled(weight: Tensor, t: Tensor) -> Tensor:
    """weight[b]·t[b] in the dtype of t. [B], [B, ...] → [B, ...]."""
    return (per_sample(weight, t) * t).to(t.dtype)


LARGE = 1 << 13  # entries of a state above which a certificate shows no estimates of norms


class Coupling(Part, ABC):
    """q(z; x) with ∇q, ∇²q·v and bounds on the spectrum of ∇²q. z [B, *state]."""

    parameters: ClassVar[tuple[str, ...]] = ("c",)

    def __init__(self, W: Weights, c: Tensor) -> None:
        if not c.is_floating_point():
            raise TypeError(f"c must be a floating-point tensor [B, ...], got {c.dtype}.")
        if c.ndim < 2:
            raise ValueError(f"c must be [B, ...], batch first; got shape {tuple(c.shape)}.")
        self.operator = as_operator(W)
        self.c = c
        self._kept: dict[Any, Any] = {}

    def __add__(self, other: Coupling) -> SumCoupling:
        """q₁ + q₂, each with its own operator: a problem at several scales is one problem."""
        return SumCoupling(*parts_of(self), *parts_of(other))

    def compose(self, K: Weights) -> SumCoupling:
        """z ↦ q(Kz), with bounds from those of q and the norms of K."""
        return SumCoupling((self, as_operator(K)))

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

    def local_curvature(self, z: Tensor) -> Curvature:
        """Bounds on the spectrum of ∇²q at this z, per sample; by default those for every z."""
        self.check_state(z)
        return self.curvature()

    @abstractmethod
    def check_state(self, z: Tensor) -> None:
        """Raise ValueError unless z has the shape of a state of this coupling."""

    @abstractmethod
    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        """A state to start a solver from; ``shape`` [B, *state] where c does not determine it."""

    # What a certificate asks for. The defaults say that nothing is derived.

    def tight_curvature(self) -> Curvature:
        """``curvature`` by the closest bounds there are, expensive or not."""
        return self.curvature()

    def tight_local_curvature(self, z: Tensor) -> Curvature:
        """``local_curvature`` by the closest bounds there are, expensive or not."""
        return self.local_curvature(z)

    def rounding_error(self, z: Tensor) -> Tensor | None:
        """|fl(∇q(z)) − ∇q(z)| ≤ this, entrywise, all in float64 (``norms.py``); None: not known."""
        return None

    def hessian_lipschitz(self) -> Tensor | float | None:
        """K with ‖∇²q(z) − ∇²q(z′)‖ ≤ K‖z − z′‖ for all z, z′; [B], a number, or None."""
        return None

    def features_norm(self) -> float:
        """‖c → c̃‖, where c̃ is what the constants below are in; 1 for c̃ = c."""
        return 1.0

    def lipschitz(self, modulus: float, rest: Tensor, reach: float, *, in_x: bool) -> Reasoned:
        """A Lipschitz constant of x → z* (``in_x``) or c → z* for all inputs, or None; and why.

        ``modulus`` > 0 is that of the smooth part for every input, ``rest`` that without q, and
        ``reach`` a finite bound on ‖x → c̃‖, or on ‖c → c̃‖.
        """
        return None, f"no constant is derived for {type(self).__name__}"

    def local_lipschitz(
        self, z: Tensor, error: Tensor, modulus: Tensor, local: Tensor, rest: Tensor
    ) -> tuple[Tensor | None, str]:
        """limsup ‖Δz*‖/‖Δc̃‖ at this input, bounded, [B] (inf where none), or None; and why.

        z* lies within ``error`` [B] of z, and the bound must hold there. ``modulus`` (a number or
        [B]) is for every z, ``local`` at this z, ``rest`` as in ``lipschitz``.
        """
        return None, f"nothing is derived for {type(self).__name__}"

    # The optimal value φ(c) = min_z 1ᵀf(z) + ½‖z‖² + q(z; c), for ``nn.Envelope`` (docs/facts.md,
    # fact 7). It does not depend on the prior.

    def value_gradient(self, z: Tensor) -> Tensor:
        """∇φ(c) at the minimizer z, shaped as c."""
        raise NotImplementedError(f"no optimal value is derived for {type(self).__name__}")

    def value_curvature(self, norm: float | Tensor | None = None) -> Curvature:
        """Bounds on ∇²φ for every c; with ``norm`` for ‖W‖ ≤ norm and ‖W_h‖ ≤ 1, else proven.

        A given norm is one for which the equilibrium is unique; a tensor keeps its gradient.
        """
        raise NotImplementedError(f"no optimal value is derived for {type(self).__name__}")

    def value_slope(self) -> float:
        """A Lipschitz constant of z ↦ ``value_gradient(z)``."""
        raise NotImplementedError(f"no optimal value is derived for {type(self).__name__}")

    def numbers(self, in_shape: Sequence[int]) -> dict[str, Any]:
        """Norms for a certificate to show: ``norm``, and what else ``certify.Numbers`` has.

        On large states the estimate beside the bound would take longer than all that is proven: 0.
        """
        operator = getattr(self, "operator", None)
        if operator is None:
            return {}
        small = math.prod(in_shape) <= LARGE
        return {"norm": operator.norm(in_shape) if small else NormBound(0.0, self.norm_upper())}

    def norm_upper(self) -> float:
        """Rigorous ‖W‖₂; for maps as large as c, where c determines the shape of Wz."""
        shape, w = self._image_shape(), self.operator
        bound = w.norm_upper if shape is None else partial(w.norm_upper_on, shape)
        return self._once("norm", bound)

    def _once(self, name: object, compute: Callable[[], T]) -> T:
        """Computed on first use for a shape of Wz, and kept: weights are taken as constant."""
        key = name, self._image_shape()
        if key not in self._kept:
            self._kept[key] = compute()
        found: T = self._kept[key]
        return found

    def _image_shape(self) -> tuple[int, ...] | None:
        """The shape of Wz, where c determines it."""
        return None


class ImageCoupling(Coupling):
    """A coupling of Wz to a c that has its shape."""

    def __init__(self, W: Weights, c: Tensor) -> None:
        super().__init__(W, c)
        try:
            self.operator.check_output(c.shape[1:])
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: c has the shape of Wz. {error}") from None

    def _image_shape(self) -> tuple[int, ...]:
        return tuple(self.c.shape[1:])

    def check_state(self, z: Tensor) -> None:
        expected = (z.shape[0], *self.operator.output_shape(z.shape[1:])) if z.ndim else ()
        if expected != tuple(self.c.shape):
            raise ValueError(
                f"{type(self).__name__}: W takes a state {tuple(z.shape)} to {expected}, "
                f"but c is {tuple(self.c.shape)}."
            )

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        """z₀ = 0; without ``shape`` [B, *state] a strided W takes stride × the size of c."""
        if shape is None:
            shape = (self.c.shape[0], *self.operator.input_shape(self.c.shape[1:]))
        start = self.c.new_zeros(tuple(shape))
        self.check_state(start)
        return start

    def rounding_error(self, z: Tensor) -> Tensor | None:
        magnitude = self.operator.magnitude()
        return None if magnitude is None else self._rounding(z, *magnitude)

    def _rounding(self, z: Tensor, size: LinearOperator, terms: int) -> Tensor | None:
        """``rounding_error`` for W of the magnitude |W| = ``size``, so many terms in a sum."""
        return None


class _WithLinearTerm(Coupling):
    """q(z) = −φ(⟨c, z⟩) − ½‖Wz‖² with a scalar φ, here φ(t) = t; c has the shape of z.

    ∇q = −φ′(t)c − WᵀWz and ∇²q = −φ″(t)ccᵀ − WᵀW with t = ⟨c, z⟩.
    """

    def __init__(self, W: Weights, c: Tensor) -> None:
        super().__init__(W, c)
        try:
            self.operator.output_shape(c.shape[1:])
        except ValueError as error:
            raise ValueError(
                f"{type(self).__name__}: c has the shape of the state z, here "
                f"{tuple(c.shape)}, and W does not take it. {error}"
            ) from None

    def _image_shape(self) -> tuple[int, ...]:
        return self.operator.output_shape(self.c.shape[1:])

    def _phi(self, t: Tensor) -> Tensor:
        return t

    def _slope(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def _bend(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def _slope_error(self, t: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
        """|φ′| at most, and the error of the computed φ′(t) where t is off by ``off``. [B] each."""
        return self._slope(t), torch.zeros_like(t)

    def _slope_range(self, t: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        """|φ′| and |φ″| at most, within ``far`` of t. [B] each."""
        return self._slope(t), self._bend(t)

    def _bend_change(self, t: Tensor, far: Tensor) -> Tensor:
        """By how much φ″ changes at most within ``far`` of t. [B]."""
        return torch.zeros_like(t)

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

    def rounding_error(self, z: Tensor) -> Tensor | None:
        """∇q = −(WᵀWz + φ′(t)c), t = ⟨c, z⟩, line by line."""
        off = self._gram_error(z)
        if off is None:
            return None
        t = (self.c * z).flatten(1).sum(1)
        t_off = sum_error(z[0].numel() + 1) * (self.c * z).abs().flatten(1).sum(1)
        slope, slope_off = self._slope_error(t, t_off)
        return off + _scaled(slope_off + 4 * UNIT * slope, self.c.abs())

    def _gram_error(self, z: Tensor) -> Tensor | None:
        """The error of WᵀWz, entrywise."""
        magnitude = self.operator.magnitude()
        if magnitude is None:
            return None
        size, terms = magnitude
        inside = sum_error(terms) * (size(z.abs()) + self.operator(z).abs())
        return size.adjoint(inside, z.shape[1:])

    def lipschitz(self, modulus: float, rest: Tensor, reach: float, *, in_x: bool) -> Reasoned:
        return None, "the modulus depends on the input; lipschitz_local holds at this one"

    def local_lipschitz(
        self, z: Tensor, error: Tensor, modulus: Tensor, local: Tensor, rest: Tensor
    ) -> tuple[Tensor | None, str]:
        """(φ′ + |φ″|‖c‖‖z*‖)/m at t = ⟨c, z*⟩: the derivative of φ′(t)c in c, over the modulus."""
        bend = self.hessian_lipschitz()
        known = modulus
        if bend is not None:
            slow = torch.as_tensor(bend, dtype=z.dtype, device=z.device)
            known = torch.maximum(known, local - torch.where(slow == 0.0, 0.0, slow * error))
        c = norm_upper(self.c)
        t = (self.c * z).flatten(1).sum(1)
        far = c * error + 1e-14 * c * norm_upper(z)  # |t* − t|
        slope, second = self._slope_range(t, far)
        push = torch.where(second > 0, second * c * (norm_upper(z) + error), 0.0)
        found = (slope + push) / known * (1.0 + 1e-13)
        found = torch.where((known > 0) & ~found.isnan(), found, math.inf)
        return found, "at the equilibrium near this z, from ∇²q there"

    def _squared_norm(self) -> Tensor:
        """‖c‖² per sample in float64, rounded up. [B]."""
        c = exact(self.c)
        return inner(c, c) * (1.0 + 2e-16 * (c[0].numel() + 4))

    @torch.no_grad()
    def local_curvature(self, z: Tensor) -> Curvature:
        """−max(φ″(t), 0)‖c‖² − ‖W‖² ≤ ∇²q ≤ max(−φ″(t), 0)‖c‖², t = ⟨c, z⟩."""
        self.check_state(z)
        terms = exact(self.c) * exact(z)
        t = terms.flatten(1).sum(1)
        t_off = sum_error(z[0].numel() + 1) * terms.abs().flatten(1).sum(1)
        bend, size = self._bend(t), self._squared_norm()
        off = self._bend_change(t, t_off) + 64 * UNIT * (1.0 + bend.abs())
        lower = -(bend + off).clamp_min(0.0) * size - self.norm_upper() ** 2
        note = "at this z, from φ″(⟨c, z⟩), ‖c‖ and the upper bound on ‖W‖₂"
        return Curvature(lower, (off - bend).clamp_min(0.0) * size, True, note)


class Linear(_WithLinearTerm):
    """q(z) = −⟨c, z⟩ − ½‖Wz‖², −∇q = WᵀWz + c (OptEq; GEQ Eq 3–4). c has the shape of z."""

    local_curvature = Coupling.local_curvature

    def grad(self, z: Tensor) -> Tensor:
        self.check_state(z)
        return -(self._gram(z) + self.c)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        self.check_state(v)
        return -self._gram(v)

    def rounding_error(self, z: Tensor) -> Tensor | None:
        off = self._gram_error(z)
        return None if off is None else off + 2 * UNIT * self.c.abs()

    def hessian_lipschitz(self) -> Tensor | float | None:
        return 0.0

    def lipschitz(self, modulus: float, rest: Tensor, reach: float, *, in_x: bool) -> Reasoned:
        """‖U‖/m."""
        return reach / modulus * (1.0 + 1e-14), "every input: ‖U‖/m"

    def value_gradient(self, z: Tensor) -> Tensor:
        return -z

    def value_curvature(self, norm: float | Tensor | None = None) -> Curvature:
        """−1/(1 − ‖W‖²) ≤ ∇²φ ≤ 0: z* is the gradient of the convex function −φ."""
        w = self.norm_upper() if norm is None else norm
        unique = norm is not None or w < 1.0
        lower = -1.0 / (1.0 - w**2) * (1.0 + 1e-14) if unique else -math.inf
        return Curvature(lower, 0.0, norm is None, "every c and every convex prior")

    def value_slope(self) -> float:
        return 1.0

    def curvature(self) -> Curvature:
        """−‖W‖² ≤ ∇²q ≤ 0."""
        return Curvature(-(self.norm_upper() ** 2), 0.0, True, "every z: ∇²q = −WᵀW")


class Polynomial(_WithLinearTerm):
    """q(z) = −(a + ⟨c, z⟩)ᵈ − ½‖Wz‖² (GEQ full, Table 4, has a = 0). c has the shape of z.

    As printed (offset a = 0) the kernel is degenerate: T(0) = 0 for every input, for d = 2 the map
    is homogeneous, and for d ≥ 3 the objective is unbounded below on z ≥ 0. It is kept, with a
    warning and a start away from zero; a = 1, the default, is the usable one.

    Args:
        degree: d ≥ 2; degree 1 is the ``Linear`` coupling.
        offset: a, 1.0 or 0.0.
    """

    def __init__(self, W: Weights, c: Tensor, degree: int = 2, offset: float = 1.0) -> None:
        super().__init__(W, c)
        self.degree = degree
        check_number(self, "degree", low=2, integer=True)
        if offset not in (0.0, 1.0):
            raise ValueError(f"Polynomial(offset={offset!r}): expected 0.0 (as printed) or 1.0.")
        self.offset = float(offset)
        if offset == 0.0:
            warnings.warn(
                "Polynomial(offset=0.0), the kernel as printed, is degenerate: z = 0 is an "
                "equilibrium for every input. Start away from zero (default_start does), or use "
                "offset=1.0.",
                DegenerateKernelWarning,
                stacklevel=2,
            )

    def _phi(self, t: Tensor) -> Tensor:
        return (self.offset + t) ** self.degree

    def _slope(self, t: Tensor) -> Tensor:
        return self.degree * (self.offset + t) ** (self.degree - 1)

    def _bend(self, t: Tensor) -> Tensor:
        return self.degree * (self.degree - 1) * (self.offset + t) ** (self.degree - 2)

    def _slope_error(self, t: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
        base, d = (self.offset + t).abs() + UNIT * t.abs() + off, self.degree
        slope = d * base ** (d - 1)
        slope_off = d * (d - 1) * base ** (d - 2) * (off + UNIT * base)
        return slope, slope_off + (d + 8) * UNIT * slope

    def _slope_range(self, t: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        base, d = (self.offset + t).abs() + far, self.degree
        return d * base ** (d - 1), d * (d - 1) * base ** (d - 2)

    def _bend_change(self, t: Tensor, far: Tensor) -> Tensor:
        base, d = (self.offset + t).abs() + far, self.degree
        return torch.zeros_like(t) if d == 2 else d * (d - 1) * (d - 2) * base ** (d - 3) * far

    def hessian_lipschitz(self) -> Tensor | float | None:
        """0 for d = 2, 6‖c‖³ for d = 3; none above."""
        if self.degree > 3:
            return None
        return 0.0 if self.degree == 2 else 6.0 * norm_upper(self.c) ** 3

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
            lower = -2.0 * self._squared_norm() - w2
            return Curvature(lower, 0.0, True, "every z: ∇²q = −2ccᵀ − WᵀW")
        upper = math.inf if self.degree % 2 else 0.0
        note = f"degree {self.degree}: ∇²q is unbounded over z; use local_curvature"
        return Curvature(-math.inf, upper, True, note)


class Sigmoidal(_WithLinearTerm):
    """q(z) = −tanh⟨c, z⟩ − ½‖Wz‖², −∇q = WᵀWz + (1 − tanh²⟨c, z⟩)c (GEQ full, Table 4)."""

    def _phi(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def _slope(self, t: Tensor) -> Tensor:
        return 1.0 - torch.tanh(t).square()

    def _bend(self, t: Tensor) -> Tensor:
        h = torch.tanh(t)
        return -2.0 * h * (1.0 - h.square())

    def _slope_error(self, t: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
        # |φ″| ≤ 4/(3√3), and 1 − tanh² of a tanh that is off by 4 ulp.
        return torch.ones_like(t), SIGMOID_CURVATURE * off + 4 * FUNCTION

    def _slope_range(self, t: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        h = t.tanh()
        slope = (1.0 - h * h + SIGMOID_CURVATURE * far).clamp_max(1.0)
        return slope, ((2.0 * h * (1.0 - h * h)).abs() + 2.0 * far).clamp_max(SIGMOID_CURVATURE)

    def _bend_change(self, t: Tensor, far: Tensor) -> Tensor:
        return 2.0 * far

    def hessian_lipschitz(self) -> Tensor | float | None:
        """2‖c‖³: |tanh‴| ≤ 2."""
        return 2.0 * norm_upper(self.c) ** 3

    @torch.no_grad()
    def curvature(self) -> Curvature:
        """−k‖c‖² − ‖W‖² ≤ ∇²q ≤ k‖c‖² with k = 4/(3√3) = 0.7698 (docs/facts.md, fact 6)."""
        bend = SIGMOID_CURVATURE * self._squared_norm()
        note = "every z: ∇²q = 2t(1 − t²)ccᵀ − WᵀW, |2t(1 − t²)| ≤ 4/(3√3)"
        return Curvature(-bend - self.norm_upper() ** 2, bend, True, note)


class Activated(ImageCoupling):
    """q(z) = −(1/ν) 1ᵀσ̃(Wz + c), −∇q = (1/ν) Wᵀσ(Wz + c), σ̃′ = σ (OptEq Eq 3, Theorem 1).

    With no prior (``Free``) the layer map is Eq 3 itself, and G(z) = ½‖z‖² − (1/ν)1ᵀσ̃(Wz + c) has,
    by Toland's duality, the minimizer and the minimum of Theorem 1's φ, which is closed only for an
    invertible W. From the prior of σ, with a = σ(v), σ̃(v) = (f + ½|·|²)*(v) = va − f(a) − ½a².

    Args:
        W: z [B, *state] → Wz, shaped like c.
        c: Ux + b, [B, *out].
        prior: f with σ = prox_f.
        nu: ν > 0; Theorem 1 asks ν ≥ L_σ‖W‖².
    """

    def __init__(self, W: Weights, c: Tensor, prior: Prior, nu: float = 1.0):
        super().__init__(W, c)
        if not isinstance(prior, Prior):
            raise TypeError(f"Activated(prior={prior!r}): expected a prior such as NonNegative().")
        if not prior.separable or prior.inputs():
            raise TypeError(
                f"Activated(prior={type(prior).__name__}(...)): expected an elementwise prior, its "
                "parameters the same for all samples."
            )
        self.prior, self.nu = prior, nu
        check_number(self, "nu", low=0.0, low_open=True)

    def _before(self, z: Tensor) -> Tensor:
        """Wz + c."""
        self.check_state(z)
        return self.operator(z) + self.c

    def hidden(self, z: Tensor) -> Tensor:
        """ζ = σ(Wz + c). [B, *state] → [B, *out]."""
        return self.prior.activation(self._before(z))

    def value(self, z: Tensor) -> Tensor:
        v = at_least_float32(self._before(z))
        a = self.prior.activation(v)
        return -per_sample_sum(v * a - self.prior.value(a) - 0.5 * a * a) / self.nu

    def grad(self, z: Tensor) -> Tensor:
        pulled = self.operator.adjoint(self.hidden(z), z.shape[1:])
        return -pulled if self.nu == 1.0 else pulled * (-1.0 / self.nu)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        before = self._before(z)
        keep = torch.is_grad_enabled() and before.requires_grad
        with torch.enable_grad():
            before = before if keep else before.detach().requires_grad_()
            a = self.prior.activation(before)
            (slope,) = torch.autograd.grad(a, before, torch.ones_like(a), create_graph=keep)
        pulled = self.operator.adjoint(slope * self.operator(v), z.shape[1:])
        return pulled * (-1.0 / self.nu)

    def _rounding(self, z: Tensor, size: LinearOperator, terms: int) -> Tensor:
        """∇q = −(1/ν)Wᵀσ(v), v = Wz + c, line by line."""
        v = self.operator(z) + self.c
        a = self.prior.activation(v)
        off = sum_error(terms) * size(z.abs()) + 2 * UNIT * v.abs()
        off = off + FUNCTION * (v.abs() + a.abs()) + sum_error(terms + 2) * a.abs()
        return size.adjoint(off, z.shape[1:]) / self.nu

    def lipschitz(self, modulus: float, rest: Tensor, reach: float, *, in_x: bool) -> Reasoned:
        """m‖Δz‖² ≤ (1/ν)⟨WΔz, Δσ⟩ with σ moved by c alone: L_σ‖W‖/(νm)."""
        found = self._steepness() / modulus * (1.0 + 1e-14)
        return found * reach, "every input: L_σ‖W‖/(νm)·‖U‖"

    def local_lipschitz(
        self, z: Tensor, error: Tensor, modulus: Tensor, local: Tensor, rest: Tensor
    ) -> tuple[Tensor | None, str]:
        m = modulus.expand_as(error)
        found = torch.where(m > 0, self._steepness() / m * (1.0 + 1e-14), math.inf)
        return found, "as for every input: σ′ jumps at kinks"

    def _steepness(self) -> float:
        """L_σ‖W‖/ν."""
        return self.prior.expansion * self.norm_upper() / self.nu

    def curvature(self) -> Curvature:
        """−(L_σ/ν)‖W‖² ≤ ∇²q ≤ 0."""
        lower = -self.prior.expansion * self.norm_upper() ** 2 / self.nu
        note = "every z: ∇²q = −(1/ν)Wᵀ diag(σ′)W, 0 ≤ σ′ ≤ L_σ"
        # The L_σ of a sampled activation is a measurement. No closer bound holds at one z: σ′ jumps
        # at kinks.
        return Curvature(lower, 0.0, not self.prior.sampled, note)


def _product(bound: Tensor, square: float) -> Tensor:
    """Of a bound and a squared norm: 0 where one of them is, and the other is not known (inf)."""
    return torch.where((bound == 0) | (square == 0), 0.0, bound * square)


def parts_of(q: Coupling) -> tuple[tuple[Coupling, LinearOperator], ...]:
    """The pairs (qᵢ, Kᵢ) of a sum Σ qᵢ(Kᵢz); of another coupling itself and the identity."""
    return q.parts if isinstance(q, SumCoupling) else ((q, IDENTITY),)


class SumCoupling(Coupling):
    """Σ qᵢ(Kᵢz), each with its own linear operator; made by ``+`` and ``compose``."""

    parameters = ("parts",)

    def __init__(self, *parts: tuple[Coupling, LinearOperator]) -> None:
        self.parts = parts

    def _each(self, z: Tensor) -> Iterator[tuple[Coupling, Tensor, Callable[[Tensor], Tensor]]]:
        """qᵢ, Kᵢz and Kᵢᵀ."""
        for q, K in self.parts:
            yield q, K(z), partial(K.adjoint, in_shape=z.shape[1:])

    def value(self, z: Tensor) -> Tensor:
        return torch.stack([q.value(image) for q, image, _ in self._each(z)]).sum(0)

    def grad(self, z: Tensor) -> Tensor:
        return torch.stack([back(q.grad(image)) for q, image, back in self._each(z)]).sum(0)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        pairs = zip(self._each(z), self._each(v), strict=True)
        return torch.stack([back(q.hvp(a, b)) for (q, a, back), (_, b, _) in pairs]).sum(0)

    def curvature(self) -> Curvature:
        """The sum of the parts' bounds; mKᵀK is at least mσmin² for m ≥ 0 and m‖K‖² below."""
        return self._sum([q.tight_curvature() for q, _ in self.parts])

    def local_curvature(self, z: Tensor) -> Curvature:
        return self._sum([q.tight_local_curvature(image) for q, image, _ in self._each(z)])

    def _sum(self, found: list[Curvature]) -> Curvature:
        low: Any = 0.0
        high: Any = 0.0
        for c, (_, K) in zip(found, self.parts, strict=True):
            least, most = K.norm_lower() ** 2, K.norm_upper() ** 2
            m, upper = c.ends()
            m = torch.where(m >= 0, _product(m, least), _product(m, most))
            upper = torch.where(upper >= 0, _product(upper, most), _product(upper, least))
            low, high = low + m - 8 * UNIT * m.abs(), high + upper + 8 * UNIT * upper.abs()
        kinds = {c.basis for c in found}
        return Curvature(
            as_number(low),
            as_number(high),
            all(c.rigorous for c in found),
            "; ".join(dict.fromkeys(c.note for c in found)),
            "estimated" if "estimated" in kinds else "given" if "given" in kinds else "",
        )

    def hessian_lipschitz(self) -> Tensor | float | None:
        total: Tensor | float = 0.0
        for q, K in self.parts:
            bend = q.hessian_lipschitz()
            if bend is None:
                return None
            total = total + bend * K.norm_upper() ** 3 * (1 + 16 * UNIT)
        return total

    def rounding_error(self, z: Tensor) -> Tensor | None:
        total = torch.zeros_like(z)
        for q, image, back in self._each(z):
            off = q.rounding_error(image) if image is z else None  # behind a K none is derived
            if off is None:
                return None
            total = total + off + sum_error(len(self.parts)) * back(q.grad(image)).abs()
        return total

    def check_state(self, z: Tensor) -> None:
        for q, image, _ in self._each(z):
            q.check_state(image)

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        q, K = self.parts[0]
        if isinstance(K, IdentityOperator):
            return q.default_start(shape)
        image = q.default_start()
        full = (image.shape[0], *K.input_shape(image.shape[1:]))
        return image.new_zeros(full if shape is None else tuple(shape))
