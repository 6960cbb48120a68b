"""Observing a model: every solve of every layer, by name, and nothing of others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.nn import DEQ, MultiBranch, ResidualBlock, collect_penalties
from tests.nn.test_deq import TanhBlock


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
        network()(x)  # another model
    model(x)
    assert len(seen) == 4
    assert not seen.solutions["first"][0].value.requires_grad
    assert [s.value.shape[0] for s in seen.solutions["first"]] == [3, 2]
    torch.testing.assert_close(seen.solutions["first"][0].value, model.first(x))
    by_hand = model.rest[1].solve(model.rest[0](model.first(x)))
    assert torch.equal(seen.solutions["rest.1"][0].stats.steps, by_hand.stats.steps)
    seen.clear()
    assert len(seen) == 0


def test_observers_nest_and_end_with_an_error() -> None:
    model, x = network(), torch.randn(2, 4)
    with eq.nn.observe(model) as outer:
        with pytest.raises(ValueError, match="takes x"), eq.nn.observe(model) as inner:
            model(torch.randn(2, 9))
        model(x)
    assert len(outer) == 2
    assert len(inner) == 0


def test_blocks_may_end_in_any_order() -> None:
    torch.manual_seed(0)
    model, x = DEQ(TanhBlock(), start=(5,), jacobian_weight=0.5), torch.randn(2, 4)
    observer, collector = eq.nn.observe(model), collect_penalties(model)
    seen, found = observer.__enter__(), collector.__enter__()
    observer.__exit__(None, None, None)
    model(x)
    collector.__exit__(None, None, None)
    model(x)
    assert len(seen) == 0
    assert len(found) == 1


@pytest.mark.slow
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


# ---------------------------------------------------------------------- collect_penalties


class Two(nn.Module):
    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.a = DEQ(TanhBlock(), start=(5,), jacobian_weight=first)
        self.b = DEQ(TanhBlock(5), start=(5,), jacobian_weight=second)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


def test_every_layer_and_call_is_collected_by_name() -> None:
    torch.manual_seed(0)
    model, x = Two(0.5, 2.0), torch.randn(3, 4)
    with collect_penalties(model) as found:
        model(x)
        model(x)
    assert {name: len(parts) for name, parts in found.parts.items()} == {"a": 2, "b": 2}
    assert len(found) == 4
    total = found.total()
    torch.testing.assert_close(total, sum(t for group in found.parts.values() for t in group))
    total.backward()
    assert model.a.block.W.weight.grad.abs().max() > 0
    # The second layer's penalty reaches the first through its input.
    assert model.a.block.U.weight.grad.abs().max() > 0


def test_layers_without_a_weight_other_models_and_branches() -> None:
    torch.manual_seed(0)
    model, x = Two(0.5, 0.0), torch.randn(3, 4)
    with collect_penalties(model) as found:
        model(x)
        Two(1.0, 1.0)(x)
    model(x)
    assert {name: len(parts) for name, parts in found.parts.items()} == {"a": 1}
    with collect_penalties(Two(0.0, 0.0)) as none:
        pass
    assert none.total() == 0.0
    layers = [DEQ(ResidualBlock(4, groups=2), jacobian_weight=w) for w in (1.0, 0.0)]
    branches = MultiBranch(layers, (4, 2))
    with collect_penalties(branches) as found:
        branches(torch.randn(2, 4, 4, 4))
    assert list(found.parts) == ["branches.0"]
    assert float(found.total().detach()) > 0  # type: ignore[union-attr]


def test_a_bad_sample_poisons_nothing() -> None:
    torch.manual_seed(0)
    layer, x = DEQ(TanhBlock(), start=(5,), jacobian_weight=1.0), torch.randn(3, 4)
    x[1] = x[0]
    z = layer(x)
    torch.manual_seed(5)
    expected = eq.jacobian_penalty(layer.step, z, (x,))[[0, 2]].mean()
    x[1] = float("nan")
    torch.manual_seed(5)
    with pytest.warns(eq.ConvergenceWarning), collect_penalties(layer) as found:
        layer(x)
    total = found.total()
    total.backward()  # type: ignore[union-attr]
    torch.testing.assert_close(total, expected)
    for p in layer.parameters():
        assert torch.isfinite(p.grad).all()
