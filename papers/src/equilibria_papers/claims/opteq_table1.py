"""OptEq, Eq 4 and Table 1: closed forms and modified objectives of one layer, for ReLU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .claim import Trial, claim, printed, reading
from .drawing import ACTIVATIONS, integer, norm, normal, spectral, uniform
from .opteq_layer import EXACT, Layer, draw_layer, off
from .solving import relu_prox


def _eq4(draw: torch.Generator, *, at_zero: float) -> Trial:
    """φ of Eq 4 at the equilibrium; ``at_zero`` is σ̃*(0)."""
    layer = _invertible(draw)
    star = layer.equilibrium()
    zeta = torch.linalg.solve(layer.w.mT, star)
    zeta = torch.where(zeta.abs() < 1e-9, 0.0, zeta)
    if at_zero > 0 and bool((zeta == 0).any()):
        return Trial(math.inf, {**layer.case(), "W^-T z*": zeta, "phi(z*)": math.inf})
    zero = torch.zeros_like(layer.w)
    least = relu_prox(layer.w, layer.c, torch.zeros(len(star), dtype=star.dtype), zero)
    value, bound = _eq4_value(layer, star), _eq4_value(layer, least)
    ratio = max(off(star, least), 1.0 + (value - bound) / (1e-6 + abs(bound)))
    return Trial(ratio, {**layer.case(), "z*": star, "phi(z*)": value, "minimum": bound})


def _eq4_value(layer: Layer, z: Tensor) -> float:
    zeta = torch.linalg.solve(layer.w.mT, z).clamp_min(0.0)
    return float(0.5 * zeta @ zeta - layer.c @ zeta - 0.5 * z @ z)


def _invertible(draw: torch.Generator) -> Layer:
    """ReLU, W square with singular values in (0.2, 0.98), ν = 1."""
    m = integer(draw, 1, 5)
    left, _ = torch.linalg.qr(normal(draw, m, m))
    right, _ = torch.linalg.qr(normal(draw, m, m))
    values = torch.rand(m, generator=draw, dtype=torch.float64) * 0.78 + 0.2
    return Layer(left * values @ right, normal(draw, m), ACTIVATIONS["relu"])


def _skip(draw: torch.Generator) -> Trial:
    """prox of αM_φ^{1−α} by one program in (u, y), against αT + (1 − α)I; and the fixed point."""
    layer = draw_layer(draw, activation="relu")
    alpha = uniform(draw, 0.05, 0.95)
    m = layer.w.shape[1]
    z = normal(draw, m) * 2.0
    eye = torch.eye(m, dtype=torch.float64)
    # y minimizes ½‖y − z‖² + α‖u − y‖²/(2(1 − α)); inserted, u has the weight below.
    share = alpha / (1.0 - alpha)
    left = 1.0 / (1.0 + share)
    weight = (share * left) / alpha
    u = relu_prox(layer.w, layer.c, weight * z, weight * eye, layer.nu)
    y = left * z + share * left * u
    printed = alpha * layer(z) + (1.0 - alpha) * z
    star = layer.equilibrium()
    same = alpha * layer(star) + (1.0 - alpha) * star
    ratio = max(off(printed, y), off(same, star))
    return Trial(ratio, {**layer.case(), "alpha": alpha, "z": z})


def _affine(draw: torch.Generator, reading: str) -> Trial:
    """A⁻¹(f(Az + t) − t) against prox of φ(A· + t), or its fixed points against the minimizer."""
    layer = draw_layer(draw, activation="relu")
    m = layer.w.shape[1]
    left, _ = torch.linalg.qr(normal(draw, m, m))
    right, _ = torch.linalg.qr(normal(draw, m, m))
    values = torch.ones(m, dtype=torch.float64)
    if reading != "orthogonal":
        values = torch.exp(normal(draw, m) * 0.5)
    a = left * values @ right
    shift, z = normal(draw, m), normal(draw, m)
    case = {**layer.case(), "A": a, "shift": shift}
    inverse = torch.linalg.inv(a)
    if reading == "fixed points":
        zero = torch.zeros(m, m, dtype=torch.float64)
        least = relu_prox(layer.w, layer.c, torch.zeros(m, dtype=z.dtype), zero, layer.nu)
        y = inverse @ (layer.equilibrium() - shift)
        return Trial(off(y, inverse @ (least - shift)), case)
    gram = inverse.mT @ inverse
    u = relu_prox(layer.w, layer.c, inverse.mT @ z + gram @ shift, gram, layer.nu)
    printed = inverse @ (layer(a @ z + shift) - shift)
    return Trial(off(printed, inverse @ (u - shift)), {**case, "z": z})


def _multivariate(draw: torch.Generator, *, definite: bool) -> Trial:
    """Fixed point of WᵀS(Wz + c) against the stationary point of Table 1's quadratic."""
    m = integer(draw, 1, 4)
    w = _invertible(draw).w
    m = len(w)
    s = normal(draw, m, m)
    if definite:
        s = s @ s.mT + 0.1 * torch.eye(m, dtype=torch.float64)
    s = s * (0.95 / spectral(w.mT @ s @ w))
    c = normal(draw, m)
    star = torch.linalg.solve(torch.eye(m, dtype=torch.float64) - w.mT @ s @ w, w.mT @ s @ c)
    inverse = torch.linalg.inv(w)
    q = inverse @ torch.linalg.inv(s) @ inverse.mT
    hessian = 0.5 * (q + q.mT) - torch.eye(m, dtype=torch.float64)
    lowest = float(torch.linalg.eigvalsh(hessian)[0])
    gradient = hessian @ star - inverse @ c
    ratio = norm(gradient) / (EXACT * (1.0 + norm(star)) * spectral(q))
    if lowest <= 0:  # a saddle or a maximum is not a solution
        ratio = math.inf
    return Trial(ratio, {"W": w, "S": s, "c": c, "lowest curvature": lowest})


