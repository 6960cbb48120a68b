"""GEQ's Proposition 2 and Remark 1: the margin bound, its lemmas, and the steps of its proof."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.problems import GAUSSIAN_CONCAVITY, gaussian_sensitivity
from equilibria_papers.theory.bounds import margin as bounds
from equilibria_papers.theory.bounds.margin import Sizes, geq_change, opteq_change
from equilibria_papers.theory.bounds.report import remark1_ratios

from .claim import Trial
from .geq_layer import geq, iterate, opteq, scalar_beta, scalar_geq
from .numerics import Random, climb, exponential, logistic, ones, spectral


def _general(W: Tensor, c: Tensor) -> Tensor:
    """z = σ(Wz + c) for any ‖W‖ < 1, by plain iteration. [n]."""
    return iterate(lambda z: (W @ z + c).clamp_min(0.0), torch.zeros_like(c), 3000)


def _lemma1(g: Random) -> Trial:
    n, d, m = g.integer(1, 4), g.integer(1, 3), g.uniform(0.05, 0.95)
    scale = g.log_uniform(1e-4, 1.0)
    w = g.weights(n, n, m * g.uniform(0.1, 1.0))
    u, b, x = g.normal(n, d), g.normal(n), g.normal(d)
    moved = w + scale * g.normal(n, n)
    moved = moved * min(1.0, m / spectral(moved))
    du, db = scale * g.normal(n, d), scale * g.normal(n)
    c = u @ x + b
    left = float((_general(moved, c + du @ x + db) - _general(w, c)).norm())
    size = max(spectral(w), spectral(moved))
    right = spectral(moved - w) * float(c.norm()) / (1 - size) ** 2
    right += (float((du @ x).norm()) + float(db.norm())) / (1 - size)
    return Trial(left / right, {"n": n, "m": size, "scale": scale})


def _lemma2(g: Random) -> Trial:
    """Two Gaussian classes, w trained on M samples, u = N(0, σ²): every part has a closed form."""
    d, count, delta = g.integer(1, 6), g.integer(400, 4000), 0.05
    center = g.normal(d) * g.uniform(0.2, 3.0)

    def classes(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 2, (count,), generator=g.generator).double() * 2 - 1
        return labels, (labels[:, None] * center + g.normal(count, d)).clamp(-6, 6)

    labels, x = classes(count)
    w = (labels[:, None] * x).mean(0)
    w = w * (g.uniform(0.3, 3.0) / float(w.norm()))
    margin = g.uniform(0.05, 2.0)
    # Two classes with scores ±⟨w, x⟩/2: the margin is ⟨w, x⟩y, and |⟨u, x⟩|/2 < η/4 is asked for
    # all x with probability 1/2; ‖u‖ ≤ σ√(2d) has it, as E‖u‖² = σ²d.
    reach = 6.0 * math.sqrt(d)
    sigma = margin / (2.0 * reach * math.sqrt(2.0 * d))
    kl = float(w.square().sum()) / (2 * sigma**2)
    loss = float((labels * (x @ w) <= margin).double().mean())
    right = loss + 4.0 * math.sqrt((kl + math.log(6 * count / delta)) / (count - 1))
    fresh, new = classes(4000)
    error = float((fresh * (new @ w) <= 0).double().mean())
    return Trial(error / right, {"d": d, "M": count, "margin": margin, "kl": kl})


def _eq29(g: Random, *, second: bool) -> Trial:
    n, m, mu = g.integer(1, 4), g.integer(1, 4), g.uniform(0.1, 0.99)
    w, omega = g.weights(m, n, mu), g.log_uniform(1e-3, 1.0)
    moved = w + g.weights(m, n, omega)
    left = spectral(moved.mT @ moved - w.mT @ w)
    right = 2 * omega * mu + (omega**2 if second else 0.0)
    return Trial(left / right, {"mu": mu, "omega": omega})


def _eq29_worst(g: Random, **_: object) -> Iterator[Trial]:
    """ΔW along W: (μ + ω)² − μ² = 2μω + ω²."""
    for ratio in (0.01, 0.1, 1.0):
        mu = g.uniform(0.2, 0.9)
        yield Trial(1.0 + ratio / 2.0, {"mu": mu, "omega": ratio * mu, "W": "μI", "ΔW": "ωI"})


def _k30(mu: float, m: float, bound: float, power: int) -> float:
    """Eq 30 (power 2) or 31 (power 3) over ω."""
    reach = bound + 1
    return 2 * mu**power * reach / (1 - m) ** 2 + 2 * mu * reach / (1 - m) + 1


def _k35(mu: float, rest: float, beta: float, bound: float) -> float:
    """Eq 35 over ω; ``rest`` is 1 − β_max m."""
    reach = bound + 1
    return 2 * beta * mu**3 * reach / rest**2 + (2 * mu * beta + 1) * mu * reach / rest + 1


@dataclass(frozen=True)
class _Moved:
    """A layer with its classifier, before and after a move of all weights by ω in norm."""

    change: float
    omega: float
    mu: float
    m: float
    bound: float
    beta: float
    sizes: Sizes
    gamma: float

    def case(self) -> dict[str, float]:
        return {"mu": self.mu, "omega": self.omega, "B": self.bound, "gamma": self.gamma}


def _moved(g: Random, *, gaussian: bool, small: bool) -> _Moved | None:
    n, m, d, classes = g.integer(1, 4), g.integer(1, 4), g.integer(1, 3), g.integer(2, 4)
    mu = g.uniform(0.2, 0.95)
    omega = g.log_uniform(1e-6, 1e-4) if small else g.log_uniform(1e-4, 0.3)
    gamma = g.log_uniform(0.05, 5.0)
    out = m if gaussian else n
    shapes = ((m, n), (out, d), (out, 1), (classes, n), (classes, 1))
    old = [
        g.weights(r, c, mu * (1.0 if i in (0, 3) else g.uniform(0.1, 1.0)))
        for i, (r, c) in enumerate(shapes)
    ]
    new = [t + g.weights(t.shape[0], t.shape[1], omega) for t in old]
    bound = g.log_uniform(0.3, 10.0)
    x = g.normal(8, d)
    x = bound * x / x.norm(dim=1, keepdim=True)
    if spectral(new[0]) >= (1.4 if gaussian else 0.999):
        return None

    def logits(t: list[Tensor]) -> tuple[Tensor, Tensor]:
        c = x @ t[1].mT + t[2].mT
        z = geq(t[0], c, gamma) if gaussian else opteq(t[0], c)
        r = c - z @ t[0].mT if gaussian else c
        return z @ t[3].mT + t[4].mT, torch.exp(-gamma * r.square().sum(1))

    (before, beta), (after, _) = logits(old), logits(new)
    w, u, b, head = (spectral(t) for t in old[:4])
    sizes = Sizes(w=w, u=u, b=b, head=head, bound=bound)
    change = float((after - before).norm(dim=1).max())
    top = float(beta.max()) if gaussian else 1.0
    return _Moved(change, omega, max(w, u, b, head), w**2, bound, top, sizes, gamma)


def _eq30(g: Random, *, power: int, ours: bool = False) -> Trial | None:
    """The logits' change against Eq 30 (power 2), Eq 31 (power 3), or ours."""
    p = _moved(g, gaussian=False, small=not ours and power == 3)
    if p is None:
        return None
    limit = opteq_change(p.sizes, p.omega) if ours else p.omega * _k30(p.mu, p.m, p.bound, power)
    return Trial(p.change / limit, p.case())


