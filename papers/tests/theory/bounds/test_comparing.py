"""All calculators on a pair or a network: inputs caught, numbers gathered, errors said."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria_papers.theory.bounds import (
    Demonstration,
    LipschitzReport,
    MarginReport,
    SimilarityReport,
    compare_bounds,
    demonstration_pair,
    network_bounds,
)
from equilibria_papers.theory.bounds.comparing import layer_inputs
from papers.tests.theory.bounds.layers import drawn, geq, opteq


@pytest.fixture(scope="module")
def pair() -> tuple[Demonstration, Demonstration]:
    return demonstration_pair(width=8, epochs=1, samples=128)


def test_the_pair_is_within_the_premises(pair: tuple[Demonstration, Demonstration]) -> None:
    for one in pair:
        assert float(one.x.norm(dim=1).max()) <= 1.0 + 1e-6
        for part in (one.layer.W, one.layer.U, one.head):
            weight: torch.Tensor = part.weight  # type: ignore[assignment]
            assert float(torch.linalg.matrix_norm(weight.detach(), 2)) < 1.0
        assert one.layer.U.bias is None
    counts = [sum(p.numel() for p in one.layer.parameters()) for one in pair]
    assert counts[0] == counts[1]


def test_bad_options_of_the_pair() -> None:
    with pytest.raises(ValueError, match="width"):
        demonstration_pair(width=0)
    with pytest.raises(ValueError, match="bound"):
        demonstration_pair(bound=1.0)


def test_comparing_the_pair(pair: tuple[Demonstration, Demonstration]) -> None:
    said: list[str] = []
    found = compare_bounds(pair, images=8, pairs=2, draws=8, progress=said.append)
    assert [type(r).__name__ for r in found.reports].count("LipschitzReport") == 2
    assert [isinstance(r, MarginReport) for r in found.reports].count(True) == 2
    for r in (r for r in found.reports if isinstance(r, LipschitzReport)):
        assert r.ours is not None
        assert r.measured <= r.ours * (1 + 1e-6)
        assert r.printed is not None
        assert r.measured <= r.printed * (1 + 1e-6)
    assert any("margin" in text for text in said)
    json.dumps(found.to_dict())
    layers, rows = found.summary()
    assert layers == ["GEQ", "OptEq"]
    table = dict(rows)
    assert table["Prop 1, terms for 1e-6"][1] == "–"
    assert "heuristic" in table["Prop 2, error ≤, as printed"][0]
    assert "heuristic" not in table["Prop 2, error ≤, as printed"][1]
    assert "Proposition 4" in str(found)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = geq(drawn(0, 4, 3, 0.8), drawn(1, 4, 2, 0.8), 0.5)
        self.second = opteq(drawn(2, 3, 5, 0.7), drawn(3, 5, 3, 0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x) + 1.0)
        return made


def test_layers_are_caught_with_their_own_inputs() -> None:
    model = Two()
    x = drawn(4, 6, 2, 1.0)
    model.train()
    found = layer_inputs(model, x)
    assert list(found) == ["first", "second"]
    assert torch.equal(found["first"][1], x)
    expected = model.eval().first(x).detach() + 1.0
    torch.testing.assert_close(found["second"][1], expected, atol=1e-5, rtol=1e-5)
    model.train()
    layer_inputs(model, x)
    assert model.training  # as it was
    assert not model.first._forward_pre_hooks


def test_bounds_of_a_network() -> None:
    found = network_bounds(Two(), drawn(4, 6, 2, 1.0), pairs=2, draws=4)
    assert {r.layer for r in found.reports} == {"first", "second"}
    assert "Proposition 2" in found.notes[0]
    assert [len(r.kappa) for r in found.reports if isinstance(r, SimilarityReport)] == [2, 2]
    with pytest.raises(ValueError, match="two inputs"):
        network_bounds(Two(), drawn(4, 1, 2, 1.0))


def test_branches_are_looked_into() -> None:
    torch.manual_seed(0)
    layers = [
        eq.nn.GEQ(4, 8, in_channels=3, patch=eq.Patches(channels=4, size=2)) for _ in range(2)
    ]
    model = nn.Sequential(eq.nn.MultiBranch(layers, scales=(8, 4)))
    found = layer_inputs(model, torch.randn(2, 3, 8, 8))
    assert [tuple(x.shape) for _, x in found.values()] == [(2, 3, 8, 8), (2, 3, 4, 4)]
    assert list(found) == ["0.branches.0", "0.branches.1"]


def test_a_branch_of_a_chain_has_the_input_that_it_sees() -> None:
    """Pooled x, and the normalized state of the branch before it."""
    torch.manual_seed(0)
    layers = [eq.nn.OptEq(3, 3, in_channels=3, kernel_size=3, form="state") for _ in range(2)]
    body = eq.nn.MultiBranch(layers, scales=(8, 4), chain=True).eval()
    x = torch.randn(2, 3, 8, 8)
    (_, own), (last, given) = layer_inputs(nn.Sequential(body), x).values()
    with torch.no_grad():
        state = layers[0](x)
        expected = nn.functional.avg_pool2d(x + body.norms[0](state), 2)
    assert last is layers[1]
    assert torch.equal(own, x)
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


def test_a_network_without_such_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="it has none"):
        network_bounds(nn.Linear(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="MonotoneDEQ"):
        network_bounds(nn.Sequential(eq.nn.MonotoneDEQ(3, in_channels=2)), torch.ones(2, 2))
