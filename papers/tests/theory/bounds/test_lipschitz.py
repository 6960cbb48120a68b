"""Proposition 3 and our constants against differences of solved equilibria and closed forms."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import optimize

import equilibria as eq
from equilibria_papers.theory.bounds import AssumptionError, lipschitz_report
from equilibria_papers.theory.bounds.lipschitz import BEND, eq11, eq12, ours_at_the_data, remark2
from equilibria_papers.theory.bounds.report import measured_around, measured_pairs
from papers.tests.theory.bounds.layers import drawn, geq, iterate_geq, opteq


def test_the_constant_of_the_bend() -> None:
    found = optimize.minimize_scalar(
        lambda s: -2 * math.exp(-s) * (s - 1) / math.sqrt(s), bounds=(1.0, 4.0), method="bounded"
    )
    assert pytest.approx(-found.fun, rel=1e-9) == BEND


def test_the_printed_counterexample_with_a_bias() -> None:
    half = torch.full((1, 1), 0.5, dtype=torch.float64)
    layer = geq(half, half, 1.0, torch.tensor([1.29306], dtype=torch.float64))
    x = torch.tensor([[5e-5], [-5e-5]], dtype=torch.float64)
    found = lipschitz_report(layer, x)
    assert found.pairs == pytest.approx(0.12557, abs=5e-6)
    assert found.printed == pytest.approx(0.07859, abs=5e-6)
    assert found.at_data is not None
    assert found.at_data >= found.measured
    assert any("false with a bias" in text for text in found.warnings)
    held = {a.name: a.holds for a in found.assumptions}
    assert held["no bias (the proof's layer)"] is False


def test_the_formulas() -> None:
    part = 0.7 * 0.25 + 0.3 * 2.0 * 0.125
    assert eq11(0.5, 0.7, 0.09, 2.0) == pytest.approx(part / (1 - part), rel=1e-14)
    assert eq12(0.9) == pytest.approx(0.9 / 0.19, rel=1e-14)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: eq11(1.0, 0.5, 0.1, 1.0), "< 1"),
        (lambda: eq11(0.9, 0.9, 1.0, 5.0), "smaller γ"),
        (lambda: eq12(1.2), "1.2"),
        (lambda: ours_at_the_data(1.2, 1.0, 1.0, 1.0, 1.0), "Λ"),
    ],
)
def test_meaningless_numbers_are_refused(call: object, said: str) -> None:
    with pytest.raises(AssumptionError, match=said):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bias", [False, True])
def test_measured_is_below_every_bound_that_should_hold(seed: int, bias: bool) -> None:
    w, u = drawn(seed, 4, 3, 0.3 + 0.1 * seed), drawn(seed + 50, 4, 3, 0.8)
    b = drawn(seed + 90, 4, 1, 1.0)[:, 0] if bias else None
    x = drawn(seed + 70, 8, 3, 1.5)
    r = lipschitz_report(geq(w, u, 0.05, b), x)
    assert r.pairs > 0
    for bound in (r.at_data, r.fixed, r.ours, r.mean_rule):
        assert bound is not None
        assert r.measured <= bound * (1 + 1e-6)
    assert r.local is not None
    assert r.around <= r.local * (1 + 1e-6)
    if not bias:
        assert r.printed is not None
        assert r.measured <= r.printed * (1 + 1e-6)
    assert r.ours == pytest.approx(r.fixed, rel=1e-9)


def test_opteq_attains_its_constant() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0], [0.5, 0.3]], dtype=torch.float64)
    r = lipschitz_report(opteq(0.8 * eye, 0.8 * eye), x)
    assert r.printed == pytest.approx(0.8 / 0.36, rel=1e-9)
    assert r.pairs == pytest.approx(0.8 / 0.36, rel=1e-9)
    assert r.around == pytest.approx(0.8 / 0.36, rel=1e-6)
    assert r.ours == pytest.approx(0.8 / 0.36, rel=1e-9)


def test_power_iteration_finds_the_norm_of_the_jacobian() -> None:
    w, u = drawn(1, 4, 3, 0.9), drawn(2, 4, 3, 0.9)
    x = drawn(3, 5, 3, 3.0) + 0.5
    layer = geq(w, u, 0.3)
    found = measured_around(layer, x, steps=40, generator=torch.Generator().manual_seed(0))
    for i in range(len(x)):
        columns = []
        for j in range(3):
            ends = x[i].repeat(2, 1)
            ends[0, j] += 1e-5
            ends[1, j] -= 1e-5
            z = iterate_geq(w.numpy(), (ends @ u.mT).numpy(), 0.3, 800)
            columns.append((z[0] - z[1]) / 2e-5)
        dense = np.linalg.norm(np.array(columns).T, 2)
        assert float(found[i]) == pytest.approx(dense, rel=1e-4)


def test_pairs_are_all_pairs() -> None:
    x, z = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[0.0], [0.1], [2.1]])
    assert measured_pairs(x, z) == pytest.approx(1.0)
    assert measured_pairs(x[:1], z[:1]) == 0.0
    same = torch.zeros(2, 1)
    assert measured_pairs(same, torch.ones(2, 1)) == 0.0


def test_a_convolution_by_the_mean_rule() -> None:
    torch.manual_seed(0)
    layer = eq.nn.GEQ(4, 8, in_channels=3, patch=eq.Patches(channels=4, size=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        r = lipschitz_report(layer, torch.randn(3, 3, 4, 4), name="stage 1")
    assert r.layer == "stage 1"
    assert r.printed is None
    assert "Eq 11" in r.refused
    assert r.at_data is None
    assert r.ours == pytest.approx(r.mean_rule, rel=1e-9)
    assert r.measured <= r.ours  # type: ignore[operator]
    assert any("γ changes with the input" in text or "γ fixed" in text for text in r.warnings)


def test_remark_2_in_words() -> None:
    assert remark2(0.7, 0.9, 0.01, bias=True)[0]
    met, text = remark2(0.97, 0.9, 0.01, bias=False)
    assert not met
    assert "0.961" in text
