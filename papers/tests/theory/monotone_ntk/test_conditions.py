"""Conditions 1, 2, 2 with m, 2′: hand-computed values, a geometric program by cvxpy, the proof."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria_papers.theory.monotone_ntk import (
    CONDITIONS,
    Ingredients,
    Radii,
    ThesisModel,
    check_condition,
    ingredients,
    search_radii,
    smallest_singular,
)

ALL = ["1", "2", "2m", "2'"]


def diagonal(scale: float, m: float) -> Ingredients:
    eye, zero = torch.eye(2), torch.zeros(2, 2)
    model = ThesisModel(A=zero, B=zero, U=scale * eye, u=zero[0], m=m)
    return ingredients(model, eye.double(), torch.tensor([0.6, 0.8], dtype=torch.float64))


def usual(seed: int) -> Ingredients:
    g = torch.Generator().manual_seed(seed)
    model = ThesisModel.usual(6, 4, generator=g)
    X = torch.randn(4, 3, dtype=torch.float64, generator=g)
    return ingredients(model, X, torch.randn(3, dtype=torch.float64, generator=g))


def test_the_repaired_condition_at_160() -> None:
    report = search_radii("2'", diagonal(160.0, 1.0))
    assert report.holds
    assert report.step is not None
    R, lam, square = report.radii, 160.0, 2.0
    u, U = R.u, 160 + R.U
    c2 = square * u * u * (1 + 4 * U * U * (R.A**2 * 129 / 128 + 1))
    assert 16 * c2 <= lam**2
    assert report.step == pytest.approx(lam**2 / (8 * (c2 + square * U * U) ** 2))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_search_solves_the_geometric_program(name: str, seed: int) -> None:
    cp: Any = pytest.importorskip("cvxpy")
    given_ = dataclasses.replace(usual(seed), misfit=0.3)
    R = {k: cp.Variable(pos=True) for k in ("A", "B", "U", "u")}
    t = cp.Variable(pos=True)
    a, U, u = given_.norm_A + R["A"], given_.norm_U + R["U"], given_.norm_u + R["u"]
    m, X, r, lam = given_.m, given_.norm_X, given_.misfit, given_.lambda0
    f = 4 if name == "1" else 8
    rows = [
        f * X * r * 2 * U * u * a / (m**2 * R["A"]) / lam**2,
        f * X * r * 2 * U * u / (m**2 * R["B"]) / lam**2,
        f * X * r * u / (m * R["U"]) / lam**2,
        f * X * r * U / (m * R["u"]) / lam**2,
    ]
    if name == "1":
        rows.append(8 * X**2 * r * u / m**2 * (4 * (U**2 * a**2 + U**2) / m**2 + 1) / lam**3)
    elif name == "2":
        rows.append(8 * X**2 * r * u * (1 + 6 * U**2 * a**2 + 4 * U**2) / lam**3)
        whole = u**2 + 4 * u**2 * U**2 * a**2 + 4 * u**2 * U**2 + U**2
        rows.append(20 * X**2 * whole / lam**2)
    else:
        rows.append(16 * X**2 * r * u * (1 / m**2 + 2 * (3 * a**2 + 2) * U**2 / m**4) / lam**3)
        if name == "2m":
            whole = u**2 / m**2 + U**2 / m**2 + 4 * u**2 * U**2 * (a**2 + 1) / m**4
            rows.append(20 * X**2 * whole / lam**2)
        else:
            inner = 1 / m**2 + 4 * U**2 * (129 / 128 * a**2 + 1) / m**4
            rows.append(16 * X**2 * u**2 * inner / lam**2)
    box = [v <= 1e6 for v in R.values()] + [v >= 1e-9 for v in R.values()]
    program = cp.Problem(cp.Minimize(t), [row <= t for row in rows] + box)
    program.solve(gp=True)
    assert search_radii(name, given_).slack == pytest.approx(1 / float(t.value), rel=2e-3)


@given(st.integers(0, 10**6), st.floats(0.01, 3.0), st.floats(-3, 4))
@settings(max_examples=20, deadline=None)
def test_condition_2_with_the_powers_of_m_is_never_met(seed: int, m: float, size: float) -> None:
    g = torch.Generator().manual_seed(seed)
    model = ThesisModel.usual(4, 3, m=m, generator=g)
    model = dataclasses.replace(model, U=10**size * model.U, u=0 * model.u)
    X = torch.randn(3, 2, dtype=torch.float64, generator=g)
    given_ = dataclasses.replace(ingredients(model, X, torch.zeros(2)), misfit=1e-12)
    tiny = Radii(A=1e-9, B=1e9, U=1e-9, u=1e-9)
    report = check_condition("2m", given_, tiny)
    row = next(i for i in report.inequalities if i.name == "(3.18) with m")
    assert 20 * given_.samples * row.slack <= 1 + 1e-9
    assert "20N ≤ 1" in report.obstruction
    assert not report.holds
    printed = check_condition("2", given_, tiny)
    assert bool(printed.obstruction) == (40 * m * m > 1)


def test_usual_initializations_satisfy_nothing() -> None:
    for name in ALL:
        report = search_radii(name, usual(3))
        assert not report.holds
        assert report.slack < 1e-3
        assert report.binding.slack == report.slack
        text = str(report)
        assert "does not hold" in text
        assert report.binding.name in text
        assert report.to_dict()["inequalities"][0]["slack"] > 0


def test_lambda0_is_zero_where_samples_outnumber_neurons() -> None:
    Z = torch.randn(2, 5, dtype=torch.float64)
    assert smallest_singular(Z) == 0.0
    assert smallest_singular(Z.T) == pytest.approx(float(torch.linalg.eigvalsh(Z @ Z.T)[0]) ** 0.5)
    g = torch.Generator().manual_seed(0)
    model = ThesisModel.usual(2, 3, generator=g)
    X = torch.randn(3, 5, dtype=torch.float64, generator=g)
    report = search_radii("1", ingredients(model, X, torch.ones(5)))
    assert report.slack == 0.0
    assert not report.holds


def test_errors_and_names() -> None:
    with pytest.raises(ValueError, match="there are '1'"):
        search_radii("3", diagonal(1.0, 1.0))
    with pytest.raises(ValueError, match="A="):
        Radii(A=0.0, B=1, U=1, u=1)
    assert list(CONDITIONS) == ALL
