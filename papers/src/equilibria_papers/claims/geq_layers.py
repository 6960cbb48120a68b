"""The layers of GEQ's propositions, small and by themselves: the trials share no code with nn.

    z = σ(e^{−γ‖c−Wz‖²}Wᵀ(c − Wz))  (Eq 6)      z = σ(WᵀWz + c)  (Eq 4)      σ = ReLU

Both by proximal steps τ = 2/(m + L) in float64, batched over c.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .drawing import normal

_B = 2.0 * math.exp(-1.5)


def unit(g: torch.Generator, *shape: int) -> Tensor:
    """Rows of length 1."""
    made = normal(g, *shape)
    length: Tensor = torch.linalg.vector_norm(made, dim=-1, keepdim=True)
    return made / length


def _iterate(step: Callable[[Tensor], Tensor], z: Tensor, limit: int) -> Tensor:
    for i in range(limit):
        moved = step(z)
        if i % 16 == 15 and float((moved - z).abs().max()) <= 1e-15 * (
            1 + float(moved.abs().max())
        ):
            return moved
        z = moved
    return z


def geq(W: Tensor, c: Tensor, gamma: float, limit: int = 4000) -> Tensor:
    """z of Eq 6. W [m, n], c [B, m] → [B, n]; needs ‖W‖ < 1.4969."""
    top = float(torch.linalg.matrix_norm(W, 2)) ** 2
    tau = 2.0 / (2.0 + top - _B * top)

    def step(z: Tensor) -> Tensor:
        r = c - z @ W.mT
        push = torch.exp(-gamma * r.square().sum(-1, keepdim=True)) * r @ W
        return ((1.0 - tau) * z + tau * push).clamp_min(0.0)

    return _iterate(step, c.new_zeros(*c.shape[:-1], W.shape[1]), limit)


def opteq(W: Tensor, c: Tensor, limit: int = 20_000) -> Tensor:
    """z of Eq 4. W [m, n], c [B, n] → [B, n]; needs ‖W‖ < 1."""
    gram = W.mT @ W
    tau = 2.0 / (2.0 - float(torch.linalg.matrix_norm(gram, 2)))

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


def one_neuron(theta: float) -> float:
    """E[σ(u)σ(v)] of standard normals at angle θ by quadrature: (1/π)∫cos φ cos(φ − θ)dφ.

    In polar coordinates ∫r³e^{−r²/2}dr = 2, and both factors are positive for θ − π/2 < φ < π/2.
    """
    points = 2000
    width = (math.pi - theta) / points
    total = 0.0
    for i in range(points):  # midpoint rule: error 1e-7
        phi = theta - math.pi / 2 + (i + 0.5) * width
        total += math.cos(phi) * math.cos(phi - theta)
    return total * width / math.pi


def below(value: float, error: float, limit: float) -> float:
    """(value − 4 standard errors)/limit: a ratio above 1 is no accident. 0/0 counts as 0."""
    least = value - 4.0 * error
    if least <= 0.0:
        return 0.0
    return math.inf if limit <= 0.0 else least / limit
