"""Paper 003, one layer: f(z) = (1/ν)Wᵀσ(Wz + c), Theorem 1, Eq 4 and the rows of Table 1.

With ψ(z) = (1/ν)1ᵀσ̃(Wz + c) the layer is ∇ψ, and ψ*(f(v)) = ⟨f(v), v⟩ − ψ(v) gives
φ = ψ* − ½‖·‖² at every point of its domain without a conjugate to compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .claims import Claim, Trial, Variant
from .drawing import (
    ACTIVATIONS,
    Activation,
    choice,
    integer,
    norm,
    normal,
    spectral,
    uniform,
    weights,
)
from .programs import relu_prox
from .searching import climb
from .solving import bisect, solve

__all__ = ["CLAIMS", "Layer", "draw_layer"]

EXACT = 1e-7
"""How far two computations of one point may lie apart, relative to its size."""


@dataclass(frozen=True)
class Layer:
    """f(z) = (1/ν)Wᵀσ(Wz + c) at one input; W [n, m], c [n]."""

    w: Tensor
    c: Tensor
    sigma: Activation
    nu: float = 1.0

    def __call__(self, z: Tensor) -> Tensor:
        return self.w.mT @ self.sigma.value(self.w @ z + self.c) / self.nu

    def slope(self, z: Tensor) -> Tensor:
        return self.w.mT * self.sigma.slope(self.w @ z + self.c) @ self.w / self.nu

    def psi(self, z: Tensor) -> float:
        return float(self.sigma.integral(self.w @ z + self.c).sum()) / self.nu

    def conjugate(self, v: Tensor) -> float:
        """ψ*(f(v))."""
        return float(self(v) @ v) - self.psi(v)

    def phi(self, v: Tensor) -> float:
        """φ(f(v)) = ψ*(f(v)) − ½‖f(v)‖²."""
        u = self(v)
        return self.conjugate(v) - 0.5 * float(u @ u)

    def equilibrium(self) -> Tensor:
        return solve(self, self.slope, torch.zeros(self.w.shape[1], dtype=torch.float64))

    def case(self) -> dict[str, object]:
        return {"W": self.w, "c": self.c, "activation": self.sigma.name, "nu": self.nu}


def draw_layer(
    draw: torch.Generator,
    *,
    activation: str | None = None,
    square: bool = False,
    slack: float = 1.02,
) -> Layer:
    """ν between ``slack`` and 3 times L_σ‖W‖²; slack 1 also draws the end itself."""
    m = integer(draw, 1, 5)
    n = m if square else integer(draw, 1, 6)
    sigma = ACTIVATIONS[activation or choice(draw, list(ACTIVATIONS))]
    w = weights(draw, n, m, uniform(draw, 0.2, 2.5))
    part = slack if slack == 1.0 and integer(draw, 0, 1) else uniform(draw, slack, 3.0)
    c = normal(draw, n) * uniform(draw, 0.1, 3.0)
    return Layer(w, c, sigma, part * sigma.expansion * spectral(w) ** 2)


def off(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ in units of what counts as equal."""
    return norm(a - b) / (EXACT * (1.0 + norm(b)))


# ------------------------------------------------------------------------------------- Theorem 1


def _theorem1(draw: torch.Generator) -> Trial:
    """The layer against competitors: prox inequality, firm nonexpansiveness, the minimizer."""
    layer = draw_layer(draw, slack=1.0)
    m = layer.w.shape[1]
    z, v = normal(draw, m) * 2.0, normal(draw, m) * uniform(draw, 0.01, 5.0)
    ratio, part = _prox_ratio(layer, z, v)
    if layer.nu > 1.01 * layer.sigma.expansion * spectral(layer.w) ** 2:
        star = layer.equilibrium()
        found = _least(layer, star, v)
        if layer.sigma.name == "relu":
            zero = torch.zeros(m, m, dtype=torch.float64)
            least = relu_prox(layer.w, layer.c, torch.zeros(m, dtype=z.dtype), zero, layer.nu)
            found = max(found, off(star, least))
        if found > ratio:
            ratio, part = found, "the fixed point against the minimizer"
    return Trial(ratio, {**layer.case(), "z": z, "v": v, "worst part": part})


