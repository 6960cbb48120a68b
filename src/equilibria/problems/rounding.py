"""How far floating point moves the residual of a certificate: |fl(T(z)) − T(z)|, bounded.

With the unit roundoff u = 2⁻⁵³ and γ_n = nu/(1 − nu), a sum of n products in any order, with or
without fused operations, obeys |fl(Σab) − Σab| ≤ γ_n Σ|a||b| (Higham, Accuracy and Stability of
Numerical Algorithms, §3.1), so for a matrix or a convolution W of n terms an output, and an
argument ẑ that itself is off by at most e,

    |fl(Wẑ) − Wz| ≤ |W|e + γ_n |W||ẑ|       entrywise; |W| is W with its weights made positive.

That is carried through every operation of ∇q, entry by entry; the prox of a convex function is
nonexpansive, so it passes the error on and adds its own. What is assumed of the library functions
exp, tanh, log, division: 4 units in the last place. The states z and the numbers of the problem
(weights, c, γ) are exact by definition: they are what is certified. Each bound is doubled at the
end, which covers terms of order u² and the rounding of the bounds themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.engine.tree import sample_norm
from equilibria.problems.activated import Activated
from equilibria.problems.gaussian import Gaussian
from equilibria.problems.kernels import SIGMOID_CURVATURE, Coupling, Linear, Polynomial, Sigmoidal
from equilibria.problems.operators import (
    ConvOperator,
    DenseOperator,
    LinearOperator,
    SeparableConvOperator,
)
from equilibria.problems.patches import Patches
from equilibria.problems.priors import (
    Box,
    Free,
    LeakyNonNegative,
    NonNegative,
    Prior,
    ShiftedNonNegative,
    SoftThreshold,
    WithL1,
)
from equilibria.problems.problem import HiddenProblem, Problem
from equilibria.problems.regularizers import L1, FeatureIncay, Regularizer, SquaredNorm
from equilibria.problems.transposed import TransposedOperator

__all__ = ["UNIT", "has_piecewise_prox", "residual_rounding", "subgradient_rounding"]

UNIT = 2.0**-53
_FUNCTION = 8 * UNIT  # 4 units in the last place, of a number in [1, 2)
_TINY = 1e-300  # where exp underflows
_SAFETY = 2.0


def _gamma(n: int) -> float:
    return n * UNIT / (1.0 - n * UNIT)


def _column(values: Tensor | float, z: Tensor) -> Tensor:
    """A number, or one a sample [B], as a tensor that broadcasts over z."""
    column = torch.as_tensor(values, dtype=z.dtype, device=z.device)
    return column.reshape(-1, *[1] * (z.ndim - 1)) if column.ndim == 1 else column


def _magnitude(w: object) -> tuple[LinearOperator, int] | None:
    """|W|, and the number of terms in an entry of Wz or of Wᵀy, whichever is larger."""
    if isinstance(w, DenseOperator):
        return DenseOperator(w.weight.abs()), max(w.weight.shape)
    if isinstance(w, ConvOperator):
        out, per_group, kh, kw = w.weight.shape
        positive = ConvOperator(w.weight.abs(), w.stride, w.padding, w.groups)
        return positive, max(per_group, out // w.groups) * kh * kw
    if isinstance(w, SeparableConvOperator):
        d, p = w.depthwise.weight.abs(), w.pointwise.weight.abs()
        # Two sums one after the other: γ_a + γ_b + γ_a γ_b ≤ γ_{a+b}.
        return SeparableConvOperator(d, p), d.shape[2] * d.shape[3] + max(p.shape[:2])
    if isinstance(w, TransposedOperator):
        base = _magnitude(w.base)
        return None if base is None else (TransposedOperator(base[0]), base[1])
    return None


def _rows(r: Tensor, patches: Patches | None) -> Tensor:
    return r.flatten(1).unsqueeze(1) if patches is None else patches.split(r)


def _gaussian_error(q: Gaussian, z: Tensor, size: LinearOperator, terms: int) -> Tensor:
    """∇q = Wᵀ merge(e v), v = rM, s = ⟨r, v⟩, e = exp(−γs), r = Wz − c, line by line."""
    gamma = q.gamma.unsqueeze(-1)
    wz = q.operator(z)
    r = _rows(wz - q.c, q.patches)
    r_off = _rows(_gamma(terms) * size(z.abs()) + UNIT * (wz - q.c).abs(), q.patches)
    k = r.shape[-1]
    v, v_off = r, r_off
    if q.metric is not None:
        metric = q.metric.abs()
        v = r @ q.metric
        v_off = r_off @ metric + _gamma(k) * (r.abs() @ metric)
    s = (r * v).sum(-1).clamp_min(0.0)
    s_off = (r_off * v.abs() + (r.abs() + r_off) * v_off).sum(-1)
    s_off = s_off + _gamma(k + 1) * (r * v).abs().sum(-1)
    t = gamma * s
    t_off = gamma * s_off + 2 * UNIT * t
    # e^{−t} is at most e^{−(t − off)}, and differs from it by the factor 1 − e^{−off} at most.
    e = torch.exp(-t)
    e_off = torch.exp(-(t - t_off).clamp_min(0.0)) * -torch.expm1(-t_off) + _FUNCTION * e + _TINY
    e_off = torch.where(t_off.isfinite(), e_off, 1.0).clamp_max(1.0)
    e, e_off = e.unsqueeze(-1), e_off.unsqueeze(-1)
    message = e * v
    off = e_off * (v.abs() + v_off) + e * v_off + 2 * UNIT * message.abs()
    total = off + _gamma(terms) * message.abs()
    merged = (
        total.reshape(wz.shape)
        if q.patches is None
        else q.patches.merge(total, wz.shape, torch.contiguous_format)
    )
    return size.adjoint(merged, z.shape[1:])


def _linear_term_error(q: Coupling, z: Tensor, size: LinearOperator, terms: int) -> Tensor:
    """∇q = −(WᵀWz + φ′(t)c), t = ⟨c, z⟩, line by line."""
    wz = q.operator(z)
    inside = _gamma(terms) * (size(z.abs()) + wz.abs())
    off = size.adjoint(inside, z.shape[1:])
    if isinstance(q, Linear):
        return off + 2 * UNIT * q.c.abs()
    t = (q.c * z).flatten(1).sum(1)
    t_off = _gamma(z[0].numel() + 1) * (q.c * z).abs().flatten(1).sum(1)
    if isinstance(q, Polynomial):
        base, d = (q.offset + t).abs() + UNIT * t.abs() + t_off, q.degree
        slope = d * base ** (d - 1)
        slope_off = d * (d - 1) * base ** (d - 2) * (t_off + UNIT * base)
        slope_off = slope_off + (d + 8) * UNIT * slope
    else:  # Sigmoidal: |φ″| ≤ 4/(3√3), and 1 − tanh² of a tanh that is off by 4 ulp
        slope = torch.ones_like(t)
        slope_off = SIGMOID_CURVATURE * t_off + 4 * _FUNCTION
    return off + _column(slope_off + 4 * UNIT * slope, z) * q.c.abs()


def _activated_error(q: Activated, z: Tensor, size: LinearOperator, terms: int) -> Tensor:
    """∇q = −(1/ν)Wᵀσ(v), v = Wz + c, line by line."""
    v = q.operator(z) + q.c
    a = q.prior.activation(v)
    off = _gamma(terms) * size(z.abs()) + 2 * UNIT * v.abs()
    off = off + _FUNCTION * (v.abs() + a.abs()) + _gamma(terms + 2) * a.abs()
    return size.adjoint(off, z.shape[1:]) / q.nu


def _coupling_error(q: Coupling, z: Tensor) -> Tensor | None:
    magnitude = _magnitude(getattr(q, "operator", None))
    if magnitude is None:
        return None
    if isinstance(q, Gaussian):
        return _gaussian_error(q, z, *magnitude)
    if isinstance(q, Activated):
        return _activated_error(q, z, *magnitude)
    if isinstance(q, (Linear, Polynomial, Sigmoidal)):
        return _linear_term_error(q, z, *magnitude)
    return None


def _regularizer_error(r: Regularizer, z: Tensor, form: str) -> Tensor | float | None:
    if form == "prox":  # z − prox(z), |prox(z)| ≤ |z|
        return 8 * UNIT * z.abs() if isinstance(r, (SquaredNorm, L1)) else None
    if isinstance(r, SquaredNorm):
        return 2 * UNIT * r.weight * z.abs()
    if isinstance(r, FeatureIncay):
        return (z[0].numel() + 16) * UNIT * r.grad(z).abs()
    return 0.0 if isinstance(r, L1) else None  # L1 in gradient form is part of the prior


def _force_error(problem: HiddenProblem, z: Tensor) -> Tensor | None:
    """A bound on the error of ∇q(z) + ∇R(z), entrywise; None where none is derived."""
    if not isinstance(problem, Problem):
        return None
    off = _coupling_error(problem.coupling, z)
    if off is None or problem.regularizer is None:
        return off
    extra = _regularizer_error(problem.regularizer, z, problem.regularize)
    return None if extra is None else off + extra


def has_piecewise_prox(prior: Prior) -> bool:
    """Whether prox_{τf} is piecewise linear, so that a few roundings give it for every τ."""
    if isinstance(prior, WithL1):
        return has_piecewise_prox(prior.prior)
    return isinstance(
        prior,
        (Free, NonNegative, Box, SoftThreshold, ShiftedNonNegative, LeakyNonNegative),
    )


def _shift(prior: Prior) -> float:
    """What the prox adds to its argument, per unit of τ."""
    inner = _shift(prior.prior) if isinstance(prior, WithL1) else 0.0
    return inner + abs(float(getattr(prior, "weight", 0.0)))


def _norm(t: Tensor) -> Tensor:
    return sample_norm([t])


def _guess(problem: HiddenProblem, z: Tensor, image: Tensor) -> Tensor:
    """n + 64 roundings of everything in sight: an estimate, where nothing is derived. [B]."""
    scale = _norm(z) + _norm(image) + _norm(problem.gradient(z))
    return _SAFETY * _gamma(z[0].numel() + 64) * scale


def residual_rounding(
    problem: HiddenProblem, z: Tensor, image: Tensor, tau: float | Tensor = 1.0
) -> tuple[Tensor, bool]:
    """δ [B] with |fl‖z − T_τ(z)‖ − ‖z − T_τ(z)‖| ≤ δ, and whether it is derived (else a guess).

    ``image`` is the computed T_τ(z); everything in float64. With a τ other than 1 it is derived
    for piecewise linear proxes alone; at τ = 1 for every prior whose activation is accurate to
    4 units in the last place.
    """
    force_off = _force_error(problem, z)
    if force_off is None or not isinstance(problem, Problem):
        return _guess(problem, z, image), False
    step = _column(tau, z)
    force = z.abs() + problem.gradient(z).abs()
    gap = (z - image).abs()
    argument = (1.0 - step).abs() * z.abs() + step * force
    off = step * force_off + 4 * UNIT * (argument + step * force)
    off = off + _FUNCTION * (argument + image.abs() + step * _shift(problem.effective_prior))
    delta = _SAFETY * (_norm(off + UNIT * gap) + _gamma(z[0].numel() + 4) * _norm(gap))
    exact = not isinstance(tau, Tensor) and tau == 1.0
    return delta, exact or has_piecewise_prox(problem.effective_prior)


def subgradient_rounding(problem: Problem, z: Tensor, least: Tensor) -> Tensor | None:
    """δ [B] with |fl dist(0, ∂G(z)) − dist(0, ∂G(z))| ≤ δ, or None where none is derived.

    ``least`` is the computed element of least norm. For piecewise linear proxes: the ends of
    ∂f(z) are then constants or multiples of z, each off by at most 4 units in the last place.
    """
    force_off = _force_error(problem, z)
    if force_off is None or not has_piecewise_prox(problem.effective_prior):
        return None
    force = z.abs() + problem.gradient(z).abs()
    ends = [torch.where(end.isfinite(), end, 0.0).abs() for end in _ends(problem, z)]
    off = force_off + _FUNCTION * (force + z.abs() + torch.maximum(*ends) + least.abs())
    return _SAFETY * (_norm(off) + _gamma(z[0].numel() + 4) * _norm(least))


def _ends(problem: Problem, z: Tensor) -> tuple[Tensor, Tensor]:
    return problem.effective_prior.subdifferential(z)