def _eq30_aligned(g: Random, *, power: int, ours: bool = False) -> Iterator[Trial]:
    """One dimension, all weights μ moved to μ + ω, x = B: the second order shows near μ = 1."""
    one = ones(1, 1)
    for mu, omega in ((0.9, 0.05), (0.95, 0.02), (0.95, 1e-7), (0.5, 0.2)):
        bound = g.uniform(0.5, 5.0)
        ends = [w * float(opteq(w * one, (w * bound + w) * one)) + w for w in (mu + omega, mu)]
        sizes = Sizes(w=mu, u=mu, b=mu, head=mu, bound=bound)
        k = _k30(mu, mu**2, bound, power)
        limit = opteq_change(sizes, omega) if ours else omega * k
        yield Trial(abs(ends[0] - ends[1]) / limit, {"mu": mu, "omega": omega, "B": bound})


def _eq35(g: Random, *, ours: bool) -> Trial | None:
    p = _moved(g, gaussian=True, small=False)
    if p is None:
        return None
    if ours:
        return Trial(p.change / geq_change(p.sizes, p.omega, p.gamma), p.case())
    k = _k35(p.mu, 1 - p.beta * p.m, p.beta, p.bound)
    return Trial(p.change / (p.omega * k), {**p.case(), "beta_max": p.beta})


