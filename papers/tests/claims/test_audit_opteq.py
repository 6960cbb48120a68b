"""The claims of Xie et al. 2021: expected verdicts, and that a false library would be caught."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equilibria_papers import claims as audit
from equilibria_papers.claims import (
    opteq_deep,
    opteq_layer,
    opteq_training,
)
from equilibria_papers.claims.numerics import ACTIVATIONS, Random
from equilibria_papers.claims.opteq_deep import cyclic_deep

from .limited import limited

VERDICTS = {
    "holds": """
        opteq.theorem1 opteq.table1.skip opteq.lemma1 opteq.lemma2 opteq.theorem3
        opteq.section6.1 opteq.theorem4 opteq.table2.norm opteq.table2.l1 opteq.eq13
        opteq.theorem5 opteq.theorem6
    """,
    "holds under": """
        opteq.wellposed opteq.eq4 opteq.table1.affine opteq.table1.multivariate opteq.lemma3
        opteq.theorem2 opteq.corollary1 opteq.section5.1 opteq.table2.incay
        opteq.table2.decorrelation opteq.table2.convex
    """,
    "fails": "opteq.section7.2.2",
}
EXPECTED = {name: verdict for verdict, names in VERDICTS.items() for name in names.split()}
CLAIMS = {claim.id: claim for claim in audit.load_claims(["OptEq"])}
SLOW = {"opteq.theorem5", "opteq.theorem6"}


def test_every_claim_has_an_expected_verdict() -> None:
    assert set(CLAIMS) == set(EXPECTED)


def quick(name: str) -> audit.Record:
    return audit.run_claim(
        limited(CLAIMS[name], 3), audit.Settings(trials=40, seconds=60.0, seed=1)
    )


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - SLOW))
def test_verdicts(name: str) -> None:
    found = quick(name)
    assert found.verdict == EXPECTED[name], found.sentence()
    for later in found.outcomes[1:]:
        assert later.verdict == "holds", later


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_slow_verdicts(name: str) -> None:
    found = audit.run_claim(CLAIMS[name], audit.Settings(trials=100, seconds=10.0))
    assert found.verdict == EXPECTED[name], found.sentence()


def test_softplus_has_no_equilibrium() -> None:
    """z = softplus(z + c): the gap z − softplus(z + c) stays below −c for c > 0."""
    trial = opteq_layer._softplus_gap(torch.ones(1).double(), torch.tensor([0.25]).double())
    assert trial.ratio == pytest.approx(0.25 / 1e-6, rel=1e-3)
    held = opteq_layer._softplus_gap(torch.tensor([0.9]).double(), torch.tensor([0.25]).double())
    assert held.ratio < 1e-3


def test_a_layer_whose_mu_is_too_small_is_no_prox() -> None:
    """ν below L_σ‖W‖²: firm nonexpansiveness is lost, and the check sees it."""
    one = torch.ones(1, 1).double()
    layer = opteq_layer.Layer(2.0 * one, one[0], ACTIVATIONS["relu"], nu=3.0)
    ratio, part = opteq_layer._prox_ratio(layer, one[0], 2.0 * one[0])
    assert ratio == pytest.approx(4.0 / 3.0)
    assert part == "firmly nonexpansive"


def test_incay_has_a_maximum_for_a_fixed_point() -> None:
    trial = opteq_layer._incay_points(0.6, 1.0, 0.2, torch.zeros(1).double())
    roots = sorted(float(t) for t in trial.case["fixed points along c"])
    # (1/w² − 1)t = 4γt/(t² + 2ε)²: t = 0 and t² = √(4γ/(1/w² − 1)) − 2ε.
    away = math.sqrt(math.sqrt(4.0 / (1 / 0.36 - 1.0)) - 0.4)
    assert roots == pytest.approx([-away, 0.0, away], abs=1e-9)
    assert trial.ratio > 1e5


@settings(max_examples=40, deadline=None)
@given(
    st.integers(3, 6),
    st.integers(1, 4),
    st.floats(0.02, 0.98),
    st.floats(0.01, 5.0),
    st.integers(0, 2**31),
)
def test_cyclic_weights_by_their_definition(
    layers: int, units: int, alpha: float, size: float, seed: int
) -> None:
    """The equilibrium equations, in numpy: before layer l the state gives W_l z_{l−1} = Nh."""
    draw = torch.Generator().manual_seed(seed)
    n = torch.randn(units, units, generator=draw, dtype=torch.float64) * size
    made = cyclic_deep(n, layers, alpha)
    h = np.random.default_rng(seed).standard_normal(units)
    z = made.state.numpy() @ h
    for w in made.weights:
        assert w.numpy() @ z == pytest.approx(n.numpy() @ h, abs=1e-8 * (1 + size / alpha))
        z = alpha * w.numpy().T @ h + (1 - alpha) * z
    assert z == pytest.approx(made.state.numpy() @ h, abs=1e-8 * (1 + size / alpha))
    assert np.linalg.matrix_rank(made.state.numpy(), tol=1e-6) == units


def test_cyclic_weights_for_one_hidden_layer() -> None:
    made = cyclic_deep(torch.zeros(2, 2).double(), 2, 0.3)
    gram = made.weights[0] @ made.weights[1].mT
    assert torch.allclose(gram, -0.7 * torch.eye(2).double())
    for wrong in (
        lambda: cyclic_deep(torch.ones(2, 2).double(), 2, 0.3),
        lambda: cyclic_deep(torch.zeros(2, 2).double(), 1, 0.3),
        lambda: cyclic_deep(torch.zeros(2, 2).double(), 3, 1.0),
    ):
        with pytest.raises(ValueError, match=r"expected|needs"):
            wrong()


def test_lemma2_solved_from_scratch() -> None:
    """A tanh network of two hidden layers; Newton, near the built state, lands on its output."""
    draw = torch.Generator().manual_seed(5)
    a1, a2, a3 = (torch.randn(2, 2, generator=draw, dtype=torch.float64) * 0.7 for _ in range(3))
    x = torch.tensor([0.3, -1.1], dtype=torch.float64)
    h1 = torch.tanh(a1 @ x)
    h2 = torch.tanh(a2 @ h1)
    n = torch.zeros(4, 4).double()
    n[2:, :2] = a2
    made = cyclic_deep(n, 3, 0.4)
    c = torch.cat([a1 @ x, torch.zeros(2).double()])
    layers = tuple(opteq_layer.Layer(w, c, ACTIVATIONS["tanh"]) for w in made.weights)
    deep = opteq_deep.Deep(layers, 0.4)
    start = made.state @ torch.cat([h1, h2])
    from equilibria_papers.claims.numerics import newton

    z, left = newton(deep, deep.slope, start + 1e-3)
    assert left < 1e-12
    head = a3 @ torch.eye(4).double()[2:] @ torch.linalg.pinv(made.state)
    assert torch.allclose(head @ z, a3 @ h2, atol=1e-8)


def test_slopes_of_deep_layers_by_differences() -> None:
    draw = Random(torch.Generator().manual_seed(2))
    deep = opteq_deep._draw_deep(draw, activation="tanh", count=3)
    z = draw.normal(deep.layers[0].m)
    jacobian = torch.autograd.functional.jacobian(deep, z)
    assert torch.allclose(deep.slope(z), jacobian, atol=1e-12)


def test_theorem3_falls_like_alpha() -> None:
    draw = Random(torch.Generator().manual_seed(9))
    deep = opteq_deep._draw_deep(draw, activation="relu", count=3, top=0.9)
    y = opteq_deep._wide(deep.layers)
    far = [
        float((dataclasses.replace(deep, alpha=a).blocks() - y).norm(dim=1).max())
        for a in (1e-3, 1e-4, 1e-5)
    ]
    assert far[0] / far[1] == pytest.approx(10.0, rel=0.1)
    assert far[1] / far[2] == pytest.approx(10.0, rel=0.1)
    mean = sum(layer(y) for layer in deep.layers) / 3
    assert torch.allclose(mean, y, atol=1e-8)  # Lz = Σ W_iᵀσ(W_i z + …)


def test_a_wrong_gradient_of_the_library_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = opteq_layer.FeatureIncay.grad
    monkeypatch.setattr(
        opteq_layer.FeatureIncay, "grad", lambda self, z: -real(self, z), raising=True
    )
    assert quick("opteq.table2.incay").verdict == "fails"
    wrong = opteq_layer.Decorrelation.grad
    monkeypatch.setattr(
        opteq_layer.Decorrelation, "grad", lambda self, z: 0.5 * wrong(self, z), raising=True
    )
    assert quick("opteq.table2.decorrelation").verdict == "fails"


def test_a_wrong_converter_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = opteq_deep.to_hidden_units

    def wrong(network: torch.nn.Sequential, skips: object) -> object:
        return real(network, None)  # forgets the input skips

    monkeypatch.setattr(opteq_deep, "to_hidden_units", wrong)
    assert quick("opteq.lemma1").verdict == "fails"


def test_another_limit_of_sam_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest fixed point to a instead of the minimizer of R: right only for H = I."""

    def nearest(self: Any) -> Tensor:
        found: Tensor = self.q.mT @ (self.q @ self.a).clamp_min(0.0)
        return found

    monkeypatch.setattr(opteq_training._Selection, "solution", nearest)
    monkeypatch.setattr(opteq_training, "_STEPS", 512)
    found = audit.run_claim(CLAIMS["opteq.theorem5"], audit.Settings(trials=40, seconds=60.0))
    assert found.verdict == "fails"
