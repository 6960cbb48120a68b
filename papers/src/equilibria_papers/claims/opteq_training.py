"""OptEq, Section 6: Theorem 5 (the modified SAM iteration) and Theorem 6 (training).

Both speak of limits. Theorem 5 is tried in two parts: by step K the error has fallen clearly, or
the iterate follows the fixed points of its own steps, held at β_K and λ_K; and these fixed points,
at β and λ that are nearly 0, lie near the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from .claim import Trial
from .numerics import Random, identity, norm, program, solve, spectral, tensor, zeros

_STEPS = 4096
_TINY = 1e-4


@dataclass(frozen=True)
class _Selection:
    """min ½(z − a)ᵀH(z − a) over Fix(T), T(z) = Qᵀ(Qz)₊: the layer of W = Q, ReLU, c = 0."""

    q: Tensor
    h: Tensor
    a: Tensor

    @cached_property
    def eta(self) -> float:
        size = spectral(self.h)
        return min(math.sqrt(2.0 * size), 0.5 * size, 0.5)

    def solution(self) -> Tensor:
        ones = torch.ones(len(self.a), dtype=torch.bool)
        pulled = self.q @ self.h @ self.a
        return self.q.mT @ program(self.q @ self.h @ self.q.mT, pulled, ones)

    def rates(self, k: float, rho: float, c: float, *, printed: bool) -> tuple[float, float]:
        """β_k and λ_k."""
        if printed:
            return rho / k**c, rho / k**c
        return self.eta / k**rho, self.eta / k**c

    def step(self, z: Tensor, beta: float, lam: float, gamma: float) -> Tensor:
        """Eq 11: βS_λ(z) + (1 − β)T(z), S_λ(z) = (1 − γλ)z − γ∇R(z)."""
        pulled = (1.0 - gamma * lam) * z - gamma * (self.h @ (z - self.a))
        kept = self.q.mT @ (self.q @ z).clamp_min(0.0)
        return beta * pulled + (1.0 - beta) * kept

    def slope(self, z: Tensor, beta: float, lam: float, gamma: float) -> Tensor:
        eye = identity(len(z))
        kept = self.q.mT * (self.q @ z > 0).double() @ self.q
        return beta * ((1.0 - gamma * lam) * eye - gamma * self.h) + (1.0 - beta) * kept


def _follow(problem: _Selection, start: Tensor, rho: float, c: float, *, printed: bool) -> Trial:
    star, gamma = problem.solution(), 1.0 / (2.0 * spectral(problem.h))

    def error(z: Tensor) -> float:
        return norm(z - star) / (1.0 + norm(star))

    def held(beta: float, lam: float) -> Tensor:
        return solve(
            lambda v: problem.step(v, beta, lam, gamma),
            lambda v: problem.slope(v, beta, lam, gamma),
            star,
            accuracy=max(1e-6 * beta * lam, 1e-15),
        )

    z, errors = start, []
    for k in range(1, _STEPS + 1):
        beta, lam = problem.rates(k, rho, c, printed=printed)
        z = problem.step(z, beta, lam, gamma)
        if k in (_STEPS // 64, _STEPS // 8, _STEPS):
            errors.append(error(z))
    behind = norm(z - held(beta, lam)) / (1.0 + norm(star))
    late = error(held(_TINY, _TINY))
    falls = min(errors[2] / max(0.9 * max(errors[0], errors[1]), 1e-3), behind / 0.02)
    case = {
        "rho": rho,
        "c": c,
        "H": problem.h,
        "a": problem.a,
        "Q": problem.q,
        **{f"error after {_STEPS // d} steps": e for d, e in zip((64, 8, 1), errors, strict=True)},
        "behind the fixed point of the last step": behind,
        f"error of the fixed point at {_TINY:g}": late,
    }
    return Trial(max(falls, late / 0.02), case)


def _sam(draw: Random, *, printed: bool) -> Trial:
    """Well conditioned R and exponents away from the border: what 4096 steps can show."""
    m = draw.integer(1, 4)
    q, _ = torch.linalg.qr(draw.normal(m, m))
    root = draw.weights(m + 1, m, draw.uniform(0.5, 1.5))
    h = root.mT @ root + 0.3 * identity(m)
    problem = _Selection(q, h, draw.normal(m) * 1.5)
    rho = draw.uniform(0.15, 0.4)
    c = draw.uniform(0.15, min(0.35, 0.5 * (0.95 - rho)))
    return _follow(problem, draw.normal(m), rho, c, printed=printed)


def _sam_families(draw: Random, *, printed: bool) -> Iterator[Trial]:
    """The point of least norm, steep and flat directions, several exponents."""
    eye = identity(2)
    steep = (eye, torch.diag(tensor([1.0, 0.3])))
    points = ([1.0, -2.0], [-1.0, -1.0], [0.5, 0.5])
    for h, a, (rho, c) in product(steep, points, ((0.3, 0.3), (0.2, 0.35), (0.4, 0.25))):
        yield _follow(_Selection(eye, h, tensor(a)), draw.normal(2), rho, c, printed=printed)


def _smooth(t: Tensor) -> Tensor:
    """Strongly monotone (slope ≥ 0.6), 1-Lipschitz, smooth."""
    return 0.6 * t + 0.4 * torch.tanh(t)


def _training(draw: Random) -> Trial:
    """Gradient descent on two unrolled layers; ℓ_t against ℓ_0(1 − ηλ_min(K_0)/2)^t."""
    samples, d, m, n = 3, 4, 6, 48
    x = draw.normal(samples, d)
    x = x / torch.linalg.vector_norm(x, dim=1, keepdim=True)
    y = draw.normal(samples, 1)
    pairs = [(draw.weights(n, m, 0.7), draw.normal(n, d) / math.sqrt(d)) for _ in range(2)]
    head = draw.normal(1, m) * 2.0
    parameters = [*pairs[0], *pairs[1], head]
    for parameter in parameters:
        parameter.requires_grad_(True)

    def predict() -> Tensor:
        z = zeros(samples, m)
        for _ in range(12):
            for w, u in pairs:
                z = 0.8 * _smooth(z @ w.mT + x @ u.mT) @ w + 0.2 * z
        return z @ head.mT

    rows = []
    out = predict()
    for i in range(samples):
        parts = torch.autograd.grad(out[i, 0], parameters, retain_graph=True)
        rows.append(torch.cat([p.flatten() for p in parts]))
    values = torch.linalg.eigvalsh(torch.stack(rows) @ torch.stack(rows).mT)
    eta = 0.2 / float(values[-1])
    rate = 0.5 * eta * float(values[0])
    first, worst, at = float("nan"), 0.0, 0
    for t in range(60):
        loss = 0.5 * (predict() - y).square().sum()
        first = float(loss.detach()) if t == 0 else first
        ratio = float(loss.detach()) / (first * (1.0 - rate) ** t)
        if t > 0 and not ratio <= worst:
            worst, at = ratio, t
        for parameter, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.data.sub_(eta * g)
    return Trial(worst, {"eta": eta, "smallest eigenvalue of K(0)": values[0], "step": at})
