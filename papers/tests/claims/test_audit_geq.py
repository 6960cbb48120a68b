"""The claims of GEQ and KerDEQ: their verdicts, and the counterexamples to the printed digits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import equilibria as eq
from equilibria_papers.claims import Settings, load_claims, run_claim
from equilibria_papers.claims.claim import Trial, Variant
from equilibria_papers.claims.geq_layer import geq, opteq, scalar_geq
from equilibria_papers.claims.geq_similarity import (
    below,
    family,
    measured,
    one_neuron,
    sample_pair,
)
from equilibria_papers.claims.numerics import Random
from equilibria_papers.theory.bounds import similarity as formulas

CLAIMS = {claim.id: claim for claim in load_claims(["GEQ", "KerDEQ"])}

VERDICTS = {
    "holds": """
        geq.eq4 geq.table4 geq.lemma1 geq.lemma2 geq.eq33.weights geq.eq35 geq.remark1
        geq.prop3.eq12 geq.eq44 geq.eq46
    """,
    "holds under": """
        geq.prop1 geq.eq29 geq.eq30 geq.eq33 geq.prop2 geq.prop2.geq geq.prop3.eq11
        geq.lemma3 geq.eq51 geq.prop4.eq15 geq.eq58 geq.prop4.eq14 geq.remark3
        kerdeq.theorem1 kerdeq.theorem2 kerdeq.theorem3.eq10 kerdeq.theorem3.eq11
    """,
    "fails": "geq.prop2.size geq.prop4.eq48",
    "vacuous": "geq.remark2 kerdeq.remark1",
}
EXPECTED = {name: verdict for verdict, names in VERDICTS.items() for name in names.split()}
# Simulations of κ with thousands of draws of U; and a search over six numbers.
DEAR = {c for c in EXPECTED if "prop4" in c or "theorem3" in c} | {"geq.eq35"}


def test_every_claim_is_expected_and_named_once() -> None:
    assert set(CLAIMS) == set(EXPECTED)
    assert {c.paper for c in CLAIMS.values()} == {"GEQ", "KerDEQ"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in DEAR else n for n in EXPECTED],
)
def test_verdicts(name: str) -> None:
    record = run_claim(CLAIMS[name], Settings(trials=40, seconds=20.0))
    assert record.verdict == EXPECTED[name], record.sentence()


def variant(claim: str, name: str) -> Variant:
    return next(v for v in CLAIMS[claim].variants if v.name == name)


def adversarial(claim: str, name: str = "as printed", seed: int = 0) -> list[Trial]:
    adversary = variant(claim, name).adversarial
    assert adversary is not None
    found = adversary(torch.Generator().manual_seed(seed))
    return [t for t in found if t is not None]


def test_eq_11_with_a_bias_to_the_printed_digits() -> None:
    first = adversarial("geq.prop3.eq11")[0]
    assert first.case["ratio of distances"] == pytest.approx(0.12557, abs=5e-6)
    assert first.ratio == pytest.approx(0.12557 / 0.07859, rel=1e-4)


def test_optimizers_find_worse() -> None:
    assert max(t.ratio for t in adversarial("geq.prop3.eq11")) > 5.0
    assert max(t.ratio for t in adversarial("geq.prop3.eq11", "without a bias")) <= 1.0 + 1e-6


def test_eq_33_to_the_printed_digits() -> None:
    (known,) = adversarial("geq.eq33")
    assert known.ratio == pytest.approx(2.566, abs=5e-4)
    assert known.case["s"] == pytest.approx(1.5, abs=1e-4)


def test_remark_3_to_the_printed_digits() -> None:
    (known,) = adversarial("geq.remark3")
    assert known.ratio == pytest.approx(16, abs=0.5)


def test_remark_1_of_kerdeq() -> None:
    assert adversarial("kerdeq.remark1", "μ = √0.9, β < 0.83")[0].ratio > 1.001
    assert adversarial("kerdeq.remark1", "μ = √0.9, β < 0.8259")[0].ratio <= 1.0 + 1e-9


def test_eq_58_needs_the_square_only_for_large_b() -> None:
    ratios = [t.ratio for t in adversarial("geq.eq58")]
    assert ratios[-1] > 1.001
    assert ratios == sorted(ratios)


def test_the_premise_of_remark_2_is_out_of_reach_without_a_bias() -> None:
    draw = variant("geq.remark2", "as printed").random
    generator = torch.Generator().manual_seed(3)
    assert all(draw(generator) is None for _ in range(100))


@pytest.mark.parametrize("seed", range(3))
def test_the_small_solvers_against_the_library(seed: int) -> None:
    draw = Random(torch.Generator().manual_seed(seed))
    w, c = draw.weights(4, 3, 1.3), draw.weights(5, 4, 3.0)
    problem = eq.Problem(eq.NonNegative(), eq.Gaussian(w, c, gamma=0.7))
    solver = eq.ProximalGradient(rtol=1e-12, atol=1e-14, max_steps=4000)
    wanted = eq.minimize(problem, solver=solver).value
    torch.testing.assert_close(geq(w, c, 0.7), wanted, atol=1e-10, rtol=0)
    w, c = draw.weights(4, 3, 0.9), draw.weights(5, 3, 3.0)
    wanted = eq.minimize(eq.Problem(eq.NonNegative(), eq.Linear(w, c)), solver=solver).value
    torch.testing.assert_close(opteq(w, c), wanted, atol=1e-9, rtol=0)


def test_the_scalar_solver() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    for w, c, gamma in ((0.9, 1.7, 0.5), (0.4, 3.0, 2.0), (0.9, -1.0, 1.0)):
        wanted = float(geq(w * one, c * one, gamma))
        assert scalar_geq(w, c, gamma) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("theta", [0.1, 1.5, 3.0])
def test_one_neuron_by_simulation(theta: float) -> None:
    rng = np.random.default_rng(0)
    u, v = rng.standard_normal((2, 400_000))
    second = u * math.cos(theta) + v * math.sin(theta)
    products = np.maximum(u, 0) * np.maximum(second, 0)
    error = products.std() / math.sqrt(len(u))
    assert abs(one_neuron(theta) - products.mean()) < 5 * error


def test_families_and_pairs() -> None:
    g = Random(torch.Generator().manual_seed(0))
    for kind in ("identity", "mean", "centering", "random"):
        assert float(torch.linalg.matrix_norm(family(kind, 5, 0.7, g), 2)) == pytest.approx(0.7)
    x = sample_pair(g, 6, 2.0, 3.0)
    assert x.norm(dim=1).tolist() == pytest.approx([3.0, 3.0])
    assert math.acos(float(x[0] @ x[1]) / 9.0) == pytest.approx(2.0)


def test_similarity_of_the_identity_is_eq_15() -> None:
    g = Random(torch.Generator().manual_seed(0))
    s = measured(g, kind="identity", n=8, mu=0.5, theta=1.2, gamma=None, draws=3000)
    exact = (1 / 8) * one_neuron(1.2) / (1 - 0.25) ** 2
    assert abs(s.kappa - exact) < 5 * s.error


def test_eq_15_is_tried_as_an_equality_where_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By closed form z = σ(c)/(1 − μ²); a bound that is too large fails as one too small does."""
    reading = variant("geq.prop4.eq15", "W = μI")
    trials = [reading.random(torch.Generator().manual_seed(seed)) for seed in range(5)]
    for trial in trials:
        assert trial is not None
        assert trial.ratio < 0.2
        assert trial.case["kappa"] == pytest.approx(trial.case["Eq 15"], rel=1e-2, abs=1e-6)
    real = formulas.eq15
    for factor in (0.999, 1.001):
        monkeypatch.setattr(formulas, "eq15", lambda *sizes, f=factor: f * real(*sizes))
        wrong = reading.random(torch.Generator().manual_seed(0))
        assert wrong is not None
        assert wrong.ratio > 1.0


def test_a_ratio_counts_its_standard_error() -> None:
    assert below(1.0, 0.25, 0.5) == 0.0
    assert below(1.0, 0.05, 0.5) == pytest.approx(1.6)
    assert below(1.0, 0.0, 0.0) == math.inf
