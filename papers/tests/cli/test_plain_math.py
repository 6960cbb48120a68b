"""Formulas as plain text: known ones, and no formula of the claims keeps its TeX."""

from __future__ import annotations

import pytest

from equilibria_papers.claims import load_claims
from equilibria_papers.cli.plain_math import plain_math


@pytest.mark.parametrize(
    ("formula", "plain"),
    [
        (r"a move of $W$ by $\|\Delta W\| \le \omega$", "a move of W by ‖ΔW‖ ≤ ω"),
        (r"$\frac{\mu}{1-\mu^2}$", "μ/(1-μ²)"),
        (r"$\sqrt{\frac{a}{b}}$ and $\sqrt\gamma$", "√(a/b) and √γ"),
        (r"$\tilde W^\top z^*$", "W̃ᵀz⋆"),
        (r"$e^{-\gamma\|c\|^2}$, e^{−s}", "e^(-γ‖c‖²), e^(−s)"),
        (r"$\beta_{\max}m \in \mathbb R^{n}$", "β_max m ∈ ℝⁿ"),
        (r"$\max(0, \sin\theta)$ and 5 $", "max(0, sin θ) and 5 $"),
    ],
)
def test_known_formulas(formula: str, plain: str) -> None:
    assert plain_math(formula) == plain


def test_no_claim_keeps_its_tex() -> None:
    for claim in load_claims():
        for text in (claim.statement, claim.note, *(reading.needs for reading in claim.variants)):
            assert not set(plain_math(text or "")) & set("\\$"), claim.id