def _prox_ratio(layer: Layer, z: Tensor, v: Tensor) -> tuple[float, str]:
    """‖Δf‖²/⟨Δf, Δz⟩ (φ convex), and f(z) against f(v) in φ(u) + ½‖u − z‖²."""
    change, moved = layer(z) - layer(v), z - v
    across = float(change @ moved)
    firm = float(change @ change) / across if across > 1e-12 else 0.0
    best = layer.conjugate(z) - float(layer(z) @ z)
    other = layer.conjugate(v) - float(layer(v) @ z)
    prox = 1.0 + (best - other) / (1e-3 + abs(best) + abs(other))
    return max((firm, "firmly nonexpansive"), (prox, "prox against a competitor"))


def _least(layer: Layer, star: Tensor, v: Tensor) -> float:
    """φ(z*) ≤ φ(f(v)): 1 + the relative excess."""
    best, other = layer.phi(star), layer.phi(v)
    return 1.0 + (best - other) / (1e-3 + abs(best) + abs(other))


def _theorem1_adversarial(draw: torch.Generator) -> Iterator[Trial | None]:
    """W [2, 2], c, z, v moved by optimizers, ν = L_σ‖W‖² exactly."""
    for name in ("relu", "leaky relu", "tanh", "clipped relu", "sigmoid"):
        sigma = ACTIVATIONS[name]

        def attempt(at: Tensor, sigma: Activation = sigma) -> Trial | None:
            w = at[:4].reshape(2, 2)
            if spectral(w) < 1e-3 or norm(at[6:8] - at[8:]) < 1e-4:
                return None
            layer = Layer(w, at[4:6], sigma, sigma.expansion * spectral(w) ** 2)
            ratio, part = _prox_ratio(layer, at[6:8], at[8:])
            return Trial(ratio, {**layer.case(), "z": at[6:8], "v": at[8:], "worst part": part})

        yield from climb(attempt, (normal(draw, 10) for _ in range(3)))


# ---------------------------------------------------------------- Section 3.2: existence of z*


def _strictly_convex(draw: torch.Generator) -> Trial:
    """Softplus has σ′ < 1, so φ is strictly convex for every ‖W‖ ≤ 1; W diagonal, ν = 1."""
    m = integer(draw, 1, 5)
    w = torch.rand(m, generator=draw, dtype=torch.float64)
    w = torch.where(torch.rand(m, generator=draw) < 0.3, 1.0, w)
    c = normal(draw, m) * 2.0
    return _softplus_gap(w, c)


def _softplus_gap(w: Tensor, c: Tensor) -> Trial:
    def gap(z: Tensor) -> Tensor:
        return z - w * torch.nn.functional.softplus(w * z + c, threshold=500.0)

    # The gap rises in z; where it is negative at the far end, it has no zero.
    end = torch.full_like(w, 1e6)
    found = bisect(gap, -end, end)
    left = norm(gap(found))
    return Trial(left / 1e-6, {"W": f"diagonal, {w.tolist()}", "c": c, "activation": "softplus"})


def _contractive(draw: torch.Generator) -> Trial:
    layer = draw_layer(draw, slack=1.02)
    m = layer.w.shape[1]
    star = layer.equilibrium()
    again = solve(layer, layer.slope, normal(draw, m) * 10.0)
    left = norm(star - layer(star)) / (1e-9 * (1.0 + norm(star)))
    return Trial(max(left, off(again, star)), layer.case())


# ------------------------------------------------------------------------------- Eq 4 and Table 1


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


# ----------------------------------------------------------------------------------------- claims

