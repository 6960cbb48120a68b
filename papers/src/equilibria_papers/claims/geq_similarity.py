"""GEQ's Proposition 4 and Remark 3: the output similarity κ; and what KerDEQ claims otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.problems import gaussian_sensitivity
from equilibria_papers.theory.bounds import report as remarks
from equilibria_papers.theory.bounds import similarity as formulas
from equilibria_papers.theory.bounds.report import kerdeq_remark1
from equilibria_papers.theory.bounds.similarity import kerdeq_eq10

from .claim import Trial
from .geq_layer import geq, opteq, unit
from .geq_margin import remark1_at
from .numerics import Random, identity, spectral, tensor


def one_neuron(theta: float) -> float:
    """E[σ(u)σ(v)] of standard normals at angle θ by quadrature: (1/π)∫cos φ cos(φ − θ)dφ.

    In polar coordinates ∫r³e^{−r²/2}dr = 2, and both factors are positive for θ − π/2 < φ < π/2.
    """
    points = 2000  # midpoint rule: error 1e-7
    width = (math.pi - theta) / points
    phi = theta - math.pi / 2 + (torch.arange(points, dtype=torch.float64) + 0.5) * width
    return float((phi.cos() * (phi - theta).cos()).sum()) * width / math.pi


def below(value: float, error: float, limit: float) -> float:
    """(value − 4 standard errors)/limit: a ratio above 1 is no accident. 0/0 counts as 0."""
    least = value - 4.0 * error
    if least <= 0.0:
        return 0.0
    return math.inf if limit <= 0.0 else least / limit


def family(kind: str, n: int, mu: float, g: Random) -> Tensor:
    """W [n, n] with ‖W‖ = μ: "identity", "mean" (11ᵀ/n), "centering" (I − 11ᵀ/n) or "random"."""
    if kind == "random":
        return g.weights(n, n, mu)
    mean = torch.full((n, n), 1.0 / n, dtype=torch.float64)
    eye = identity(n)
    return mu * {"identity": eye, "mean": mean, "centering": eye - mean}[kind]


def sample_pair(g: Random, d: int, theta: float, size: float) -> Tensor:
    """Two inputs of length ``size`` at the angle θ. [2, d]."""
    basis = torch.linalg.qr(g.normal(d, 2))[0].mT
    second = math.cos(theta) * basis[0] + math.sin(theta) * basis[1]
    return size * torch.stack([basis[0], second])


@dataclass(frozen=True)
class Similarity:
    """κ per neuron over draws of U, with what the bounds need (the favorable reading)."""

    kappa: float
    error: float
    variance: float
    sizes: float
    theta: float
    mu: float
    gamma: float
    beta_max: float
    bound: float
    smallest: float
    largest: float
    distance: float
    kind: str
    n: int

    def start(self) -> tuple[float, float, float, float]:
        return self.variance, self.sizes, self.theta, self.mu

    def rest(self) -> dict[str, float]:
        names = ("gamma", "beta_max", "bound", "distance")
        return {name: getattr(self, name) for name in names}

    def against(self, limit: float) -> Trial:
        case = {
            "W": self.kind, "n": self.n, "mu": self.mu, "theta/pi": self.theta / math.pi,
            "gamma": self.gamma, "kappa": self.kappa, "standard error": self.error, "bound": limit,
        }  # fmt: skip
        return Trial(below(self.kappa, self.error, limit), case)


Limit = Callable[[Similarity], float]


def measured(
    g: Random,
    *,
    kind: str,
    n: int,
    mu: float,
    theta: float,
    gamma: float | None,
    size: float = 1.0,
    draws: int = 200,
) -> Similarity:
    """κ(x₁, x₂) for W of a family and U [n, n] with entries N(0, 1/n); γ None: OptEq."""
    w = family(kind, n, mu, g)
    x = sample_pair(g, n, theta, size)
    u = g.normal(draws, n, n) / math.sqrt(n)
    c = (x @ u.mT).flatten(0, 1)  # [draws·2, n]
    z = opteq(w, c) if gamma is None else geq(w, c, gamma)
    r = c - z @ w.mT
    values = torch.linalg.svdvals(u) if gamma is not None else identity(1)
    pairs = z.view(draws, 2, n)
    products = (pairs[:, 0] * pairs[:, 1]).sum(1) / n
    rate = 0.0 if gamma is None else gamma
    return Similarity(
        kappa=float(products.mean()),
        error=float(products.std()) / math.sqrt(draws),
        variance=1.0 / n,
        sizes=size**2,
        theta=theta,
        mu=spectral(w),
        gamma=rate,
        beta_max=float(torch.exp(-rate * r.square().sum(1)).max()),
        bound=max(size, float(z.norm(dim=1).max())),
        smallest=float(values[:, -1].min()),
        largest=float(values[:, 0].min()),
        distance=float((x[0] - x[1]).norm()),
        kind=kind,
        n=n,
    )


def similarity(g: Random, *, limit: Limit, gaussian: bool, kind: str | None = None) -> Trial:
    """A random layer against a bound on κ."""
    found = measured(
        g,
        kind=kind or g.choice(("identity", "mean", "centering", "random")),
        n=g.integer(2, 24),
        mu=g.uniform(0.1, 0.95),
        theta=g.uniform(0.02, 0.99) * math.pi,
        gamma=g.log_uniform(0.05, 5.0) if gaussian else None,
        size=g.log_uniform(0.3, 3.0),
    )
    return found.against(limit(found))


def _eq14(s: Similarity, formula: Callable[..., float] = formulas.eq14) -> float:
    return formula(*s.start(), smallest=s.smallest, **s.rest())


def _eq48(s: Similarity) -> float:
    return _eq14(s, formulas.eq48)


def _eq14_derived(s: Similarity) -> float:
    """Eq 14 with D = e^{γ‖W‖²B²}, as Eq 58 gives it."""
    grown = formulas.log_d_derived(s.gamma, s.mu, s.bound) - s.gamma * s.bound * s.mu**2
    return _eq14(s) * math.exp(min(grown, 600.0))


def _eq15(s: Similarity) -> float:
    return formulas.eq15(*s.start())


def _free_of_angle(s: Similarity) -> float:
    """Ours, OptEq: E[U²]‖x₁‖‖x₂‖/(1 − μ²)², from ‖z‖ ≤ ‖Ux‖/(1 − μ²)."""
    return s.variance * s.sizes / (1 - s.mu**2) ** 2


def _free_of_angle_geq(s: Similarity) -> float:
    """Ours, GEQ: min(Λ(μ)²E[U²]‖x₁‖‖x₂‖, μ²/(2eγn))."""
    near = float(gaussian_sensitivity(s.mu)) ** 2 * s.variance * s.sizes
    return min(near, s.mu**2 / (2 * math.e * s.gamma * s.n))


def _eq15_identity(g: Random) -> Trial:
    """W = μI, where neurons do not meet: κ by quadrature, and Eq 15 as an equality.

    (Ux₁, Ux₂) of a neuron is ‖x‖√E[U²]·r(cos φ, cos(φ − θ)), φ uniform and ∫r³e^{−r²/2}dr = 2;
    z(rc) = rz(c), so κ = E[U²]‖x₁‖‖x₂‖(1/π)∫z(cos φ)z(cos(φ − θ))dφ, z by the layer's iteration.
    """
    mu, theta = g.uniform(0.1, 0.95), g.uniform(0.0, 1.0) * math.pi
    variance, sizes = 1.0 / g.integer(2, 24), g.log_uniform(0.1, 9.0)
    points = 2000
    phi = torch.arange(points, dtype=torch.float64) * (2 * math.pi / points)
    angles = torch.stack([phi.cos(), (phi - theta).cos()])[..., None]
    z = opteq(tensor([[mu]]), angles).squeeze(-1)
    scale = variance * sizes
    kappa = scale * float((z[0] * z[1]).mean()) * 2.0
    limit = formulas.eq15(variance, sizes, theta, mu)
    # The integrand has kinks: the trapezoidal rule is right to about 1e-6 of the size at θ = 0.
    ratio = abs(kappa - limit) / (1e-5 * scale / (1 - mu**2) ** 2)
    return Trial(ratio, {"mu": mu, "theta/pi": theta / math.pi, "kappa": kappa, "Eq 15": limit})


def _eq15_family(g: Random, **_: object) -> Iterator[Trial]:
    """W = 0.9·11ᵀ/n: 4 times the bound at θ = 0.9π, and κ > 0 at θ = π, where the bound is 0."""
    for n, theta, draws in ((48, 0.9, 3000), (48, 1.0, 1000), (100, 0.9, 600)):
        theta = theta * math.pi
        found = measured(g, kind="mean", n=n, mu=0.9, theta=theta, gamma=None, draws=draws)
        yield found.against(_eq15(found))


def _eq14_family(g: Random, *, limit: Limit, **_: object) -> Iterator[Trial]:
    """W = 0.9(I − 11ᵀ/n), γ = 0.3, θ near π; and θ = π, where the bound is 0."""
    for n, theta in ((20, 0.98), (40, 0.98), (40, 0.99), (20, 1.0)):
        theta = theta * math.pi
        found = measured(g, kind="centering", n=n, mu=0.9, theta=theta, gamma=0.3, draws=2000)
        yield found.against(limit(found))


def _lemma3(g: Random, *, width: int | None = None) -> Trial:
    """Eq 50 against quadrature of one neuron, times the width of the layer (None: one neuron)."""
    theta = g.uniform(0.0, math.pi)
    n = g.integer(2, 64) if width is None else width
    left = n * one_neuron(theta)
    right = formulas.arc_cosine(theta) / (2 * math.pi)
    return Trial(abs(left - right) / (1e-5 * (1e-3 + right)), {"theta/pi": theta / math.pi, "n": n})


def _entrywise(g: Random, *, kind: str | None = None) -> Trial | None:
    """Eq 51: σ(WᵀWz₁)ᵀz₂ ≤ μ²z₁ᵀz₂ for z₁, z₂ ≥ 0."""
    n = g.integer(2, 6)
    w = family(kind or g.choice(("mean", "centering", "random")), n, g.uniform(0.2, 0.95), g)
    z = g.normal(2, n).clamp_min(0.0)
    right = spectral(w) ** 2 * float(z[0] @ z[1])
    if right < 1e-9:
        return None
    return Trial(float((w.mT @ (w @ z[0])).clamp_min(0.0) @ z[1]) / right, {"n": n})


def _entrywise_worst(g: Random, **_: object) -> Iterator[Trial]:
    """W = μ11ᵀ/n, z₁ and z₂ nearly disjoint: the left side does not see that."""
    for overlap in (0.1, 0.01):
        w = family("mean", 2, 0.9, g)
        z = tensor([[1.0, overlap], [overlap, 1.0]])
        left, right = float((w.mT @ (w @ z[0])) @ z[1]), 0.81 * float(z[0] @ z[1])
        yield Trial(left / right, {"overlap": overlap})


def _eq58(g: Random, *, squared: bool) -> Trial:
    """β₁β₂ ≤ De^{−γσ_min²‖Δx‖²/4}, D = e^{γB‖W‖²} as printed or e^{γB²‖W‖²}."""
    n, gamma, mu = g.integer(1, 4), g.log_uniform(0.01, 3.0), g.uniform(0.1, 0.99)
    w, u = g.weights(n, n, mu), g.normal(n, n) * g.log_uniform(0.3, 3.0)
    x = g.log_uniform(0.1, 5.0) * unit(g, 2, n) * torch.rand(2, 1, generator=g.generator).double()
    c = x @ u.mT
    z = geq(w, c, gamma)
    s = float(gamma * (c - z @ w.mT).square().sum())
    bound = float(torch.cat([x.norm(dim=1), z.norm(dim=1)]).max())
    least = float(torch.linalg.svdvals(u)[-1])
    power = gamma * mu**2 * (bound**2 if squared else bound)
    decay = gamma * (least * float((x[0] - x[1]).norm())) ** 2 / 4
    case = {"n": n, "gamma": gamma, "mu": mu, "B": bound}
    return Trial(math.exp(min(-s - power + decay, 600.0)), case)


def _eq58_worst(g: Random, **_: object) -> Iterator[Trial]:
    """W = μ(1, −1)/√2, U = 1, x = ±B: both inputs are half explained by Wz, so r = B/(1 + βμ²/2).

    Then ‖r₁‖² + ‖r₂‖² is below B² = ‖U(x₁ − x₂)‖²/4, and D = e^{γBμ²} makes up for it only if B is
    small.
    """
    w = tensor([[1.0, -1.0]]) * (0.99 / math.sqrt(2.0))
    for size in (10.0, 100.0, 1000.0):
        gamma = 0.1 / size**2
        x = tensor([[size], [-size]])
        s = float(gamma * (x - geq(w, x, gamma) @ w.mT).square().sum())
        power = gamma * (0.99**2 * size - size**2)
        yield Trial(math.exp(-s - power), {"gamma": gamma, "B": size, "W": "0.99(1, −1)/√2"})


def _remark3(g: Random, *, printed: bool) -> Trial:
    gamma, bound, mu = g.log_uniform(0.01, 20.0), g.log_uniform(0.1, 50.0), g.uniform(0.1, 0.99)
    beta, least = g.uniform(0.0, 1.0), g.log_uniform(0.01, 5.0)
    return _remark3_ratio(gamma, bound, mu, beta, least, printed)


def _remark3_ratio(
    gamma: float, bound: float, mu: float, beta: float, least: float, printed: bool
) -> Trial:
    """κ̄_geq/κ̄_opteq at the distance of Remark 3; the rest of the two bounds is the same."""
    log_d = gamma * bound * mu**2
    distance = remarks.remark3(log_d, gamma, least, printed=printed)
    power = log_d - gamma * (least * distance) ** 2 / 4
    ratio = mu**2 * math.exp(min(power, 600.0)) * ((1 - mu**2) / (1 - beta * mu**2)) ** 2
    return Trial(ratio, {"gamma": gamma, "B": bound, "mu": mu, "beta_max": beta})


def _remark3_known(g: Random, *, printed: bool) -> Iterator[Trial]:
    """γ = 0.2, B = 20, μ = 0.95, β_max → 1."""
    yield _remark3_ratio(0.2, 20.0, 0.95, 1.0, 1.0, printed)


def _remark1(g: Random) -> Trial | None:
    """m = 0.9 and μ = 0.9: no W has them, as μ ≥ ‖W‖ = √m."""
    w = g.weights(g.integer(1, 4), g.integer(1, 4), g.uniform(0.5, 0.999))
    mu = spectral(w * math.sqrt(0.9 / spectral(w.mT @ w)))
    return None if mu > 0.9 + 1e-9 else Trial(0.0, {"mu": mu})


_ROOT = math.sqrt(0.9)
_LIMIT = kerdeq_remark1(0.9)


def _remark1_limit(g: Random, *, mu: float = _ROOT, limit: float = _LIMIT) -> Trial:
    """Both ratios of Remark 1 for β below the limit."""
    return remark1_at(g.uniform(0.0, limit), mu, 0.9)


def _remark1_edge(g: Random, *, mu: float = _ROOT, limit: float = _LIMIT) -> Iterator[Trial]:
    yield Trial(remark1_at(limit - 1e-12, mu, 0.9).ratio, {"beta": limit, "mu": mu, "m": 0.9})


def _eq10(s: Similarity) -> float:
    return kerdeq_eq10(*s.start(), largest=s.largest, **s.rest())


def _theorem3_family(g: Random, **_: object) -> Iterator[Trial]:
    """W = 0.5I at θ = 0.75π, and W = 0.9(I − 11ᵀ/n), γ = 3 at θ = 0.9π."""
    for kind, mu, theta, gamma in (
        ("identity", 0.5, 0.75, 1.0),
        ("identity", 0.5, 0.75, 3.0),
        ("centering", 0.9, 0.9, 3.0),
    ):
        found = measured(g, kind=kind, n=40, mu=mu, theta=theta * math.pi, gamma=gamma, draws=2000)
        yield found.against(_eq10(found))
