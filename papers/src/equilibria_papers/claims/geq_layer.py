"""GEQ's layers, small and by themselves, and their hidden problems: Eq 1–6, Table 4, Proposition 1.

    z = σ(e^{−γ‖c−Wz‖²}Wᵀ(c − Wz))  (Eq 6)      z = σ(WᵀWz + c)  (Eq 4)      σ = ReLU

Both by proximal steps τ = 2/(m + L), batched over c: the trials share no code with nn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .claim import Trial
from .drawing import Random, spectral

_B = 2.0 * math.exp(-1.5)
_SMALL = 1e-8  # a residual counts as zero below this


def unit(g: Random, *shape: int) -> Tensor:
    """Rows of length 1."""
    made = g.normal(*shape)
    length: Tensor = torch.linalg.vector_norm(made, dim=-1, keepdim=True)
    return made / length


def _iterate(step: Callable[[Tensor], Tensor], z: Tensor, limit: int) -> Tensor:
    for i in range(limit):
        moved = step(z)
        if i % 16 == 15:
            change, size = float((moved - z).abs().max()), float(moved.abs().max())
            if change <= 1e-15 * (1 + size):
                return moved
        z = moved
    return z


def geq(W: Tensor, c: Tensor, gamma: float, limit: int = 4000) -> Tensor:
    """z of Eq 6. W [m, n], c [B, m] → [B, n]; needs ‖W‖ < 1.4969."""
    top = spectral(W) ** 2
    tau = 2.0 / (2.0 + top - _B * top)

    def step(z: Tensor) -> Tensor:
        r = c - z @ W.mT
        push = torch.exp(-gamma * r.square().sum(-1, keepdim=True)) * r @ W
        return ((1.0 - tau) * z + tau * push).clamp_min(0.0)

    return _iterate(step, c.new_zeros(*c.shape[:-1], W.shape[1]), limit)


def opteq(W: Tensor, c: Tensor, limit: int = 20_000) -> Tensor:
    """z of Eq 4. W [m, n], c [B, n] → [B, n]; needs ‖W‖ < 1."""
    gram = W.mT @ W
    tau = 2.0 / (2.0 - spectral(gram))

    def step(z: Tensor) -> Tensor:
        return ((1.0 - tau) * z + tau * (z @ gram + c)).clamp_min(0.0)

    return _iterate(step, torch.zeros_like(c), limit)


def scalar_geq(w: float, c: float, gamma: float) -> float:
    """z of Eq 6 in one dimension, by bisection: z ↦ z − σ(e^{−γ(c−wz)²}w(c − wz)) increases."""

    def gap(z: float) -> float:
        r = c - w * z
        return z - max(0.0, math.exp(-gamma * r * r) * w * r)

    low, high = 0.0, max(0.0, w * c) + 1e-300
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if gap(middle) < 0.0 else (low, middle)
    return 0.5 * (low + high)


def scalar_beta(w: float, c: float, gamma: float, z: float) -> float:
    """e^{−γ(c−wz)²}."""
    return math.exp(-gamma * (c - w * z) ** 2)


def _eq4(g: Random) -> Trial:
    """The z of Eq 4 gives the z̃ of Eq 1 by z̃ = W̃ᵀz."""
    n = g.integer(1, 5)
    tilde = g.weights(n, n, g.uniform(0.2, 0.95))  # W̃, and W = W̃ᵀ
    c = g.normal(n)
    z = opteq(tilde.mT, c[None])[0]
    state = tilde.mT @ z
    gap = (state - tilde.mT @ (tilde @ state + c).clamp_min(0.0)).norm()
    return Trial(float(gap) / (_SMALL * (1 + float(state.norm()))), {"n": n})


def _gradient_gap(pushed: Tensor, claimed: Tensor) -> float:
    return float((pushed - claimed).norm()) / (1 + float(pushed.norm())) / _SMALL


def _table4(g: Random) -> Trial:
    """A row of Table 4 by autograd: Eq 5 → Eq 6, or a kernel of ⟨c, z⟩."""
    if g.integer(0, 3) == 0:
        n, m, gamma = g.integer(1, 4), g.integer(1, 4), g.uniform(0.1, 2.0)
        w, c, z = g.weights(m, n, g.uniform(0.2, 0.9)), g.normal(m), g.normal(n)
        z.requires_grad_(True)
        q = torch.exp(-gamma * (c - w @ z).square().sum()) / (2 * gamma)
        (pushed,) = torch.autograd.grad(q, z)
        with torch.no_grad():
            r = c - w @ z
            claimed = torch.exp(-gamma * r.square().sum()) * w.mT @ r
        return Trial(_gradient_gap(pushed, claimed), {"kernel": "gaussian", "gamma": gamma})
    kernel = g.choice(("linear", "polynomial", "sigmoid"))
    n, degree = g.integer(1, 4), g.integer(2, 4)
    w, c, z = g.weights(g.integer(1, 4), n, g.uniform(0.2, 0.9)), g.normal(n), g.normal(n)
    z.requires_grad_(True)
    t = c @ z
    value, slope = {
        "linear": (t, torch.ones_like(t)),
        "polynomial": (t**degree, degree * t.detach() ** (degree - 1)),
        "sigmoid": (t.tanh(), 1 - t.detach().tanh() ** 2),
    }[kernel]
    (pushed,) = torch.autograd.grad(value + 0.5 * (w @ z).square().sum(), z)
    claimed = w.mT @ (w @ z.detach()) + slope * c
    return Trial(_gradient_gap(pushed, claimed), {"kernel": kernel, "degree": degree})


def feature_map_trial(g: Random, *, square: bool, half: bool, constant: bool = False) -> Trial:
    """Is GEQ's output an equilibrium of 1ᵀf + ½‖z‖² − λ⟨Φ(c), Φ(Wz)⟩, all terms of Φ kept?

    ``square``: λ with ‖Wz‖²; ``half``: with the factor 1/2γ; ``constant``: λ held while ∂/∂z.
    """
    n, m = g.integer(1, 3), g.integer(1, 3)
    w, gamma = g.weights(m, n, g.uniform(0.3, 0.95)), g.uniform(0.1, 2.0)
    c = 2 * g.normal(m)
    z = geq(w, c[None], gamma)[0]
    if float(z.norm()) < 1e-3:  # both problems have z = 0 here: nothing to tell apart
        return Trial(0.0, {})
    point = z.clone().requires_grad_(True)
    y = w @ point
    size = y.square().sum() if square else y.norm()
    scale = torch.exp(-gamma * (c.square().sum() + size))
    if constant:
        scale = scale.detach()
    q = scale * torch.exp(2 * gamma * (c @ y)) * (1 / (2 * gamma) if half else 1.0)
    (push,) = torch.autograd.grad(q, point)
    gap = float((push.clamp_min(0.0) - z).norm() / z.norm())
    return Trial(gap / _SMALL, {"n": n, "m": m, "gamma": gamma, "relative distance": gap})