CLAIMS = (
    Claim(
        id="opteq.theorem1",
        paper="OptEq",
        where="Theorem 1",
        statement=r"For a monotone $L_\sigma$-Lipschitz $\sigma$ and $\mu \ge L_\sigma\|W\|_2^2$, "
        r"$f(z) = \frac1\mu W^\top\sigma(Wz + Ux + b)$ is $\mathrm{prox}_\varphi$ of the convex "
        r"$\varphi = \psi^* - \frac12\|\cdot\|^2$, $\psi = \frac1\mu 1^\top\tilde\sigma(Wz+Ux+b)$, "
        r"and its fixed point minimizes $\varphi$.",
        variants=(Variant(name="as printed", random=_theorem1, adversarial=_theorem1_adversarial),),
    ),
    Claim(
        id="opteq.wellposed",
        paper="OptEq",
        where="Section 3.2, after Eq 4",
        statement=r"Any $W$ that makes $\varphi$ strictly convex ensures the existence and "
        r"uniqueness of the equilibrium.",
        variants=(
            Variant(
                name="as printed",
                random=_strictly_convex,
                adversarial=lambda draw: (
                    _softplus_gap(torch.ones(1).double(), torch.tensor([c]).double())
                    for c in (-2.0, -0.5, 0.1, 1.0, 3.0)
                ),
            ),
            Variant(
                name="with a contraction",
                needs=r"$L_\sigma\|W\|_2^2 < \mu$, so that $\varphi$ is strongly convex",
                random=_contractive,
                cost=2.0,
            ),
        ),
        note=r"Uniqueness follows from strict convexity, existence does not: softplus has "
        r"$\sigma' < 1$, so $W = 1$, $\mu = 1$ gives a strictly convex $\varphi$, and "
        r"$z = \mathrm{softplus}(z + c)$ has no solution for $c \ge 0$.",
    ),
    Claim(
        id="opteq.eq4",
        paper="OptEq",
        where="Eq 4",
        statement=r"For ReLU and invertible $W$ the equilibrium minimizes $\varphi(z) = "
        r"1^\top\tilde\sigma^*(W^{-\top}z) - \langle Ux+b, W^{-\top}z\rangle - \frac12\|z\|^2$ "
        r"with $\tilde\sigma^*(x) = \frac12x^2$ for $x > 0$ and $\infty$ for $x \le 0$.",
        variants=(
            Variant(name="as printed", random=lambda draw: _eq4(draw, at_zero=math.inf), cost=2.0),
            Variant(
                name="0 at 0",
                needs=r"$\tilde\sigma^*(0) = 0$",
                random=lambda draw: _eq4(draw, at_zero=0.0),
                cost=2.0,
            ),
        ),
        note="Where a unit is off, the argument is 0, and the printed objective is infinite at the "
        "equilibrium.",
    ),
    Claim(
        id="opteq.table1.skip",
        paper="OptEq",
        where="Table 1, row 2 (skip connection)",
        statement=r"$\alpha f(z) + (1-\alpha)z$ is the layer of $\alpha M_\varphi^{1-\alpha}$, "
        r"with the same equilibrium.",
        variants=(Variant(name="as printed", random=_skip, cost=2.0),),
    ),
    Claim(
        id="opteq.table1.affine",
        paper="OptEq",
        where="Table 1, row 3 (affine change of variable)",
        statement=r"$\mathcal A^{-1}(W^\top\sigma(W\mathcal A(z) + Ux + b))$ is the layer, as in "
        r"Theorem 1 the proximal operator, of $\psi^*(\mathcal A(z)) - \frac12\|\mathcal "
        r"A(z)\|^2$, $\mathcal A$ invertible and affine.",
        variants=(
            Variant(name="as printed", random=lambda draw: _affine(draw, "prox")),
            Variant(
                name="orthogonal",
                needs=r"the linear part of $\mathcal A$ is orthogonal",
                random=lambda draw: _affine(draw, "orthogonal"),
            ),
            Variant(
                name="fixed points only",
                needs="read of the fixed points, not of the map",
                random=lambda draw: _affine(draw, "fixed points"),
                cost=2.0,
            ),
        ),
        note="A scaling changes the metric of the proximal term, so the map is the prox in another "
        "metric; its fixed points are right.",
    ),
    Claim(
        id="opteq.table1.multivariate",
        paper="OptEq",
        where="Table 1, row 4 (multivariate activation)",
        statement=r"$W^\top S(Wz + Ux + b)$ belongs to $\frac12z^\top W^{-1}S^{-1}W^{-\top}z - "
        r"\langle Ux+b, W^{-\top}z\rangle - \frac12\|z\|^2$: its equilibrium is the minimizer.",
        variants=(
            Variant(name="as printed", random=lambda draw: _multivariate(draw, definite=False)),
            Variant(
                name="definite",
                needs=r"$S$ symmetric positive definite and $\|W^\top SW\|_2 < 1$",
                random=lambda draw: _multivariate(draw, definite=True),
            ),
        ),
        note="Table 1 says nothing of $S$. The gradient of the quadratic sees the symmetric part "
        "of $S^{-1}$ only.",
    ),
)
