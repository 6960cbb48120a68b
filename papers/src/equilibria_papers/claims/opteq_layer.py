"""OptEq, one layer: f(z) = (1/ν)Wᵀσ(Wz + c), Theorem 1 and well-posedness.

With ψ(z) = (1/ν)1ᵀσ̃(Wz + c) the layer is ∇ψ, and ψ*(f(v)) = ⟨f(v), v⟩ − ψ(v) gives
φ = ψ* − ½‖·‖² at every point of its domain without a conjugate to compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .claim import Trial, claim, printed, reading
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
from .searching import climb
from .solving import bisect, relu_prox, solve

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
    # Rounding of f enters ⟨Δf, Δz⟩ at 1e-16 of this size; a change that small says nothing.
    slack = 1e-12 * (1.0 + norm(moved) * (norm(layer(z)) + norm(layer(v))))
    firm = float(change @ change) / (across + slack) if across > -slack else math.inf
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


CLAIMS = (
    claim(
        "opteq.theorem1",
        "Theorem 1",
        r"For a monotone $L_\sigma$-Lipschitz $\sigma$ and $\mu \ge L_\sigma\|W\|_2^2$, "
        r"$f(z) = \frac1\mu W^\top\sigma(Wz + Ux + b)$ is $\mathrm{prox}_\varphi$ of the convex "
        r"$\varphi = \psi^* - \frac12\|\cdot\|^2$, $\psi = \frac1\mu 1^\top\tilde\sigma(Wz+Ux+b)$, "
        r"and its fixed point minimizes $\varphi$.",
        printed(_theorem1, _theorem1_adversarial),
    ),
    claim(
        "opteq.wellposed",
        "Section 3.2, after Eq 4",
        r"Any $W$ that makes $\varphi$ strictly convex ensures the existence and "
        r"uniqueness of the equilibrium.",
        printed(
            _strictly_convex,
            lambda draw: (
                _softplus_gap(torch.ones(1).double(), torch.tensor([c]).double())
                for c in (-2.0, -0.5, 0.1, 1.0, 3.0)
            ),
        ),
        reading(
            "with a contraction",
            r"$L_\sigma\|W\|_2^2 < \mu$, so that $\varphi$ is strongly convex",
            _contractive,
            cost=2.0,
        ),
        note=r"Uniqueness follows from strict convexity, existence does not: softplus has "
        r"$\sigma' < 1$, so $W = 1$, $\mu = 1$ gives a strictly convex $\varphi$, and "
        r"$z = \mathrm{softplus}(z + c)$ has no solution for $c \ge 0$.",
    ),
)