def _eq35_search(g: Random, *, ours: bool) -> Iterator[Trial | None]:
    """One dimension: ω times the sum of |∂f/∂θ| over all five weights, the layer searched."""

    def attempt(p: Tensor) -> Trial | None:
        w, gamma, x = logistic(p[0], 0.98), exponential(p[1], -5, 5), exponential(p[2], -4, 4)
        u, b, head = (w * math.tanh(float(p[i])) for i in (3, 4, 5))
        theta, omega, change = [w, u, b, head, 0.0], 1e-6, 0.0

        def logit(moved: int, by: float) -> float:
            t = [v + (by if i == moved else 0.0) for i, v in enumerate(theta)]
            return t[3] * scalar_geq(t[0], t[1] * x + t[2], gamma) + t[4]

        for i in range(5):
            change += abs(logit(i, omega) - logit(i, -omega)) / 2
        c = u * x + b
        beta = scalar_beta(w, c, gamma, scalar_geq(w, c, gamma))
        sizes = Sizes(w=w, u=abs(u), b=abs(b), head=abs(head), bound=x)
        k = _k35(w, 1 - beta * w * w, beta, x)
        limit = geq_change(sizes, omega, gamma) if ours else omega * k
        return Trial(change / limit, {"mu": w, "gamma": gamma, "B": x, "u": u, "b": b, "w_c": head})

    yield from climb(attempt, (g.normal(6) for _ in range(4)), methods=("Nelder-Mead",))


def _eq33_weights(g: Random, *, ours: bool) -> Trial | None:
    """A move of W alone, one dimension, u = 1, b = 0."""
    w, c = g.uniform(0.1, 0.95), g.log_uniform(0.1, 5.0)
    return _weight_move(w, c, g.log_uniform(0.1, 5.0), 1e-4, ours=ours)


def _weight_move(w: float, c: float, gamma: float, step: float, *, ours: bool) -> Trial | None:
    ends = (w, w + step)
    zs = [scalar_geq(v, c, gamma) for v in ends]
    beta = max(scalar_beta(v, c, gamma, z) for v, z in zip(ends, zs, strict=True))
    if beta < 1e-6:  # z* has too few digits for a difference
        return None
    m = ends[1] ** 2
    if ours:
        message = min(c, math.sqrt(1 / (2 * math.e * gamma)))
        state = w * message
        right = step * (message + ends[1] * state) / (1 - GAUSSIAN_CONCAVITY * m)
    else:
        right = beta * ends[1] * (m - w * w) * c / (1 - beta * m) ** 2
        right += beta * step * c / (1 - beta * m)
    case = {"w": w, "step": step, "c": c, "gamma": gamma, "beta_max": beta}
    return Trial(abs(zs[1] - zs[0]) / right, case)


