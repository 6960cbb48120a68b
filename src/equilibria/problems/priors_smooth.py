"""Priors of smooth activations: tanh, sigmoid, softplus.

    ``f(z) = int (sigma^{-1}(t) - t) dt``       (OptEq, paper 003, Theorem 1)

in closed form, up to a constant. The prox with another step, ``z + tau (sigma^{-1}(z) - z) = v``,
is solved in ``u = sigma^{-1}(z)``, where it is well conditioned: its slope lies between 1 and
``tau``, for every ``tau`` and every ``u``,

    ``h(u) = u + (tau - 1) (u - sigma(u)) - v = 0``.

On each side of its inflection ``h`` is convex or concave, so Newton's method is monotone from the
right start; the start solves the equation with the activation replaced by its tail
(``1 - tanh u ~ 2 e^{-2u}``, ``softplus u ~ e^u``), which is a Wright omega function. Three steps
reach float64 accuracy for ``tau`` from 1e-12 to 1e12; five are made. They run on detached values;
two more Newton steps on the live tensors put ``v`` and ``tau`` back into the graph, and as each
Newton step doubles the order of agreement, first, second and third derivatives are those of the
solution.

At a closed end of the domain ``f'`` is infinite and ``df`` empty, yet a saturated activation
*returns* the end once rounded. A floating point end stands for all reals that round to it, so
there ``subdifferential`` returns the union over these, ``[f'(end - spacing), inf)`` or its
mirror image; autograd of ``value`` gives the finite end of it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from equilibria.problems.priors import Prior, at_least_float32, check_step, interval

__all__ = ["Logistic", "Softplus", "Tanh"]

_STEPS = 5


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


def _tanh_newton(u: Tensor, v: Tensor, tau: Tensor) -> Tensor:
    """One Newton step for ``tau u + (1 - tau) tanh u = v``, ``u >= 0``, without cancellation."""
    fade = torch.exp(-2.0 * u)
    short = 2.0 * fade / (1.0 + fade)  # 1 - tanh u
    bend = short * (2.0 - short)  # tanh' u
    height = u.tanh()
    direct = tau * u + (1.0 - tau) * height - v
    saturated = tau * (u - 1.0) - (v - 1.0) - (1.0 - tau) * short
    contracting = u + (tau - 1.0) * tanh_gap(u) - v
    miss = torch.where(u > 0.5, saturated, direct)
    miss = torch.where(tau > 1.0, contracting, miss)
    steep = 1.0 + (tau - 1.0) * height * height
    slope = torch.where(tau > 1.0, steep, tau + (1.0 - tau) * bend)
    return u - miss / slope


def solve_tanh(v: Tensor, tau: Tensor) -> Tensor:
    """``u`` with ``tau u + (1 - tau) tanh u = v``; differentiable in ``v`` and ``tau``."""
    sign = torch.copysign(torch.ones_like(v), v).detach()
    folded = v * sign  # |v|, with a derivative at 0
    size, step = folded.detach(), tau.detach()
    gap = step - 1.0
    # tau < 1: concave for u > 0, root in [|v|, artanh |v|]; the tail equation bounds it above.
    ratio = (4.0 * (1.0 - step).clamp(min=1e-30) / step).log()
    below = 0.5 * (ratio - log_wright_omega(ratio - 2.0 * (size - 1.0 + step) / step))
    below = torch.where(size < 1.0, torch.minimum(below, size.clamp(max=1.0).atanh()), below)
    # tau > 1: convex for u > 0; u - tanh u >= (1 - tanh 1) u^3 on [0, 1] bounds the root above.
    cubic = (size / ((1.0 - math.tanh(1.0)) * gap.clamp(min=1e-30))).pow(1.0 / 3.0)
    above = torch.minimum((size + gap) / step, torch.where(cubic <= 1.0, cubic, size))
    short = gap <= 0.0
    low = torch.where(short, size, 0.0)
    high = torch.where(short, math.inf, size)
    u = torch.where(short, below, above).clamp(min=low, max=high)
    for _ in range(_STEPS):
        u = _tanh_newton(u, size, step).clamp(min=low, max=high)
    return sign * _tanh_newton(_tanh_newton(u, folded, tau), folded, tau)


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
    """A prior with a derivative inside its domain ``[low, high]`` (an end may be infinite)."""

    low: float
    high: float

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
        if isinstance(tau, float):
            step = torch.full((), tau, dtype=wide.dtype, device=wide.device)
        else:
            step = tau.to(wide.dtype)
        return self._solve(wide, step).to(v.dtype)

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

    @property
    def expansion(self) -> float:
        return 0.25

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
        t = solve_tanh((v - 0.5 * (1.0 - tau)) / scale, 2.0 * tau / scale)
        return torch.sigmoid(2.0 * t)

    def activation(self, v: Tensor) -> Tensor:
        return torch.sigmoid(v)


def _debye_coefficients(count: int) -> list[float]:
    """``B_2k / (2k + 1)!`` for ``k = 1..count`` (Bernoulli numbers, exact before rounding)."""
    bernoulli = [Fraction(1)]
    for n in range(1, 2 * count + 1):
        total = sum((math.comb(n + 1, k) * b for k, b in enumerate(bernoulli)), Fraction(0))
        bernoulli.append(-total / (n + 1))
    return [float(bernoulli[2 * k] / math.factorial(2 * k + 1)) for k in range(1, count + 1)]


_DEBYE = _debye_coefficients(9)


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

    def _value(self, z: Tensor) -> Tensor:
        near = z <= math.log(2.0)
        inner = torch.where(near, z, 0.5)
        outer = torch.where(near, 1.0, z)
        reflected = math.pi**2 / 6.0 + inner * torch.log(-torch.expm1(-inner))
        reflected = reflected - _dilogarithm_of_one_minus_exp(inner)
        direct = _dilogarithm_of_one_minus_exp(-torch.log1p(-torch.exp(-outer)))
        return torch.where(near, reflected, direct)

    def _derivative(self, z: Tensor) -> Tensor:
        near = z <= math.log(2.0)
        inner = torch.where(near, z, 0.5)
        outer = torch.where(near, 1.0, z)
        direct = torch.log1p(-torch.exp(-outer))
        return torch.where(near, torch.log(-torch.expm1(-inner)), direct)

    def _ends(self, dtype: torch.dtype) -> tuple[float, float, float, float]:
        return math.pi**2 / 6.0, 0.0, math.log(torch.finfo(dtype).tiny), 0.0

    def _solve(self, v: Tensor, tau: Tensor) -> Tensor:
        return _softplus(solve_softplus(v, tau))

    def activation(self, v: Tensor) -> Tensor:
        return _softplus(v)
