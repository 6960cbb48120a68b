"""The input of a layer inside a network, and weights at other scales."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria_papers.theory.trajectories import at_scale, clipped_stds, layer_input


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        eq.nn.DEQ(eq.nn.ResidualBlock(8, 16, groups=4)),
        eq.nn.DEQ(eq.nn.ResidualBlock(8, 8, groups=4)),
        nn.Flatten(),
    )


def test_the_input_is_what_comes_out_of_the_parts_before() -> None:
    model, x = network(), torch.randn(3, 1, 6, 6)
    model.train()
    state = copy.deepcopy(model.state_dict())
    layer, given = layer_input(model, x)
    assert layer is model[2]
    frozen = copy.deepcopy(model).eval()
    with torch.no_grad():
        torch.testing.assert_close(given, frozen[:2](x))
    second, given = layer_input(model, x, "3")
    assert second is model[3]
    with torch.no_grad():
        torch.testing.assert_close(given, frozen[:3](x))
    assert all(m.training for m in (model, model[1]))
    assert not model[2]._forward_pre_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_layer_is_its_own_network() -> None:
    layer, x = network()[2], torch.randn(2, 8, 4, 4)
    assert layer_input(layer, x) == (layer, x)


def test_errors_of_layer_input() -> None:
    with pytest.raises(ValueError, match="no equilibrium layer"):
        layer_input(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="'2', '3'"):
        layer_input(network(), torch.zeros(1, 1, 4, 4), "layer")


@pytest.mark.parametrize("std", [1.0, 0.01])
def test_kernels_inside_the_layer_have_the_scale(std: float) -> None:
    model = network()
    made = at_scale(model, std, seed=3)
    kernels = torch.cat([model.flatten() for model in _kernels(made)])
    assert abs(float(kernels.std()) / std - 1) < 0.05
    assert abs(float(kernels.mean())) < 0.1 * std
    assert torch.equal(made[0].weight, model[0].weight)
    assert torch.equal(made[2].block.norm1.weight, model[2].block.norm1.weight)
    again = at_scale(model, std, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(_kernels(made), _kernels(again), strict=True))
    other = at_scale(model, std, seed=4)
    assert not torch.equal(_kernels(made)[0], _kernels(other)[0])


def _kernels(model: nn.Module) -> list[torch.Tensor]:
    layers = [m for m in model.modules() if isinstance(m, eq.nn.ResidualBlock)]
    return [conv.weight.detach() for m in layers for conv in (m.conv1, m.conv2)]


def test_a_bounded_layer_clips_and_says_to_what() -> None:
    torch.manual_seed(0)
    layer = eq.nn.OptEq(32, 32, constraint=eq.nn.NormBounded(bound=0.9)).eval()
    with pytest.warns(UserWarning, match=r"std=1 was asked for.*W\.weight 0\.0"):
        made = at_scale(layer, 1.0, seed=2)
    weight = made.W.weight.detach().double().numpy()  # type: ignore[union-attr, operator]
    # The weight that acts is a draw of N(0, 1), scaled onto the bound: its norm is 0.9 exactly.
    assert np.linalg.norm(weight, 2) == pytest.approx(0.9, rel=1e-3)
    held = clipped_stds(made, 1.0)
    assert held["W.weight"] == pytest.approx(weight.std(), rel=0.05)
    assert held["W.weight"] < 0.1
    # Inside the bound nothing is clipped, and nothing is said.
    small = at_scale(layer, 0.01, seed=2)
    assert clipped_stds(small, 0.01) == {}
    inside = small.W.weight.detach()  # type: ignore[union-attr, operator]
    assert float(inside.std()) == pytest.approx(0.01, rel=0.1)
    ratio = inside.double().numpy() / weight
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-4)


def test_row_norms_keep_the_scale() -> None:
    torch.manual_seed(0)
    layer = eq.nn.OptEq(32, 32, constraint=eq.nn.WeightNormalized())
    made = at_scale(layer, 1.0)
    drawn: torch.Tensor = made.W.weight  # type: ignore[union-attr, assignment]
    assert float(drawn.detach().std()) == pytest.approx(1.0, rel=0.1)
    assert clipped_stds(made, 1.0) == {}


def test_errors_of_at_scale() -> None:
    for std in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="std"):
            at_scale(network(), std)
    with pytest.raises(ValueError, match="no equilibrium layer"):
        at_scale(nn.Linear(2, 2), 1.0)