def _eq33_weights_worst(g: Random, *, ours: bool) -> Iterator[Trial | None]:
    def attempt(p: Tensor) -> Trial | None:
        return _weight_move(logistic(p[0], 0.98), exponential(p[1], -6, 2), 1.0, 1e-5, ours=ours)

    yield from climb(attempt, (g.normal(2) for _ in range(5)), methods=("Nelder-Mead",))


def _eq33_input(g: Random, *, ours: bool) -> Trial:
    """The move of U or b alone: Eq 33 says β/(1 − βm); with β free to move ours is Λ(μ)·|Δc|."""
    w, gamma, step = g.uniform(0.1, 0.95), 1.0, 1e-5
    c = g.uniform(0.05, 3.0)
    return _input_move(w, c, gamma, step, float(gaussian_sensitivity(w)) if ours else None)


def _input_move(w: float, c: float, gamma: float, step: float, limit: float | None) -> Trial:
    ends = (c - step, c + step)
    zs = [scalar_geq(w, v, gamma) for v in ends]
    beta = max(scalar_beta(w, v, gamma, z) for v, z in zip(ends, zs, strict=True))
    right = beta * w / (1 - beta * w * w) if limit is None else limit
    case = {"w": w, "c": c, "s": gamma * (c - w * zs[0]) ** 2, "beta_max": beta}
    return Trial(abs(zs[1] - zs[0]) / (2 * step) / right, case)


def _eq33_known(g: Random, **_: object) -> Iterator[Trial]:
    """w = 0.9 at s = 1.5, where e^{−s}(1 − 2s) is least: 2.566 times too much."""
    w, s = 0.9, 1.5
    yield _input_move(w, math.sqrt(s) * (1 + w * w * math.exp(-s)), 1.0, 1e-6, None)


def _prop2(g: Random, *, gaussian: bool) -> Trial:
    """What Lemma 2 and Eq 31/37 give, over what is printed."""
    mu, beta = g.uniform(0.1, 0.99), g.uniform(0.1, 1.0)
    m, bound = mu**2, g.log_uniform(0.1, 50.0)
    frame = bounds.PacBayes(
        samples=g.integer(100, 100_000),
        delta=g.uniform(0.001, 0.2),
        margin=g.log_uniform(0.01, 10.0),
        width=g.integer(2, 1000),
        size=g.log_uniform(0.1, 1000.0),
    )
    if gaussian:
        ks = [bounds.bracket_geq(mu, m, beta, bound, derived=d) for d in (False, True)]
    else:
        ks = [bounds.bracket_opteq(mu, m, bound, derived=d) for d in (False, True)]
    ratio = frame.derived(ks[1]) / frame.printed(ks[0])
    return Trial(ratio, {"mu": mu, "B": bound, "h": frame.width, "M": frame.samples})


def _frobenius(g: Random) -> Trial:
    """KL of moving W has ‖W‖_F²; the printed 𝓑_W has ‖WᵀW‖_F² ≤ ‖W‖²‖W‖_F²."""
    w = g.weights(g.integer(1, 6), g.integer(1, 6), g.uniform(0.1, 0.99))
    left, right = float(w.square().sum()), float((w.mT @ w).square().sum())
    return Trial(left / right, {"norm": spectral(w)})


def remark1_at(beta: float, mu: float, m: float) -> Trial:
    """The larger of both ratios of Remark 1."""
    return Trial(max(remark1_ratios(beta, mu, m)), {"beta": beta, "mu": mu, "m": m})


def _remark1(g: Random) -> Trial:
    return remark1_at(g.uniform(0.0, 0.8), g.uniform(0.9, 1.0), g.uniform(0.9, 1.0))


def _remark1_corner(g: Random) -> Iterator[Trial]:
    """The corner β = 0.8, μ = 1, m = 0.9, where both ratios are largest: 0.2857 and 0.9286."""
    yield remark1_at(0.8 - 1e-9, 1.0 - 1e-9, 0.9 + 1e-9)
