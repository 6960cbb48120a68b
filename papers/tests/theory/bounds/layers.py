"""Layers of the papers with given weights, and their equilibria by another code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import equilibria as eq

Array = NDArray[np.float64]


def geq(w: Tensor, u: Tensor, gamma: float, b: Tensor | None = None) -> eq.nn.GEQ:
    """Eq 6 with these weights, float64."""
    layer = eq.nn.GEQ(
        w.shape[1], w.shape[0], in_channels=u.shape[1], hidden=None, gamma=gamma,
        constraint=None, bias=b is not None,
    ).double()  # fmt: skip
    return fill(layer, w, u, b)


def opteq(w: Tensor, u: Tensor, b: Tensor | None = None, **options: object) -> eq.nn.OptEq:
    """Eq 4, z = σ(WᵀWz + Ux + b): our hidden form with Wᵀ for W."""
    layer = eq.nn.OptEq(
        w.shape[0], w.shape[1], in_channels=u.shape[1], form="hidden",
        constraint=None, bias=b is not None, **options,  # type: ignore[arg-type]
    ).double()  # fmt: skip
    return fill(layer, w.mT, u, b)


def fill(layer: Any, w: Tensor, u: Tensor, b: Tensor | None) -> Any:
    with torch.no_grad():
        layer.W.weight.copy_(w)
        layer.U.weight.copy_(u)
        if b is not None:
            layer.U.bias.copy_(b)
    return layer


def iterate_geq(w: Array, c: Array, gamma: float, steps: int = 4000) -> Array:
    """z ← σ(e^{−γ‖r‖²}Wᵀr), halfway each time. c [B, m] → [B, n]."""
    z = np.zeros((len(c), w.shape[1]))
    for _ in range(steps):
        r = c - z @ w.T
        z = 0.5 * z + 0.5 * np.maximum(np.exp(-gamma * (r**2).sum(1, keepdims=True)) * (r @ w), 0.0)
    return z


def iterate_opteq(w: Array, c: Array, steps: int = 8000) -> Array:
    z = np.zeros_like(c)
    for _ in range(steps):
        z = np.maximum(z @ (w.T @ w) + c, 0.0)
    return z


def drawn(seed: int, rows: int, columns: int, norm: float) -> Tensor:
    made = torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return made * norm / torch.linalg.matrix_norm(made, 2)
