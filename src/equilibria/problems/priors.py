"""Priors ``f``: the convex half of a hidden problem, and the activations they induce.

    ``sigma(v) = prox_f(v) = argmin_z f(z) + (z - v)^2 / 2``

An activation that is monotone and 1-Lipschitz is the proximal operator of a convex ``f``
(Xie et al. 2021, Theorem 1: ``f(z) = int (sigma^{-1}(t) - t) dt``). Here: the piecewise linear
activations, then tanh, sigmoid and softplus; ``custom_prior`` has a user's own activation, and
``joint_priors`` those that are not elementwise (simplex, norms, total variation, ...).

Conventions. Everything here is elementwise, so shapes pass through. ``value`` and
``subdifferential`` answer in float32 or better, ``prox`` in the type of ``v``. ``f`` is ``+inf``
outside its domain and never NaN for an input that is not NaN.

A parameter (a weight, an end of a box) is a number or a tensor, perhaps learned. The dimensions of
a tensor are aligned with those of ``z`` from the left, batch first: ``[]`` is one number, ``[B]``
one per sample, ``[1, n]`` one per feature, ``[B, n]`` both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from equilibria.adjoints.graph import host_may_read
from equilibria.engine.options import OptionError, OptionTypeError, check_number
from equilibria.engine.tree import per_sample
from equilibria.problems.parts import Part, replaced

Parameter = float | Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32 or better, the type in which objective values are computed."""
    if not x.is_floating_point():
        raise TypeError(f"a prior takes a real floating point tensor, got dtype {x.dtype}")
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def per_sample_sum(t: Tensor) -> Tensor:
    """Sum over all but the batch, in float32 or better. [B, ...] → [B]."""
    dtype = torch.promote_types(t.dtype, torch.float32)
    return t.sum(tuple(range(1, t.ndim)), dtype=dtype) if t.ndim > 1 else t.to(dtype)


def check_step(tau: float | Tensor) -> float | Tensor:
    """``tau`` itself; a Python number must be positive and finite (a tensor is not inspected)."""
    if isinstance(tau, Tensor):
        return tau
    if not 0.0 < tau < math.inf:
        raise ValueError(f"tau got {tau!r}, takes a positive finite number or a tensor of them")
    return float(tau)


def step_of_samples(tau: float | Tensor, z: Tensor) -> float | Tensor:
    """``tau``, a number or one per sample, shaped to broadcast over ``z``."""
    tau = check_step(tau)
    if not isinstance(tau, Tensor) or tau.ndim == 0:
        return tau
    if tau.numel() != tau.shape[0] or tau.shape[0] not in (1, z.shape[0]):
        raise ValueError(
            f"tau got shape {tuple(tau.shape)} for a state of shape {tuple(z.shape)}, takes a "
            "number or one per sample, [B]"
        )
    return per_sample(tau.reshape(-1), z)


def step_tensor(tau: float | Tensor, like: Tensor) -> Tensor:
    """``tau`` as a tensor in the type of ``like``, made on its device."""
    if isinstance(tau, Tensor):
        return tau.to(like.dtype)
    return torch.full((), tau, dtype=like.dtype, device=like.device)


def graph_zero(z: Tensor) -> Tensor:
    """Zeros shaped like ``z`` that stay in its autograd graph (with derivative 0)."""
    return torch.where(z.isfinite(), z, 0.0) * 0.0


def check_parameter(
    owner: object,
    name: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
) -> None:
    """Raise unless ``owner.name`` is in range: a finite number, or a tensor of them.

    Entries of a tensor on a GPU, or under a compiler or transform, are not read here but by
    ``Prior.in_double``, before anything is proven. NaN passes: it spoils its own sample alone.
    """
    value = getattr(owner, name)
    if not isinstance(value, Tensor):
        check_number(owner, name, low=low, high=high, low_open=low_open)
        return
    who = type(owner).__name__
    if not value.is_floating_point():
        given = {name: f"a tensor of {value.dtype}"}
        raise OptionTypeError(who, given, ": expected a number or a floating point tensor.")
    if not host_may_read(value):
        return
    held = value.detach()
    wrong = held[held.isinf() | (held <= low if low_open else held < low) | (held > high)]
    if wrong.numel():
        raise OptionError(
            who,
            {name: f"a tensor with the entry {float(wrong[0]):g}"},
            f" is out of range: expected numbers in {'(' if low_open else '['}{low:g}, {high:g}]. "
            "A learned parameter stays positive as exp(p) or softplus(p), with p learned.",
        )


