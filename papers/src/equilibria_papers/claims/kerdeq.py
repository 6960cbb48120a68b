"""The claims of KerDEQ (KerDEQ): Theorems 1 to 3 and Remark 1."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from equilibria_papers.theory.bounds.report import kerdeq_remark1, remark1_ratios
from equilibria_papers.theory.bounds.similarity import kerdeq_eq10

from .claim import Claim, Trial, claim, printed, reading
from .drawing import choice, integer, log_uniform, uniform, weights
from .geq_margin import margin_variants
from .geq_problems import feature_map_trial
from .geq_similarity import EQ15_READINGS, FREE_OF_ANGLE, Similarity, measured


def _remark1(g: torch.Generator) -> Trial | None:
    """m = 0.9 and μ = 0.9: no W has them, as μ ≥ ‖W‖ = √m."""
    w = weights(g, integer(g, 1, 4), integer(g, 1, 4), uniform(g, 0.5, 0.999))
    m = float(torch.linalg.matrix_norm(w.mT @ w, 2))
    w = w * math.sqrt(0.9 / m)
    mu = float(torch.linalg.matrix_norm(w, 2))
    return None if mu > 0.9 + 1e-9 else Trial(0.0, {"mu": mu})


def _remark1_limit(g: torch.Generator, mu: float, limit: float) -> Trial:
    """Both ratios of Remark 1 for β below the limit."""
    beta = uniform(g, 0.0, limit)
    return Trial(max(remark1_ratios(beta, mu, 0.9)), {"beta": beta, "mu": mu, "m": 0.9})


def _remark1_edge(mu: float, limit: float) -> Iterator[Trial]:
    yield Trial(max(remark1_ratios(limit - 1e-12, mu, 0.9)), {"beta": limit, "mu": mu, "m": 0.9})


def _eq10(s: Similarity) -> float:
    return kerdeq_eq10(*s.start(), largest=s.largest, **s.rest())


def _theorem3(g: torch.Generator) -> Trial:
    found = measured(
        g,
        kind=choice(g, ("identity", "mean", "centering", "random")),
        n=integer(g, 2, 24),
        mu=uniform(g, 0.1, 0.95),
        theta=uniform(g, 0.02, 0.99) * math.pi,
        gamma=log_uniform(g, 0.05, 5.0),
        size=log_uniform(g, 0.3, 3.0),
    )
    return found.against(_eq10(found))


def _theorem3_family(g: torch.Generator) -> Iterator[Trial]:
    """W = 0.5I at θ = 0.75π, and W = 0.9(I − 11ᵀ/n), γ = 3 at θ = 0.9π."""
    for kind, mu, theta, gamma in (
        ("identity", 0.5, 0.75, 1.0),
        ("identity", 0.5, 0.75, 3.0),
        ("centering", 0.9, 0.9, 3.0),
    ):
        found = measured(g, kind=kind, n=40, mu=mu, theta=theta * math.pi, gamma=gamma, draws=2000)
        yield found.against(_eq10(found))


_LIMIT = kerdeq_remark1(0.9)

CLAIMS: tuple[Claim, ...] = (
    claim(
        "kerdeq.theorem1",
        "Theorem 1",
        r"KerDEQ solves $\min 1^\top f + \frac12\|z\|^2 - \lambda\langle\Phi(c), "
        r"\Phi(Wz)\rangle$, a linear kernel after an infinitely wide map.",
        printed(lambda g: feature_map_trial(g, square=True, half=False, constant=True)),
        reading(
            "λ of z, with 1/2γ",
            "λ = e^{−γ‖c‖²}e^{−γ‖Wz‖²}/(2γ), a function of z",
            lambda g: feature_map_trial(g, square=True, half=True, constant=False),
        ),
        note="λ is not defined in the theorem; read as a constant, the norm of Wz is missing, and "
        "with it the term −e^{−γ‖r‖²}WᵀWz of the layer.",
    ),
    claim(
        "kerdeq.theorem2",
        "Theorem 2",
        "The margin bound of GEQ's Proposition 2, up to a constant: the right side with "
        "constant 1 is at least what its proof gives.",
        *margin_variants(),
        note="Printed with O(·): a large enough constant repairs the factors lost, but not the β "
        "held constant in its proof.",
    ),
    claim(
        "kerdeq.remark1",
        "Remark 1",
        r"With $\|W^\top W\|_2 = 0.9$ and $\mu = 0.9$ both terms of KerDEQ's bound are "
        r"below OptEq's if $\beta_{\max} < 0.83$.",
        printed(_remark1),
        reading(
            "as numbers",
            "m = μ = 0.9 taken as free numbers",
            lambda g: _remark1_limit(g, 0.9, 0.83),
            lambda g: _remark1_edge(0.9, 0.83),
        ),
        reading(
            "μ = √0.9, β < 0.83",
            "μ = √m = 0.9487",
            lambda g: _remark1_limit(g, math.sqrt(0.9), 0.83),
            lambda g: _remark1_edge(math.sqrt(0.9), 0.83),
        ),
        reading(
            "μ = √0.9, β < 0.8259",
            "μ = √m = 0.9487 and β_max < 0.8259",
            lambda g: _remark1_limit(g, math.sqrt(0.9), _LIMIT),
            lambda g: _remark1_edge(math.sqrt(0.9), _LIMIT),
        ),
        note="μ is the largest of four norms, ‖W‖ = √m = 0.9487 among them, so μ = 0.9 cannot be.",
    ),
    claim(
        "kerdeq.theorem3.eq10",
        "Theorem 3, Eq 10",
        r"$\kappa_{kerdeq} \le \frac{\mu^2De^{-\gamma\|U\|_2\|x-y\|^2}E[U_i^2]\|x\|\|y\|"
        r"(\sin\theta_0 + (\pi-\theta_0)\cos\theta_0)}{2\pi(1-\beta_{\max}\mu^2)^2}$, "
        r"$D = e^{\gamma\|W\|_2B}$.",
        printed(_theorem3, _theorem3_family, cost=10),
        FREE_OF_ANGLE,
        note="‖U‖₂, the largest singular value and not squared, stands where the proof of GEQ's "
        "Eq 14 has σ_min(U)²/4.",
    ),
    claim(
        "kerdeq.theorem3.eq11",
        "Theorem 3, Eq 11",
        "The same bound on OptEq's similarity as GEQ's Eq 15.",
        *EQ15_READINGS,
    ),
)
