"""Proposition 4 and KerDEQ's Theorem 3: expectations by quadrature, families by simulation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria_papers.theory.bounds import (
    AssumptionError,
    SimilarityReport,
    similarity_report,
)
from equilibria_papers.theory.bounds.report import double
from equilibria_papers.theory.bounds.similarity import (
    Draws,
    arc_cosine,
    eq14,
    eq15,
    eq48,
    kerdeq_eq10,
    state_bound,
)
from papers.tests.theory.bounds.layers import drawn, geq, opteq


def test_the_arc_near_opposite_inputs() -> None:
    assert arc_cosine(math.pi) == 0.0
    for left in (1e-6, 9.99e-4, 1.01e-3):
        assert arc_cosine(math.pi - left) == pytest.approx(left**3 / 3, rel=1e-5)
    with pytest.raises(ValueError, match="0 to π"):
        arc_cosine(4.0)


def test_the_formulas() -> None:
    j = math.sin(1.0) + (math.pi - 1.0) * math.cos(1.0)
    one = 0.1 * 6.0 * j / (2 * math.pi)
    assert eq15(0.1, 6.0, 1.0, 0.8) == pytest.approx(one / (1 - 0.64) ** 2)
    numbers = {"gamma": 0.3, "beta_max": 0.9, "bound": 2.0, "distance": 1.5}
    front = 0.64 * one / (1 - 0.9 * 0.64) ** 2
    d = math.exp(0.3 * 2.0 * 0.64)
    decay = (0.7 * 1.5) ** 2
    found = eq14(0.1, 6.0, 1.0, 0.8, smallest=0.7, **numbers)
    assert found == pytest.approx(front * d * math.exp(-0.3 / 4 * decay))
    found = eq48(0.1, 6.0, 1.0, 0.8, smallest=0.7, **numbers)
    assert found == pytest.approx(front * d * math.exp(-0.3 * decay))
    found = kerdeq_eq10(0.1, 6.0, 1.0, 0.8, largest=1.7, **numbers)
    wanted = front * math.exp(0.3 * 0.8 * 2.0) * math.exp(-0.3 * 1.7 * 1.5**2)
    assert found == pytest.approx(wanted)
    with pytest.raises(AssumptionError, match="μ < 1"):
        eq15(0.1, 1.0, 1.0, 1.0)


def pair(n: int, theta: float, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    x1, x2 = torch.zeros(1, n).double(), torch.zeros(1, n).double()
    x1[0, 0] = size
    x2[0, 0], x2[0, 1] = size * math.cos(theta), size * math.sin(theta)
    return x1, x2


def report(layer: Any, theta: float, draws: int, size: float = 1.0) -> SimilarityReport:
    """Of two inputs at this angle, E[U²] = 1/n."""
    n = layer.U.weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    inputs = pair(n, theta, size)
    return similarity_report(layer, *inputs, draws=draws, variance=1 / n, generator=generator)


def test_eq_15_fails_for_the_mean() -> None:
    r = report(opteq(torch.full((48, 48), 0.9 / 48).double(), torch.eye(48).double()), 2.8274, 3000)
    assert r.printed[0] == pytest.approx(9.40e-4, abs=5e-6)
    assert r.kappa[0] / r.printed[0] == pytest.approx(4.1, abs=0.2)  # type: ignore[operator]
    assert r.violated == (True,)
    assert "VIOLATED" in str(r)
    assert r.kappa[0] <= r.ours[0]


def test_eq_14_fails_near_opposite_inputs_and_kerdeq_even_on_the_identity() -> None:
    eye = torch.eye(40).double()
    r = report(geq(0.9 * (eye - 1 / 40), eye, 0.3), 0.99 * math.pi, 3000)
    assert r.violated == (True,)
    assert r.kappa[0] <= r.ours[0]
    r = report(geq(0.5 * eye, eye, 1.0), 0.75 * math.pi, 500)
    assert r.violated == (False,)
    assert r.kerdeq[0] is not None
    assert r.kappa[0] > 2 * r.kerdeq[0]


@given(st.integers(0, 10**6), st.floats(0.1, 1.4), st.floats(0.02, 10.0), st.floats(0.05, 30.0))
@settings(max_examples=30, deadline=None)
def test_states_are_below_their_bound(seed: int, mu: float, gamma: float, size: float) -> None:
    layer = double(geq(drawn(seed, 4, 3, mu), drawn(seed + 1, 4, 4, 1.0), gamma))
    x = size * drawn(seed + 2, 5, 4, 1.0)
    draws = Draws(layer, x, 1.0)
    c = draws.features(torch.Generator().manual_seed(seed))
    problem, z = draws.solve(c)
    assert bool(
        (z.flatten(1).norm(dim=1) <= state_bound(problem, draws.mu(), z) * (1 + 1e-9)).all()
    )


def test_far_samples_fade() -> None:
    """Ours says of GEQ what the papers want to say: κ falls to zero with the distance."""
    layer = geq(drawn(0, 6, 6, 0.9), torch.eye(6).double(), 0.5)
    found = [report(layer, 1.0, 64, size) for size in (1.0, 10.0, 100.0)]
    assert all(r.kappa[0] <= r.ours[0] * (1 + 1e-9) for r in found)
    assert found[2].ours[0] < 1e-3 * found[0].ours[0]


def test_the_report_on_a_convolution() -> None:
    torch.manual_seed(0)
    layer = eq.nn.GEQ(4, 8, in_channels=3, patch=eq.Patches(channels=4, size=2))
    x = torch.randn(4, 3, 4, 4)
    r = similarity_report(layer, x[:2], x[2:], draws=8)
    held = {a.name: a.holds for a in r.assumptions}
    assert held["rows of U spherical Gaussian"] is False
    assert held["γ fixed"] is False
    assert r.smallest == 0.0
    assert r.remark3 == math.inf
    assert len(r.kappa) == 2
    assert all(k <= o for k, o in zip(r.kappa, r.ours, strict=True))


def test_beyond_contraction_the_papers_are_refused_and_ours_stands() -> None:
    r = similarity_report(
        geq(drawn(0, 4, 4, 1.3), torch.eye(4).double(), 0.5), *pair(4, 1.0), draws=16
    )
    assert r.printed == (None,)
    assert "μ < 1" in r.refused["Proposition 4"]
    assert r.kappa[0] <= r.ours[0]


def test_bad_input() -> None:
    layer = geq(drawn(0, 4, 4, 0.8), torch.eye(4).double(), 0.5)
    with pytest.raises(ValueError, match="draws"):
        similarity_report(layer, torch.ones(1, 4), torch.ones(1, 4), draws=1)
    with pytest.raises(ValueError, match="not pairs"):
        similarity_report(layer, torch.ones(1, 4), torch.ones(2, 4))


@pytest.mark.parametrize(("w", "gamma"), [(0.5, 0.5), (0.95, 2.0), (1.3, 0.1)])
def test_the_bound_of_a_state_in_one_dimension(w: float, gamma: float) -> None:
    """At r = 1/√(2γ) the state is w·max te^{−γt²}: attained. Beyond, it must still hold."""
    layer = double(
        geq(torch.full((1, 1), w, dtype=torch.float64), torch.ones(1, 1).double(), gamma)
    )
    peak = 1 / math.sqrt(2 * math.e * gamma)
    at = 1 / math.sqrt(2 * gamma) + w * w * peak
    c = torch.tensor([[at], [2 * at], [3 * at]], dtype=torch.float64)
    draws = Draws(layer, c, 1.0)
    with torch.no_grad():
        problem, z = draws.solve(c)
        bound = state_bound(problem, draws.mu(), z)
    assert float(z[0]) == pytest.approx(w * peak, rel=1e-9)
    assert float(bound[0]) >= w * peak * (1 - 1e-9)
    assert bool((z[:, 0] <= bound * (1 + 1e-9)).all())
    assert float(bound[2]) < 0.5 * float(bound[0])
