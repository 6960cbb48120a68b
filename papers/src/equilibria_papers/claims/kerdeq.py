"""The claims of KerDEQ: Theorems 1 to 3 and Remark 1."""

from __future__ import annotations

import math
from collections.abc import Iterator

from equilibria_papers.theory.bounds.report import kerdeq_remark1
from equilibria_papers.theory.bounds.similarity import kerdeq_eq10

from .claim import Trial
from .drawing import Random, spectral
from .geq_margin import remark1_at
from .geq_similarity import Similarity, measured


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