def aligned(owner: object, name: str, z: Tensor) -> Parameter:
    """The parameter, a tensor shaped to broadcast over ``z``: dimensions match from the left."""
    value: Parameter = getattr(owner, name)
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    fits = value.ndim <= z.ndim
    if not fits or any(n not in (1, m) for n, m in zip(value.shape, z.shape, strict=False)):
        raise ValueError(
            f"{type(owner).__name__}({name}=...): got a tensor of shape {tuple(value.shape)} for a "
            f"state of shape {tuple(z.shape)}, takes a number, [B] (one per sample), [1, ...] (one "
            "per feature) or [B, ...]: its dimensions match those of the state from the left"
        )
    return value.reshape(*value.shape, *[1] * (z.ndim - value.ndim))


def _largest(value: Parameter) -> float:
    """The largest magnitude."""
    return float(value.detach().abs().max()) if isinstance(value, Tensor) else abs(value)


class Prior(Part, ABC):
    """``f: R -> (-inf, inf]``, closed and convex, applied to each entry of ``z``.

    A prior is an immutable description without state, shared freely between problems, devices and
    types (as far as its parameters are numbers).
    """

    separable: ClassVar[bool] = True
    """Whether ``f`` is a sum over entries; ``joint_priors.JointPrior`` says what changes if not."""

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        """Raise unless the parameters are in range."""

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """``f(z)`` elementwise, the shape of ``z``; ``+inf`` outside the domain."""

    def sample_value(self, z: Tensor) -> Tensor:
        """``f(z)`` of each sample, ``[B]``."""
        value = self.value(z)
        return per_sample_sum(value) if self.separable else value

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

    @property
    def piecewise_linear(self) -> bool:
        """Whether ``prox_{tau f}`` is, so that a few roundings give it for every ``tau``."""
        return False

    @property
    def shift(self) -> float | None:
        """What the prox adds to its argument at most, per unit of ``tau``.

        A prior that states it promises that the prox rounds by no more than 4 units in the last
        place of its argument, of this and of its answer. None: not known.
        """
        return None

    def prox_error(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor | float:
        """A bound on what an inner solve leaves of ``prox(v, tau)``, ``[B]``; 0 if it has none."""
        return 0.0

    @property
    def sampled(self) -> bool:
        """Whether the activation is known from samples alone: what rests on it is not proven."""
        return False

    def activation(self, v: Tensor) -> Tensor:
        """``sigma(v) = prox_f(v)``."""
        return self.prox(v)

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        """The element of least norm of ``df(z) + g``, ``inf`` outside the domain."""
        lower, upper = self.subdifferential(z)
        return torch.where(lower + g > 0, lower + g, (upper + g).clamp(max=0.0))

    def into_domain(self, z: Tensor) -> Tensor:
        """``z`` moved to a nearest point where ``f`` is finite."""
        return torch.where(torch.isinf(self.value(z)), self.prox(z, 1e-12), z)

    def _differs(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] != 1

    @property
    def has_tensors(self) -> bool:
        """Whether a parameter is a tensor."""
        held = [getattr(self, name) for name in self.parameters]
        return any(isinstance(v, Tensor) or (isinstance(v, Prior) and v.has_tensors) for v in held)

    def in_double(self) -> Self:
        """The same prior on the same numbers, detached and in float64; all of them checked."""
        twin = super().in_double()
        held = {name: getattr(twin, name) for name in self.parameters}
        replaced(twin, **{n: t.cpu() for n, t in held.items() if isinstance(t, Tensor)})._check()
        return twin


def interval(inside: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """``(lower, upper)`` where ``inside`` holds, the empty interval elsewhere."""
    return torch.where(inside, lower, math.inf), torch.where(inside, upper, -math.inf)


class _LinearOnInterval(Prior):
    """``f(z) = weight z`` for ``lower <= z <= upper``, else ``+inf``."""

    lower: Parameter = -math.inf
    upper: Parameter = math.inf
    weight: Parameter = 0.0
    piecewise_linear = True

    @property
    def shift(self) -> float:
        return _largest(self.weight)

    def _ends(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``lower``, ``upper``, and whether ``z`` is between them."""
        # Compare in the type of z: what prox returned must count as inside after rounding.
        lower = step_tensor(aligned(self, "lower", z), z)
        upper = step_tensor(aligned(self, "upper", z), z)
        return lower, upper, (z >= lower) & (z <= upper)

    def value(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        weight = aligned(self, "weight", z)
        flat = not isinstance(weight, Tensor) and not weight
        linear = graph_zero(wide) if flat else (weight * wide).to(wide.dtype)
        return torch.where(self._ends(z)[2], linear, math.inf)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper, inside = self._ends(z)
        wide = at_least_float32(z)
        slope = (graph_zero(wide) + aligned(self, "weight", z)).to(wide.dtype)
        down = torch.where((z == lower) & z.isfinite(), -math.inf, slope)
        up = torch.where((z == upper) & z.isfinite(), math.inf, slope)
        return interval(inside, down, up)


@dataclass(frozen=True)
class Free(_LinearOnInterval):
    """``f(z) = 0``: no prior. ``sigma(v) = v``."""

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        check_step(tau)
        return v

    def into_domain(self, z: Tensor) -> Tensor:
        return z


@dataclass(frozen=True)
class NonNegative(_LinearOnInterval):
    """``f(z) = 0`` for ``z >= 0``, else ``+inf``. ``sigma = relu``."""

    lower = 0.0

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        check_step(tau)
        return torch.relu(v)

    def into_domain(self, z: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().into_domain(z)
        return torch.relu(z)  # the same in one pass; its gradient at 0 is another


@dataclass(frozen=True)
class Box(_LinearOnInterval):
    """``f(z) = 0`` for ``lower <= z <= upper``, else ``+inf``.

    ``sigma(v) = min(max(v, lower), upper)`` (clipped ReLU for ``Box(0, 1)``, hardtanh for
    ``Box(-1, 1)``). An end may be infinite. Ends that are tensors may meet, which fixes an entry.
    """

    lower: Parameter = 0.0
    upper: Parameter = 1.0
    parameters = ("lower", "upper")

    def _check(self) -> None:
        ends = [end for end in (self.lower, self.upper) if isinstance(end, Tensor)]
        if not ends:
            lower, upper = float(self.lower), float(self.upper)
            if not lower < upper or lower == math.inf or upper == -math.inf:
                raise ValueError(
                    f"Box: lower got {self.lower!r} and upper got {self.upper!r}, "
                    "takes lower < upper (an end may be infinite)"
                )
            return
        if not all(end.is_floating_point() for end in ends):
            raise TypeError("Box: lower and upper take numbers or floating point tensors")
        if not all(map(host_may_read, ends)):
            return
        depth = max(end.ndim for end in ends)
        low, high = (
            end.detach().reshape((*end.shape, *[1] * (depth - end.ndim)))
            for end in map(torch.as_tensor, (self.lower, self.upper))
        )
        wrong = (low > high) | (low == math.inf) | (high == -math.inf)
        if bool(wrong.any()):
            pair = [float(end.expand_as(wrong)[wrong][0]) for end in (low, high)]
            raise ValueError(
                f"Box: lower got a tensor with the entry {pair[0]:g} where upper is {pair[1]:g}, "
                "takes lower <= upper (an end may be infinite)"
            )

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        check_step(tau)
        if isinstance(self.lower, Tensor) or isinstance(self.upper, Tensor):
            lower, upper, _ = self._ends(v)
            return v.clamp(min=lower, max=upper)
        return v.clamp(min=self.lower, max=self.upper)


@dataclass(frozen=True)
class ShiftedNonNegative(_LinearOnInterval):
    """``f(z) = weight z`` for ``z >= 0``, else ``+inf``. ``sigma(v) = relu(v - weight)``.

    A negative weight shifts to the left.
    """

    weight: Parameter = 1.0
    lower = 0.0
    parameters = ("weight",)

    def _check(self) -> None:
        check_parameter(self, "weight")

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return torch.relu(v - check_step(tau) * aligned(self, "weight", v)).to(v.dtype)


@dataclass(frozen=True)
class SoftThreshold(Prior):
    """``f(z) = weight |z|``. ``sigma(v) = sign(v) max(|v| - weight, 0)``."""

    weight: Parameter = 1.0
    piecewise_linear = True
    parameters = ("weight",)

    def _check(self) -> None:
        check_parameter(self, "weight", low=0.0)

    @property
    def shift(self) -> float:
        return _largest(self.weight)

    def value(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        return (aligned(self, "weight", z) * wide.abs()).to(wide.dtype)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        threshold = check_step(tau) * aligned(self, "weight", v)
        return (torch.relu(v - threshold) - torch.relu(-v - threshold)).to(v.dtype)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        zero = graph_zero(at_least_float32(z))
        weight = aligned(self, "weight", z)
        down, up = (zero - weight).to(zero.dtype), (zero + weight).to(zero.dtype)
        return torch.where(z > 0, up, down), torch.where(z < 0, down, up)


@dataclass(frozen=True)
class LeakyNonNegative(Prior):
    """``f(z) = (1/slope - 1) min(z, 0)^2 / 2``. ``sigma(v) = max(v, 0) + slope min(v, 0)``.

    ``prox_{tau f}(v) = slope v / (slope + tau (1 - slope))`` for ``v < 0``; ``0 < slope <= 1``.
    Slope 0 would be ``NonNegative``, slope 1 is ``Free``.
    """

    slope: Parameter = 0.01
    shift = 0.0
    piecewise_linear = True
    parameters = ("slope",)

    def _check(self) -> None:
        check_parameter(self, "slope", low=0.0, high=1.0, low_open=True)

    def value(self, z: Tensor) -> Tensor:
        below = at_least_float32(z).clamp(max=0.0)
        slope = aligned(self, "slope", z)  # 1/slope alone may overflow
        return (0.5 * (1.0 - slope) * below * below / slope).to(below.dtype)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        slope = aligned(self, "slope", v)
        factor = slope / (slope + check_step(tau) * (1.0 - slope))
        return torch.where(v >= 0, v, v * factor).to(v.dtype)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        below, slope = at_least_float32(z).clamp(max=0.0), aligned(self, "slope", z)
        derivative = ((1.0 - slope) * below / slope).to(below.dtype)
        return derivative, derivative


@dataclass(frozen=True)
class WithL1(Prior):
    """``f(z) + weight |z|`` for any prior ``f``, with an exact prox.

    With ``a = prox_{tau f}(v - tau weight)`` and ``b = prox_{tau f}(v + tau weight)``,

        ``prox_{tau (f + weight |.|)}(v) = a if a > 0, b if b < 0, else 0``.

    ``p`` is the prox iff ``v - p`` lies in ``tau df(p) + tau weight d|p|``: for ``p > 0`` this says
    ``p = a``, for ``p < 0`` ``p = b``. Otherwise ``a <= 0 <= b``, so ``[v - tau weight, v + tau
    weight]`` meets ``tau df(0)``, which is the condition for ``p = 0``.
    """

    prior: Prior
    weight: Parameter = 1.0
    parameters = ("weight", "prior")

    def _check(self) -> None:
        if not self.prior.separable:
            raise TypeError(
                f"WithL1 (a problem with the regularizer L1) takes a separable prior: the prox of "
                f"{type(self.prior).__name__} + w|z| has no closed form here. Use "
                "regularize='prox', SquaredNorm, or a prior of your own."
            )
        check_parameter(self, "weight", low=0.0)

    @property
    def expansion(self) -> float:
        return self.prior.expansion

    @property
    def piecewise_linear(self) -> bool:
        return self.prior.piecewise_linear

    @property
    def shift(self) -> float | None:
        return None if self.prior.shift is None else self.prior.shift + _largest(self.weight)

    @property
    def sampled(self) -> bool:
        return self.prior.sampled

    def value(self, z: Tensor) -> Tensor:
        return self.prior.value(z) + SoftThreshold(self.weight).value(z)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        shift = check_step(tau) * aligned(self, "weight", v)
        wide = at_least_float32(v)  # v -+ shift may leave the range of half precision
        right = self.prior.prox(wide - shift, tau)
        left = self.prior.prox(wide + shift, tau)
        return (torch.relu(right) - torch.relu(-left)).to(v.dtype)  # one is 0; NaN stays NaN

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = self.prior.subdifferential(z)
        down, up = SoftThreshold(self.weight).subdifferential(z)
        return lower + down, upper + up


_STEPS = 5  # of Newton; three reach float64 accuracy


def log_wright_omega(x: Tensor) -> Tensor:
    """``y`` with ``e^y + y = x``, to a few digits: a start for Newton, no more."""
    y = torch.where(x > 1.0, x.clamp(min=1.0).log(), x)
    for _ in range(3):  # convex, and the start is right of the root
        grown = y.exp()
        y = y - (grown + y - x) / (grown + 1.0)
    return y


def tanh_gap(u: Tensor) -> Tensor:
    """``u - tanh u`` to full relative accuracy (continued fraction of tanh for ``|u| < 1``)."""
    small = u.abs() < 1.0
    inner = torch.where(small, u, 0.0)
    square = inner * inner
    tail = torch.full_like(square, 17.0)
    for odd in (15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        tail = odd + square / tail
    return torch.where(small, inner * square / (tail + square), u - u.tanh())


def _tanh_newton(u: Tensor, v: Tensor, tau: Tensor, beyond: Tensor) -> Tensor:
    """A Newton step for ``tau u + (1 - tau) tanh u = v``, ``u >= 0``; ``beyond`` is ``v - 1``."""
    fade = torch.exp(-2.0 * u)
    short = 2.0 * fade / (1.0 + fade)  # 1 - tanh u
    bend = short * (2.0 - short)  # tanh' u
    height = u.tanh()
    direct = tau * u + (1.0 - tau) * height - v
    saturated = tau * (u - 1.0) - beyond - (1.0 - tau) * short
    contracting = u + (tau - 1.0) * tanh_gap(u) - v
    miss = torch.where(u > 0.5, saturated, direct)
    miss = torch.where(tau > 1.0, contracting, miss)
    steep = 1.0 + (tau - 1.0) * height * height
    slope = torch.where(tau > 1.0, steep, tau + (1.0 - tau) * bend)
    return u - miss / slope


def solve_tanh(v: Tensor, tau: Tensor, ends: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """``u`` with ``tau u + (1 - tau) tanh u = v``; differentiable in ``v`` and ``tau``.

    ``ends`` is ``(v - 1, -v - 1)`` where the caller knows these to more digits than ``v``.
    """
    sign = torch.copysign(torch.ones_like(v), v).detach()
    folded = v * sign  # |v|, with a derivative at 0
    beyond = folded - 1.0 if ends is None else torch.where(sign > 0, *ends)
    size, step, past = folded.detach(), tau.detach(), beyond.detach()
    gap = step - 1.0
    # tau < 1: concave for u > 0, root in [|v|, artanh |v|]; the tail equation bounds it above.
    ratio = (4.0 * (1.0 - step).clamp(min=1e-30) / step).log()
    below = 0.5 * (ratio - log_wright_omega(ratio - 2.0 * (past + step) / step))
    below = torch.where(size < 1.0, torch.minimum(below, size.clamp(max=1.0).atanh()), below)
    # tau > 1: convex for u > 0; u - tanh u >= (1 - tanh 1) u^3 on [0, 1] bounds the root above.
    cubic = (size / ((1.0 - math.tanh(1.0)) * gap.clamp(min=1e-30))).pow(1.0 / 3.0)
    above = torch.minimum((size + gap) / step, torch.where(cubic <= 1.0, cubic, size))
    short = gap <= 0.0
    low = torch.where(short, size, 0.0)
    high = torch.where(short, math.inf, size)
    u = torch.where(short, below, above).clamp(min=low, max=high)
    for _ in range(_STEPS):
        u = _tanh_newton(u, size, step, past).clamp(min=low, max=high)
    return sign * _tanh_newton(_tanh_newton(u, folded, tau, beyond), folded, tau, beyond)


def _softplus(u: Tensor) -> Tensor:
    """``log(1 + e^u)``; torch's own is linear beyond 20, which float64 can see."""
    return -logsigmoid(-u)


def _softplus_newton(u: Tensor, v: Tensor, tau: Tensor) -> Tensor:
    """One Newton step for ``tau u + (1 - tau) softplus u = v``, without cancellation."""
    gap = tau - 1.0
    right = u >= 0.0
    folded = torch.where(right, -u, u)  # -|u|, with the derivative of the branch at 0
    miss = torch.where(right, u, tau * u) - gap * _softplus(folded) - v
    bend = gap * torch.sigmoid(folded)
    slope = torch.where(right, 1.0 + bend, tau - bend)
    return u - miss / slope


def solve_softplus(v: Tensor, tau: Tensor) -> Tensor:
    """``u`` with ``tau u + (1 - tau) softplus u = v``; differentiable in ``v`` and ``tau``."""
    level, step = v.detach(), tau.detach()
    far = level / step
    bent = torch.where(level > 0.0, level, far)  # the root if softplus u were max(u, 0)
    # tau < 1: convex, slope 1 on the right; softplus u <= e^u bounds the root below.
    ratio = ((1.0 - step).clamp(min=1e-30) / step).log()
    below = log_wright_omega(far + ratio) - ratio
    # tau > 1: concave, slope 1 on the right; softplus(-u) <= e^{-u} bounds the root above.
    excess = (step - 1.0).clamp(min=1e-30).log()
    above = excess - log_wright_omega(excess - level)
    short = step <= 1.0
    low = torch.where(short, -math.inf, bent)
    high = torch.where(short, bent, math.inf)
    u = torch.where(short, below, above).clamp(min=low, max=high)
    for _ in range(_STEPS):
        u = _softplus_newton(u, level, step).clamp(min=low, max=high)
    return _softplus_newton(_softplus_newton(u, v, tau), v, tau)


class SmoothPrior(Prior):
    """A prior with a derivative inside its domain ``[low, high]`` (an end may be infinite).

    The prox with another step, ``z + tau (sigma^{-1}(z) - z) = v``, is solved in
    ``u = sigma^{-1}(z)``, where it is well conditioned: the slope of
    ``h(u) = u + (tau - 1) (u - sigma(u)) - v`` lies between 1 and ``tau``. On each side of its
    inflection ``h`` is convex or concave, so Newton's method is monotone from the right start: the
    root with the activation replaced by its tail (``1 - tanh u ~ 2 e^{-2u}``, ``softplus u ~
    e^u``), a Wright omega function. Newton runs on detached values; two more steps on the live
    tensors put ``v`` and ``tau`` back into the graph, exact up to third derivatives.

    At a closed end of the domain ``f'`` is infinite, yet a saturated activation *returns* the end
    once rounded. A floating point end stands for all reals that round to it: ``subdifferential``
    there is the union over these, and autograd of ``value`` gives its finite end.
    """

    low: float
    high: float
    shift = 0.0

    @abstractmethod
    def _value(self, z: Tensor) -> Tensor:
        """``f`` at interior points."""

    @abstractmethod
    def _derivative(self, z: Tensor) -> Tensor:
        """``f'`` at interior points."""

    @abstractmethod
    def _ends(self, dtype: torch.dtype) -> tuple[float, float, float, float]:
        """``f(low), f(high)``, then the finite stand-ins for ``f'`` there in this type."""

    @abstractmethod
    def _solve(self, v: Tensor, tau: Tensor) -> Tensor:
        """``z + tau f'(z) = v``."""

    def _interior(self, z: Tensor) -> tuple[Tensor, Tensor]:
        # 1/2 is interior for all three; the second `where` of the usual pair is in the caller.
        inside = (z > self.low) & (z < self.high)
        return inside, torch.where(inside, z, 0.5)

    def value(self, z: Tensor) -> Tensor:
        at_low, at_high, slope_low, slope_high = self._ends(z.dtype)
        z = at_least_float32(z)
        inside, safe = self._interior(z)
        # z - z.detach() is 0 and carries the finite slope to autograd at the ends themselves.
        drift = torch.where(z.isfinite(), z, 0.0)
        drift = drift - drift.detach()
        edge = torch.where(z == self.low, at_low + slope_low * drift, math.inf)
        edge = torch.where(z == self.high, at_high + slope_high * drift, edge)
        return torch.where(inside, self._value(safe), edge)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        tau = check_step(tau)
        if isinstance(tau, float) and tau == 1.0:
            return self.activation(v)
        wide = at_least_float32(v)
        return self._solve(wide, step_tensor(tau, wide)).to(v.dtype)

    @abstractmethod
    def activation(self, v: Tensor) -> Tensor:
        """``sigma(v)`` in closed form."""

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        _, _, slope_low, slope_high = self._ends(z.dtype)
        z = at_least_float32(z)
        inside, safe = self._interior(z)
        derivative = self._derivative(safe)
        at_low, at_high = z == self.low, z == self.high
        lower = torch.where(at_low, -math.inf, torch.where(at_high, slope_high, derivative))
        upper = torch.where(at_high, math.inf, torch.where(at_low, slope_low, derivative))
        return interval(inside | at_low | at_high, lower, upper)


@dataclass(frozen=True)
class Tanh(SmoothPrior):
    """``f(z) = ((1+z) log(1+z) + (1-z) log(1-z) - z^2) / 2`` on ``[-1, 1]``; ``sigma = tanh``.

    ``f'(z) = artanh z - z``, ``f(0) = 0``, ``f(+-1) = log 2 - 1/2``.
    """

    low = -1.0
    high = 1.0

    def _value(self, z: Tensor) -> Tensor:
        return 0.5 * ((1.0 + z) * torch.log1p(z) + (1.0 - z) * torch.log1p(-z) - z * z)

    def _derivative(self, z: Tensor) -> Tensor:
        return torch.atanh(z) - z

    def _ends(self, dtype: torch.dtype) -> tuple[float, float, float, float]:
        near = math.atanh(1.0 - 0.5 * torch.finfo(dtype).eps) - 1.0
        return math.log(2.0) - 0.5, math.log(2.0) - 0.5, -near, near

    def _solve(self, v: Tensor, tau: Tensor) -> Tensor:
        return solve_tanh(v, tau).tanh()

    def activation(self, v: Tensor) -> Tensor:
        return torch.tanh(v)


@dataclass(frozen=True)
class Logistic(SmoothPrior):
    """``f(z) = z log z + (1-z) log(1-z) - z^2/2`` on ``[0, 1]``; ``sigma(v) = 1/(1 + e^{-v})``.

    ``f'(z) = log(z/(1-z)) - z``, ``f(0) = 0``, ``f(1) = -1/2``; ``f`` is 3-strongly convex. With
    ``sigma(2t) = (1 + tanh t)/2`` the prox equation is that of tanh with step
    ``4 tau/(1 + 3 tau)``.
    """

    low = 0.0
    high = 1.0
    expansion = 0.25

    def _value(self, z: Tensor) -> Tensor:
        return z * z.log() + (1.0 - z) * torch.log1p(-z) - 0.5 * z * z

    def _derivative(self, z: Tensor) -> Tensor:
        return z.log() - torch.log1p(-z) - z

    def _ends(self, dtype: torch.dtype) -> tuple[float, float, float, float]:
        info = torch.finfo(dtype)
        last = 0.5 * info.eps
        return 0.0, -0.5, math.log(info.tiny), math.log1p(-last) - math.log(last) - 1.0

    def _solve(self, v: Tensor, tau: Tensor) -> Tensor:
        scale = 0.5 * (1.0 + 3.0 * tau)
        ends = (v - 1.0 - tau) / scale, -(v + 2.0 * tau) / scale  # no digit of a small v is lost
        t = solve_tanh((v - 0.5 * (1.0 - tau)) / scale, 2.0 * tau / scale, ends)
        return torch.sigmoid(2.0 * t)

    def activation(self, v: Tensor) -> Tensor:
        return torch.sigmoid(v)


_NUMERATORS = (1, -1, 1, -1, 5, -691, 7, -3617, 43867)  # of the Bernoulli numbers B_2, B_4, ...
_DENOMINATORS = (6, 30, 42, 30, 66, 2730, 6, 510, 798)
_BERNOULLI = zip(_NUMERATORS, _DENOMINATORS, strict=True)
_DEBYE = [p / (q * math.factorial(2 * k + 3)) for k, (p, q) in enumerate(_BERNOULLI)]


def _dilogarithm_of_one_minus_exp(u: Tensor) -> Tensor:
    """``Li_2(1 - e^{-u}) = u - u^2/4 + sum_k B_2k u^{2k+1}/(2k+1)!`` for ``0 <= u <= log 2``."""
    square = u * u
    tail = torch.zeros_like(u)
    for coefficient in reversed(_DEBYE):
        tail = square * (coefficient + tail)
    return u * (1.0 - 0.25 * u + tail)


@dataclass(frozen=True)
class Softplus(SmoothPrior):
    """``f(z) = Li_2(e^{-z})`` on ``z >= 0`` (the dilogarithm); ``sigma(v) = log(1 + e^v)``.

    ``f'(z) = log(1 - e^{-z})``, ``f(0) = pi^2/6``, ``f -> 0`` at infinity. Li_2 by its Bernoulli
    series, reflected at ``z = log 2``: about 1e-16 in float64.
    """

    low = 0.0
    high = math.inf

    @staticmethod
    def _sides(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether z is left of log 2, and z on each side, any number there on the other."""
        near = z <= math.log(2.0)
        return near, torch.where(near, z, 0.5), torch.where(near, 1.0, z)

    def _value(self, z: Tensor) -> Tensor:
        near, inner, outer = self._sides(z)
        reflected = math.pi**2 / 6.0 + inner * torch.log(-torch.expm1(-inner))
        reflected = reflected - _dilogarithm_of_one_minus_exp(inner)
        direct = _dilogarithm_of_one_minus_exp(-torch.log1p(-torch.exp(-outer)))
        return torch.where(near, reflected, direct)

    def _derivative(self, z: Tensor) -> Tensor:
        near, inner, outer = self._sides(z)
        direct = torch.log1p(-torch.exp(-outer))
        return torch.where(near, torch.log(-torch.expm1(-inner)), direct)

    def _ends(self, dtype: torch.dtype) -> tuple[float, float, float, float]:
        return math.pi**2 / 6.0, 0.0, math.log(torch.finfo(dtype).tiny), 0.0

    def _solve(self, v: Tensor, tau: Tensor) -> Tensor:
        return _softplus(solve_softplus(v, tau))

    def activation(self, v: Tensor) -> Tensor:
        return _softplus(v)
