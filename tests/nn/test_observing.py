"""Observing a model: every solve of every layer, by name, and nothing of others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = eq.nn.OptEq(4, 3, in_channels=4)
        self.rest = nn.Sequential(nn.Linear(4, 5), eq.nn.GEQ(5, 6, in_channels=5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rest(self.first(x))
        return out


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def test_every_layer_is_found_by_its_name() -> None:
    model = network()
    found = eq.nn.equilibrium_layers(model)
    assert list(found) == ["first", "rest.1"]
    assert found["rest.1"] is model.rest[1]
    assert list(eq.nn.equilibrium_layers(model.first)) == [""]
    assert eq.nn.equilibrium_layers(nn.Linear(2, 2)) == {}


def test_solutions_are_those_of_the_layers() -> None:
    model, x = network().eval(), torch.randn(3, 4)
    with eq.nn.observe(model) as seen:
        model(x)
        model(x[:2])
    assert len(seen) == 4
    assert [s.value.shape[0] for s in seen.solutions["first"]] == [3, 2]
    torch.testing.assert_close(seen.solutions["first"][0].value, model.first(x))
    by_hand = model.rest[1].solve(model.rest[0](model.first(x)))
    assert torch.equal(seen.solutions["rest.1"][0].stats.steps, by_hand.stats.steps)
    seen.clear()
    assert len(seen) == 0


def test_nothing_is_seen_outside_the_block_or_of_other_models() -> None:
    model, other, x = network(), network(), torch.randn(2, 4)
    with eq.nn.observe(model) as seen:
        other(x)
    model(x)
    assert len(seen) == 0


def test_observers_nest_and_end_with_an_error() -> None:
    model, x = network(), torch.randn(2, 4)
    with eq.nn.observe(model) as outer:
        with pytest.raises(ValueError, match="takes x"), eq.nn.observe(model) as inner:
            model(torch.randn(2, 9))
        model(x)
    assert len(outer) == 2
    assert len(inner) == 0


def test_what_is_seen_has_no_graph_and_the_model_still_trains() -> None:
    model, x = network(), torch.randn(2, 4)
    with eq.nn.observe(model) as seen:
        out = model(x)
    assert not seen.solutions["first"][0].value.requires_grad
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_compiled_model_runs_under_an_observer() -> None:
    torch._dynamo.reset()
    laps = eq.Picard(rtol=0.0, atol=0.0, max_steps=2)
    layer = eq.nn.OptEq(4, 3, in_channels=4, solver=laps, adjoint=eq.Phantom(steps=1)).eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4)
    with eq.nn.observe(layer) as seen:
        out = compiled(x)
    assert len(seen) == 0
    torch.testing.assert_close(out, layer(x))
