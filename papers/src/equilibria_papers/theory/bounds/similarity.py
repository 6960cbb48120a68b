"""Proposition 4 of GEQ and Theorem 3 of KerDEQ: the output similarity κ(x₁, x₂) over random U.

    κ = E_U[⟨z*(x₁), z*(x₂)⟩]/width,   the rows of U drawn from N(0, E[U²]I), no bias,

estimated by drawing U and solving, with its standard error, beside the papers' bounds and ours:

    ours   κ ≤ E_U[s(x₁)s(x₂)]/width,  ‖z*(x)‖ ≤ s(x)  for every W, μ < 1 (GEQ: < 1.4969)
    GEQ    s = min(Λ(μ)‖c̃‖, μ·sup{te^{−γt²}: t ≥ ‖c̃‖ − μ²/√(2eγ)}),  c̃ = (rows of Ux)W_h
    OptEq  s = ‖Ux‖/(1 − ‖W‖²)

by Cauchy and Schwarz. In GEQ's s the second part falls to zero as ‖Ux‖ grows: what the papers want
to say of far samples, true for every W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine import sample_norm
from equilibria.nn import GEQ, OptEq
from equilibria.problems import (
    Coupling,
    Gaussian,
    Linear,
    NonNegative,
    Problem,
    gaussian_sensitivity,
)

from .report import (
    Assumption,
    AssumptionError,
    Provable,
    Report,
    Row,
    check_positive,
    double,
    number,
    remark3,
    solved,
)

_BATCH = 1 << 12  # states solved at a time

# The papers' right sides, with J(θ) = sin θ + (π − θ)cos θ and K₀ = E[U²]‖x₁‖‖x₂‖J(θ)/2π (Lemma 3,
# one ReLU neuron of Ux, so κ is divided by the width). All of them fail for some W: the proofs take
# zᵀWᵀWz′ ≤ ‖W‖²zᵀz′ entry by entry, which is false.


def arc_cosine(theta: float) -> float:
    """J(θ) = sin θ + (π − θ)cos θ for 0 ≤ θ ≤ π: from π down to 0."""
    if not 0.0 <= theta <= math.pi:
        raise ValueError(f"theta={theta!r}: expected an angle from 0 to π.")
    left = math.pi - theta  # J = sin φ − φ cos φ of φ = π − θ, which falls like φ³/3
    if left < 1e-3:
        return left**3 / 3.0 * (1.0 - left**2 / 10.0)
    return math.sin(left) - left * math.cos(left)


def _one_neuron(variance: float, sizes: float, theta: float) -> float:
    """K₀ with ``sizes`` = ‖x₁‖‖x₂‖."""
    check_positive(variance=variance)
    return variance * sizes * arc_cosine(theta) / (2.0 * math.pi)


def _contracting(mu: float) -> None:
    if not 0.0 <= mu < 1.0:
        raise AssumptionError(f"Proposition 4 needs ‖W‖ ≤ μ < 1, and μ = {mu:.4g} here.")


def eq15(variance: float, sizes: float, theta: float, mu: float) -> float:
    """κ̄_opteq = K₀/(1 − μ²)² (Eq 15, Eq 49, KerDEQ Eq 11)."""
    _contracting(mu)
    return _one_neuron(variance, sizes, theta) / (1.0 - mu**2) ** 2


def _gaussian(one: float, mu: float, beta_max: float, exponent: float) -> float:
    _contracting(mu)
    return mu**2 * math.exp(min(exponent, 700.0)) * one / (1.0 - beta_max * mu**2) ** 2


def eq14(
    variance: float,
    sizes: float,
    theta: float,
    mu: float,
    *,
    gamma: float,
    beta_max: float,
    bound: float,
    smallest: float,
    distance: float,
    quarter: float = 0.25,
) -> float:
    """κ̄_geq = μ²De^{−γσ_min(U)²‖x₁−x₂‖²/4}K₀/(1 − β_maxμ²)², D = e^{γBμ²} (Eq 14).

    ``quarter=1`` is the appendix' Eq 48.
    """
    exponent = gamma * (bound * mu**2 - quarter * (smallest * distance) ** 2)
    return _gaussian(_one_neuron(variance, sizes, theta), mu, beta_max, exponent)


eq48 = partial(eq14, quarter=1.0)
"""κ̄_geq as the appendix restates it: γ in place of γ/4."""


def kerdeq_eq10(
    variance: float,
    sizes: float,
    theta: float,
    mu: float,
    *,
    gamma: float,
    beta_max: float,
    bound: float,
    largest: float,
    distance: float,
) -> float:
    """κ̄_kerdeq of KerDEQ Eq 10: D = e^{γμB}, decay e^{−γ‖U‖₂‖x₁−x₂‖²}, both as printed."""
    exponent = gamma * (bound * mu - largest * distance**2)
    return _gaussian(_one_neuron(variance, sizes, theta), mu, beta_max, exponent)


def log_d_derived(gamma: float, mu: float, bound: float) -> float:
    """log D = γ‖W‖²B², what Eq 58 gives: ‖W(z₁ − z₂)‖² ≤ 2‖W‖²B² for z₁, z₂ ≥ 0."""
    return gamma * mu**2 * bound**2


class Draws:
    """A layer (in float64, OptEq in the form of Eq 4) whose U is drawn anew; x [N, ...]."""

    def __init__(self, exact: Provable, x: Tensor, deviation: float) -> None:
        self.exact, self.x, self.deviation = exact, x, deviation
        self.prior = exact.prior
        self.coupling = exact.problem(x).coupling
        self.norms: list[tuple[float, float]] = []
        """(σ_min, σ_max) of each U drawn."""

    def mu(self) -> float:
        """A proven bound on ‖A‖ (GEQ) or ‖W‖/√ν (OptEq)."""
        if isinstance(self.coupling, Gaussian):
            return self.coupling.mu_upper(tight=True)
        assert isinstance(self.exact, OptEq)
        return self.exact.operator().norm_upper() / math.sqrt(self.exact.nu)

    def features(self, generator: torch.Generator | None) -> Tensor:
        """c = Ux for a fresh U, without a bias. [N, *mid]."""
        weight: Any = self.exact.U.weight
        drawn = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
        drawn = drawn.to(weight.device) * self.deviation
        if self.exact.convolutional:
            # The least singular value of a convolution is not at hand; 0 favors the papers.
            self.norms.append((0.0, float(torch.linalg.matrix_norm(drawn.flatten(1), 2))))
            return F.conv2d(self.x, drawn, padding=weight.shape[-1] // 2)
        values = torch.linalg.svdvals(drawn)
        least = float(values[-1]) if drawn.shape[0] >= drawn.shape[1] else 0.0
        self.norms.append((least, float(values[0])))
        return self.x @ drawn.mT

    def solve(self, c: Tensor) -> tuple[Problem, Tensor]:
        """The problem on the features c [N, *mid], and its equilibria [N, *state]."""
        q = self.coupling
        made: Coupling
        if isinstance(q, Gaussian):
            assert q.policy is not None  # a GEQ always has one
            made = Gaussian(q.operator, c, q.policy, patches=q.patches, metric=q.metric)
        else:
            made = Linear(q.operator, c)
        problem = Problem(self.prior, made)
        start = c.new_zeros(len(c), self.exact.state_channels, *c.shape[2:])
        return problem, solved(problem, start)


def state_bound(problem: Problem, mu: float, z: Tensor) -> Tensor:
    """s with ‖z*‖ ≤ s for every W of this μ (see ``similarity``); z gives the shape. [B]."""
    q = problem.coupling
    if not isinstance(q, Gaussian):
        size = sample_norm([q.c])
        return size / (1.0 - mu**2) if mu < 1.0 else torch.full_like(size, math.inf)
    energies = q.energies(torch.zeros_like(z))
    features = energies.sum(1).sqrt()
    cap = (energies.shape[1] / (2.0 * math.e * q.gamma)).sqrt()
    if energies.shape[1] == 1:
        # Far inputs: ‖h‖ ≥ ‖c̃‖ − μ‖z‖, and te^{−γt²} falls beyond 1/√(2γ).
        least = features - mu**2 * cap
        falling = least > (2.0 * q.gamma).rsqrt()
        cap = torch.where(falling, least * torch.exp(-q.gamma * least.square()), cap)
    near = gaussian_sensitivity(mu).to(features.device) * features
    return torch.minimum(near, mu * cap)


@dataclass(frozen=True, eq=False, kw_only=True)
class SimilarityReport(Report):
    """κ of each pair, its standard error, and the bounds; lists of one entry a pair."""

    TITLE: ClassVar[str] = "Proposition 4, output similarity κ per neuron"

    theta: tuple[float, ...]
    distance: tuple[float, ...]
    kappa: tuple[float, ...]
    error: tuple[float, ...]  # The standard error of ``kappa`` over the draws of U
    printed: tuple[float | None, ...]
    """Eq 14 (GEQ) or Eq 15 (OptEq), with the reading most favorable to it: the largest β and B
    and the smallest σ_min(U) of all draws."""
    appendix: tuple[float | None, ...]  # Eq 48 (GEQ)
    kerdeq: tuple[float | None, ...]  # KerDEQ Eq 10 (GEQ) or Eq 11 (OptEq)
    ours: tuple[float, ...]
    variance: float
    draws: int
    mu: float
    gamma: float | None
    beta_max: float | None
    bound: float
    smallest: float  # σ_min(U) over the draws (0 where U takes a larger space to a smaller one)
    largest: float
    log_d: float | None  # γ‖W‖²B², the logarithm of the D that Eq 58 gives (GEQ)
    remark3: float | None  # The distance 2√(log D/γ)/σ_min(U) from which κ̄_geq ≤ κ̄_opteq (GEQ)

    @property
    def violated(self) -> tuple[bool, ...]:
        """Where κ − 4 standard errors lies above the printed bound."""
        return tuple(
            limit is not None and k - 4.0 * e > limit
            for k, e, limit in zip(self.kappa, self.error, self.printed, strict=True)
        )

    def rows(self) -> list[Row]:
        made: list[Row] = []
        label = "Eq 15" if self.gamma is None else "Eq 14"
        for i, theta in enumerate(self.theta):
            note = f"±{self.error[i]:.1e}; {label} {number(self.printed[i])}"
            if self.gamma is not None:
                note += f", Eq 48 {number(self.appendix[i])}, KerDEQ {number(self.kerdeq[i])}"
            note += f"; ours {self.ours[i]:.4g}" + ("; VIOLATED" if self.violated[i] else "")
            made.append((f"κ, θ = {theta / math.pi:.2f}π", self.kappa[i], note))
        made += [
            ("E[U²], draws", f"{self.variance:.4g}, {self.draws}", ""),
            ("μ, B", f"{self.mu:.4g}, {self.bound:.4g}", ""),
            ("σ_min(U), ‖U‖", f"{self.smallest:.4g}, {self.largest:.4g}", "over the draws"),
        ]
        if self.gamma is not None:
            made += [
                ("γ, β_max", f"{self.gamma:.4g}, {number(self.beta_max)}", ""),
                ("log D", self.log_d, "as Eq 58 gives it"),
                ("Remark 3", self.remark3, "distance from which κ̄_geq ≤ κ̄_opteq"),
            ]
        return made

    def summary(self) -> list[tuple[str, str]]:
        return [
            ("Prop 4, κ of the first pair", f"{self.kappa[0]:.3g} ± {self.error[0]:.1g}"),
            ("Prop 4, κ ≤, Eq 14/15", number(self.printed[0])),
            ("Prop 4, κ ≤, ours", number(self.ours[0])),
            ("Prop 4, pairs that break it", f"{sum(self.violated)} of {len(self.kappa)}"),
        ]


@torch.no_grad()
def similarity_report(
    layer: Provable,
    x1: Tensor,
    x2: Tensor,
    *,
    draws: int = 256,
    variance: float | None = None,
    generator: torch.Generator | None = None,
    name: str = "",
) -> SimilarityReport:
    """κ(x₁, x₂) of ``layer`` with U drawn anew, for pairs x1, x2 [P, ...].

    Args:
        layer: a GEQ or OptEq; its W, W_h, γ and prior are kept, its U and bias are not.
        x1, x2: inputs of the layer, pair by pair.
        draws: how many U to draw.
        variance: E[U²]; that of the layer's own U if not given.
        generator: seeds the draws.
        name: what to call the layer.
    """
    if draws < 2:
        raise ValueError(f"draws={draws!r}: expected at least 2, for a standard error.")
    if x1.shape != x2.shape or len(x1) == 0:
        raise ValueError(f"x1 {tuple(x1.shape)} and x2 {tuple(x2.shape)} are not pairs.")
    exact = double(layer)
    weight: Any = exact.U.weight
    spread = float(weight.square().mean()) if variance is None else variance
    x = torch.cat([x1, x2]).detach().to(weight.device, torch.float64)
    exact.check_input(x)
    sampler = Draws(exact, x, math.sqrt(spread))
    mu = sampler.mu()
    products, limits = [], []
    beta, size, gammas = 0.0, float(sample_norm([x]).max()), []
    block = max(1, _BATCH // len(x))
    for begin in range(0, draws, block):
        c = torch.cat([sampler.features(generator) for _ in range(min(block, draws - begin))])
        problem, z = sampler.solve(c)
        pairs = z.flatten(1).view(-1, 2, len(x1), z[0].numel())
        products.append((pairs[:, 0] * pairs[:, 1]).sum(-1) / z[0].numel())
        s = state_bound(problem, mu, z).view(-1, 2, len(x1))
        limits.append(s[:, 0] * s[:, 1] / z[0].numel())
        size = max(size, float(sample_norm([z]).max()))
        q = problem.coupling
        if isinstance(q, Gaussian):
            least = (q.gamma.unsqueeze(1) * q.energies(z)).min()
            beta = max(beta, float(torch.exp(-least)))
            gammas += [float(q.gamma.min()), float(q.gamma.max())]
    first, second = x1.double().flatten(1), x2.double().flatten(1)
    lengths = sample_norm([first]) * sample_norm([second])
    cosine = (first * second).sum(1) / lengths.clamp_min(1e-300)
    theta = torch.acos(cosine.clamp(-1.0, 1.0)).tolist()
    distance = sample_norm([first - second]).tolist()
    smallest, largest = (min(norms) for norms in zip(*sampler.norms, strict=True))
    gamma = max(gammas) if gammas else None
    rows: list[tuple[float | None, float | None, float | None]] = []
    refused: dict[str, str] = {}
    for length, angle, apart in zip(lengths.tolist(), theta, distance, strict=True):
        start = (spread, length, angle, mu)
        try:
            if gamma is None:
                rows.append((eq15(*start), None, eq15(*start)))
                continue
            numbers = {"gamma": gamma, "beta_max": beta, "bound": size, "distance": apart}
            own = [eq(*start, smallest=smallest, **numbers) for eq in (eq14, eq48)]
            rows.append((own[0], own[1], kerdeq_eq10(*start, largest=largest, **numbers)))
        except AssumptionError as error:
            refused["Proposition 4"] = str(error)
            rows.append((None, None, None))
    printed, appendix, kerdeq = zip(*rows, strict=True)
    drawn, limit = torch.cat(products), torch.cat(limits)
    log_d = None if gamma is None else log_d_derived(gamma, mu, size)
    return SimilarityReport(
        layer=name or ("GEQ" if isinstance(exact, GEQ) else "OptEq"),
        assumptions=tuple(_assumptions(exact, mu, gammas, size, draws)),
        warnings=_warnings(gamma is not None),
        refused=refused,
        theta=tuple(theta),
        distance=tuple(distance),
        kappa=tuple(drawn.mean(0).tolist()),
        error=tuple((drawn.std(0) / math.sqrt(draws)).tolist()),
        printed=printed,
        appendix=appendix,
        kerdeq=kerdeq,
        ours=tuple(limit.mean(0).tolist()),
        variance=spread,
        draws=draws,
        mu=mu,
        gamma=gamma,
        beta_max=None if gamma is None else beta,
        bound=size,
        smallest=smallest,
        largest=largest,
        log_d=log_d,
        remark3=None if log_d is None or gamma is None else remark3(log_d, gamma, smallest),
    )


def _assumptions(
    exact: Provable, mu: float, gammas: list[float], size: float, draws: int
) -> list[Assumption]:
    dense = not exact.convolutional
    rows = "drawn so" if dense else "a convolution's rows share entries and see few pixels"
    made = [
        Assumption("ReLU", isinstance(exact.prior, NonNegative), "the layer's prior"),
        Assumption("‖W‖ < 1", mu < 1.0, f"μ ≤ {mu:.4g}"),
        Assumption("rows of U spherical Gaussian", dense, rows),
        Assumption("no bias", True, "left out of the draws"),
        Assumption("inputs and outputs bounded by B", True, f"B = {size:.4g} over {draws} draws"),
    ]
    if gammas:
        same = max(gammas) - min(gammas) <= 1e-12 * max(gammas)
        made.append(Assumption("γ fixed", same, f"{min(gammas):.4g} … {max(gammas):.4g}"))
    return made


def _warnings(gaussian: bool) -> tuple[str, ...]:
    if gaussian:
        return (
            "Eq 14 fails near opposite inputs: W = 0.9(I − 11ᵀ/n), n = 40, γ = 0.3, θ = 0.99π has "
            "κ 28 times the bound, and at θ = π the bound is 0 and κ is not; KerDEQ Eq 10 fails "
            "widely",
        )
    return ("Eq 15 fails: W = 0.9·11ᵀ/n, θ = 0.9π has κ 4.1 times the bound; it holds for W = μI",)
