"""Curves and their pictures: scaled norms, refusals as gaps, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria_papers.theory.bounds import (
    Curves,
    Demonstration,
    draw_curves,
)
from equilibria_papers.theory.bounds.curves import (
    lipschitz_curves,
    margin_curves,
    rescaled,
    similarity_curves,
)
from equilibria_papers.theory.pictures import save_picture
from papers.tests.theory.bounds.layers import drawn, geq, opteq


def line(curves: Curves, label: str) -> tuple[float | None, ...]:
    return next(each.values for each in curves.lines if each.label == label)


def test_a_rescaled_layer() -> None:
    b = drawn(9, 4, 1, 0.3)[:, 0]
    layer = geq(drawn(0, 4, 3, 0.8), drawn(1, 4, 2, 0.7), 0.5, b)
    made = rescaled(layer, 0.3)
    weight: torch.Tensor = made.W.weight  # type: ignore[assignment]
    assert float(torch.linalg.matrix_norm(weight.detach(), 2)) == pytest.approx(0.3)
    assert torch.equal(made.U.bias, layer.U.bias)
    bounded = eq.nn.OptEq(4, 5, in_channels=3, constraint=eq.nn.NormBounded(bound=0.9))
    weight = rescaled(bounded, 0.5).W.weight  # type: ignore[assignment]
    assert float(torch.linalg.matrix_norm(weight.detach(), 2)) == pytest.approx(0.5)
    with pytest.raises(TypeError, match="dense"):
        rescaled(eq.nn.OptEq(4, 5, kernel_size=3), 0.5)
    with pytest.raises(ValueError, match="fixed γ"):
        rescaled(eq.nn.GEQ(4, 5, hidden=None), 0.5)


def test_lipschitz_over_the_norm() -> None:
    layers = [
        geq(drawn(0, 3, 3, 1), drawn(1, 3, 2, 0.8), 0.05),
        opteq(drawn(2, 3, 3, 1), drawn(3, 3, 2, 0.8)),
    ]
    curves = lipschitz_curves(layers, drawn(4, 4, 2, 1.0), norms=(0.8, 1.2))
    measured, ours = line(curves, "GEQ, measured"), line(curves, "GEQ, ours, Λ(μ)")
    for a, b in zip(measured, ours, strict=True):
        assert a is not None
        assert b is not None
        assert a <= b * (1 + 1e-6)
    assert line(curves, "GEQ, Eq 11")[1] is None  # μ ≥ 1
    assert line(curves, "OptEq, measured")[1] is None
    assert json.loads(json.dumps(curves.to_dict()))["lines"][0]["layer"] == "GEQ"


def test_similarity_over_the_angle() -> None:
    curves = similarity_curves(torch.full((6, 6), 0.15), angles=4, draws=64)
    assert curves.x == pytest.approx((0, 1 / 3, 2 / 3, 1))
    assert line(curves, "OptEq, Eq 15")[3] == 0.0
    kappa = line(curves, "OptEq, measured κ")[3]
    assert kappa is not None
    assert kappa > 0.0
    for family in ("GEQ", "OptEq"):
        for a, b in zip(
            line(curves, f"{family}, measured κ"), line(curves, f"{family}, ours"), strict=True
        ):
            assert a is not None
            assert b is not None
            assert a <= b


def test_margins_over_the_norm(tmp_path: Path) -> None:
    head = nn.Linear(3, 2).double()
    with torch.no_grad():
        head.weight.copy_(drawn(7, 2, 3, 0.5))
    layers = [
        geq(drawn(0, 3, 3, 0.6), drawn(1, 3, 2, 0.5), 0.5),
        opteq(drawn(2, 3, 3, 0.6), drawn(3, 3, 2, 0.5)),
    ]
    data = Demonstration(layers[0], head, drawn(4, 6, 2, 1.0), torch.arange(6) % 2)
    curves = margin_curves(
        "‖W‖₂", (0.2, 0.9), lambda mu: [(rescaled(layer, mu), head) for layer in layers], data
    )
    assert len(curves.lines) == 6
    assert all(v is not None for each in curves.lines for v in each.values)
    low, high = line(curves, "OptEq, derived")
    assert low is not None
    assert high is not None
    assert low < high
    written = save_picture(draw_curves([curves, curves]), tmp_path / "margin")
    assert [p.name for p in written] == ["margin.png", "margin.svg"]
    assert "excess" in (tmp_path / "margin.svg").read_text()
