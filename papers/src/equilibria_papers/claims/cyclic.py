"""Lemma 2 of paper 003 for every α in (0, 1): a deep OptEq that equals a feed-forward network.

**Ours**; the paper's proof covers α = 1. Let h = σ(Nh + v(x)) hold all hidden units of the network,
N strictly block lower triangular. Let every layer of the deep OptEq have the units ζ_l = h, the
same v, and W_lW_kᵀ = G_{l−k}, a cyclic sequence. With a = 1 − α the state before layer l is
z_{l−1} = α/(1 − a^L) Σ_j a^j W_{l−1−j}ᵀh, so ζ_l = h is an equilibrium if

    Σ_{j<L} a^j G_{1+j} = N(1 − a^L)/α   ⇔   Σ_ω Ĝ(ω)/(ω̄ − a) = NL/α,   ω^L = 1.

G is a Gram matrix iff every Ĝ(ω) is Hermitian positive semidefinite. For L ≥ 3 one complex pair
ω, ω̄ with Re ω ≤ 0 < a takes the antisymmetric part of N in the imaginary part of Ĝ(ω); a multiple
of I in its real part keeps it semidefinite and, entering with a negative sign, does the same for
Ĝ(1), which takes the rest. For L = 2 there is one hidden layer and N = 0: Ĝ(1) = αI,
Ĝ(−1) = (1 + a)I, that is G_0 = I and G_1 = −aI.
"""

from __future__ import annotations

import cmath
import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CyclicDeep", "cyclic_deep"]


class CyclicDeep(NamedTuple):
    """W_1, …, W_L [n, m] and the map h → z_0 [m, n]; every layer has the same Ux + b."""

    weights: list[Tensor]
    state: Tensor


def cyclic_deep(n: Tensor, layers: int, alpha: float) -> CyclicDeep:
    """The weights for N [n, n], L layers and α in (0, 1), such that z_0 = state @ h, of full rank.

    For L = 2 N must be zero.
    """
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha={alpha!r}: expected a number in (0, 1).")
    if layers < 2 or (layers == 2 and bool(n.any())):
        raise ValueError(
            f"layers={layers}: a network of H hidden layers needs L = H + 1 layers, so at least 2, "
            "and at least 3 where the hidden units feed one another."
        )
    gram = _gram(n, layers, alpha)
    values, vectors = torch.linalg.eigh(gram)
    kept = values > 1e-12 * values[-1]
    rows = (vectors[:, kept] * values[kept].sqrt()).reshape(layers, len(n), -1)
    decay = 1.0 - alpha
    # The shares of W_L, W_{L−1}, …, W_1 in the state.
    shares = torch.tensor([decay**j for j in range(layers)], dtype=n.dtype)
    state = (shares[:, None, None] * rows.flip(0)).sum(0).mT * (alpha / (1.0 - decay**layers))
    return CyclicDeep(list(rows), state)


def _gram(n: Tensor, layers: int, alpha: float) -> Tensor:
    """The block matrix (G_{l−k}) [Ln, Ln]."""
    eye = torch.eye(len(n), dtype=n.dtype)
    decay = 1.0 - alpha
    if layers == 2:
        return torch.kron(torch.tensor([[1.0, -decay], [-decay, 1.0]], dtype=n.dtype), eye)
    turn = cmath.exp(2j * math.pi * (math.ceil(layers / 2) - 1) / layers)
    gain = 1.0 / (turn.conjugate() - decay)
    target = n * (layers / alpha)
    symmetric, skew = 0.5 * (target + target.mT), 0.5 * (target - target.mT)
    imaginary = skew / (-2.0 * gain.imag)
    norms = [float(torch.linalg.matrix_norm(t, 2)) for t in (imaginary, symmetric)]
    real = max(norms[0], norms[1] / (2.0 * abs(gain.real))) * 1.1 + 0.1
    at_one = alpha * (symmetric - 2.0 * gain.real * real * eye)

    def block(d: int) -> Tensor:
        wave = turn**d
        return (at_one + 2.0 * (wave.real * real * eye - wave.imag * imaginary)) / layers

    numbers = range(layers)
    return torch.cat([torch.cat([block(row - k) for k in numbers], 1) for row in numbers])