CLAIMS = (
    claim(
        "opteq.eq4",
        "Eq 4",
        r"For ReLU and invertible $W$ the equilibrium minimizes $\varphi(z) = "
        r"1^\top\tilde\sigma^*(W^{-\top}z) - \langle Ux+b, W^{-\top}z\rangle - \frac12\|z\|^2$ "
        r"with $\tilde\sigma^*(x) = \frac12x^2$ for $x > 0$ and $\infty$ for $x \le 0$.",
        printed(lambda draw: _eq4(draw, at_zero=math.inf), cost=2.0),
        reading(
            "0 at 0", r"$\tilde\sigma^*(0) = 0$", lambda draw: _eq4(draw, at_zero=0.0), cost=2.0
        ),
        note="Where a unit is off, the argument is 0, and the printed objective is infinite at the "
        "equilibrium.",
    ),
    claim(
        "opteq.table1.skip",
        "Table 1, row 2 (skip connection)",
        r"$\alpha f(z) + (1-\alpha)z$ is the layer of $\alpha M_\varphi^{1-\alpha}$, "
        r"with the same equilibrium.",
        printed(_skip, cost=2.0),
    ),
    claim(
        "opteq.table1.affine",
        "Table 1, row 3 (affine change of variable)",
        r"$\mathcal A^{-1}(W^\top\sigma(W\mathcal A(z) + Ux + b))$ is the layer, as in "
        r"Theorem 1 the proximal operator, of $\psi^*(\mathcal A(z)) - \frac12\|\mathcal "
        r"A(z)\|^2$, $\mathcal A$ invertible and affine.",
        printed(lambda draw: _affine(draw, "prox")),
        reading(
            "orthogonal",
            r"the linear part of $\mathcal A$ is orthogonal",
            lambda draw: _affine(draw, "orthogonal"),
        ),
        reading(
            "fixed points only",
            "read of the fixed points, not of the map",
            lambda draw: _affine(draw, "fixed points"),
            cost=2.0,
        ),
        note="A scaling changes the metric of the proximal term, so the map is the prox in another "
        "metric; its fixed points are right.",
    ),
    claim(
        "opteq.table1.multivariate",
        "Table 1, row 4 (multivariate activation)",
        r"$W^\top S(Wz + Ux + b)$ belongs to $\frac12z^\top W^{-1}S^{-1}W^{-\top}z - "
        r"\langle Ux+b, W^{-\top}z\rangle - \frac12\|z\|^2$: its equilibrium is the minimizer.",
        printed(lambda draw: _multivariate(draw, definite=False)),
        reading(
            "definite",
            r"$S$ symmetric positive definite and $\|W^\top SW\|_2 < 1$",
            lambda draw: _multivariate(draw, definite=True),
        ),
        note="Table 1 says nothing of $S$. The gradient of the quadratic sees the symmetric part "
        "of $S^{-1}$ only.",
    ),
)
