"""Xie et al. 2021 written down anew in numpy: no line of the library is used here.

For ReLU ψ(v) = ½‖(Wv + c)₊‖², so ψ*(u) = min ½‖ζ‖² − ⟨c, ζ⟩ over ζ ≥ 0 with Wᵀζ = u, and every
minimum over φ = ψ* − ½‖·‖² is a quadratic program in ζ, solved exactly by an active-set method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Plain:
    """One layer at one sample: W [n, m], c [n], α; ReLU."""

    W: Array
    c: Array
    alpha: float

    def prox(self, z: Array) -> Array:
        return self.W.T @ np.maximum(self.W @ z + self.c, 0.0)

    def f(self, z: Array) -> Array:
        return self.alpha * self.prox(z) + (1 - self.alpha) * z


def random_layers(
    rng: np.random.Generator, count: int, m: int, sizes: list[int], alpha: float, norm: float
) -> list[Plain]:
    found = []
    for n in sizes[:count]:
        w = rng.standard_normal((n, m))
        w *= norm / np.linalg.norm(w, 2)
        found.append(Plain(w, rng.standard_normal(n), alpha))
    return found


def equilibrium(layers: list[Plain], m: int, steps: int = 200_000) -> Array:
    z = np.zeros(m)
    for _ in range(steps):
        after = z
        for layer in layers:
            after = layer.f(after)
        if np.abs(after - z).max() < 1e-15:
            break
        z = after
    return z


def quadratic_program(h: Array, g: Array, nonnegative: Array) -> tuple[Array, float]:
    """min ½vᵀHv − gᵀv with v ≥ 0 where said, H positive definite: (v, value)."""
    root = scipy.linalg.cholesky(h)  # H = RᵀR
    target = scipy.linalg.solve_triangular(root, g, trans=1)
    lower = np.where(nonnegative, 0.0, -np.inf)
    done = scipy.optimize.lsq_linear(root, target, (lower, np.inf), method="bvls", tol=1e-15)
    v = done.x
    return v, float(0.5 * v @ h @ v - g @ v)


def envelope(layer: Plain, z: Array) -> tuple[float, Array]:
    """α M_φ^{1−α}(z) and the u that attains it: a program in ζ with u = Wᵀζ."""
    w, a = layer.W, layer.alpha
    gram = w @ w.T
    h = np.eye(len(layer.c)) - gram + gram / (1 - a)
    g = layer.c + w @ z / (1 - a)
    zeta, value = quadratic_program(h, g, np.ones(len(g), bool))
    return a * (value + z @ z / (2 * (1 - a))), w.T @ zeta


def two_layers(first: Plain, second: Plain) -> tuple[Array, Array, float]:
    """Corollary 1 as one program in (ζ_1, ζ_2, z_1, z_0): (z_1, z_0, minimum)."""
    n1, n2, m = len(first.c), len(second.c), first.W.shape[1]
    total = n1 + n2 + 2 * m
    h, g = np.zeros((total, total)), np.zeros(total)
    places = [(first, 0, n1, n1 + n2), (second, n1, n2, n1 + n2 + m)]
    for layer, at, n, state in places:
        a, w = layer.alpha, layer.W
        rows, own = slice(at, at + n), slice(state, state + m)
        gram = w @ w.T
        h[rows, rows] += a * (np.eye(n) - gram + gram / (1 - a))
        h[rows, own] += -a * w / (1 - a)
        h[own, rows] += -a * w.T / (1 - a)
        h[own, own] += a * np.eye(m) / (1 - a)
        g[rows] += a * layer.c
    one, zero = slice(n1 + n2, n1 + n2 + m), slice(n1 + n2 + m, total)
    for left, right, sign in ((one, one, 1), (zero, zero, 1), (one, zero, -1), (zero, one, -1)):
        h[left, right] += sign * np.eye(m)
    bounded = np.arange(total) < n1 + n2
    v, value = quadratic_program(h, g, bounded)
    return v[one], v[zero], value


def wide(layers: list[Plain], weights: list[float] | None = None) -> Array:
    """Theorem 3's program in (ζ_1, …, ζ_L, y): y."""
    counts = [len(layer.c) for layer in layers]
    m = layers[0].W.shape[1]
    total = sum(counts) + m
    h, g = np.zeros((total, total)), np.zeros(total)
    own = slice(sum(counts), total)
    at = 0
    for layer, n, share in zip(layers, counts, weights or [1.0] * len(layers), strict=True):
        rows = slice(at, at + n)
        h[rows, rows] += share * np.eye(n)
        h[rows, own] -= share * layer.W
        h[own, rows] -= share * layer.W.T
        h[own, own] += share * np.eye(m)
        g[rows] += share * layer.c
        at += n
    v: Array = quadratic_program(h, g, np.arange(total) < sum(counts))[0]
    return v[own]
