"""Steps of a network's layers: how many, and the length that changes the answer least."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.nn import calibrate_steps, set_steps


def fixed(steps: int, tau: float | None = None) -> eq.ProximalGradient:
    return eq.ProximalGradient(rtol=0.0, atol=0.0, max_steps=steps, accelerate=False, tau=tau)


def network(seed: int = 0, **options: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    made = {"constraint": eq.nn.NormBounded(bound=0.9), "solver": fixed(4), **options}
    layers = [eq.nn.OptEq(6, 8, in_channels=5, **made), eq.nn.OptEq(6, 8, **made)]
    return nn.Sequential(*layers, nn.Linear(6, 3)).eval()


def test_set_steps_sets_the_count_and_nothing_else() -> None:
    model, x = network(), torch.randn(4, 5)
    before = model(x)
    assert set_steps(model, 2) is model
    assert [model[i].solver for i in (0, 1)] == [fixed(2)] * 2
    assert not torch.equal(model(x), before)
    assert torch.equal(set_steps(model, 4)(x), before)
    wrapped = network(solver=eq.BestIterate(fixed(4)))
    assert set_steps(wrapped, 2)[0].solver == eq.BestIterate(fixed(2))


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_set_steps_refuses_other_numbers(steps: Any) -> None:
    with pytest.raises(ValueError, match="expected an integer of at least 1"):
        set_steps(network(), steps)


def test_set_steps_names_the_layer_that_has_no_steps_and_changes_none() -> None:
    model = network()
    model[1].solver = eq.Anderson()
    with pytest.raises(ValueError, match=r"layer 1 stops by a tolerance"):
        set_steps(model, 2)
    assert model[0].solver == fixed(4)
    with pytest.raises(ValueError, match="no equilibrium layers"):
        set_steps(nn.Linear(2, 2), 2)


def by_hand(model: nn.Sequential, x: Tensor, tau: float, steps: int) -> Tensor:
    """The logits by steps written out in float64: z ← z − τ(z − Wᵀσ(Wz + c))."""
    value = x.double()
    for layer in list(model)[:2]:
        assert isinstance(layer, eq.nn.OptEq)
        w = layer.W.weight.double()
        c = value @ layer.U.weight.double().T + layer.U.bias.double()
        value = torch.zeros(len(c), w.shape[1], dtype=torch.float64)
        for _ in range(steps):
            value = value - tau * (value - (value @ w.T + c).relu() @ w)
    head = model[2]
    assert isinstance(head, nn.Linear)
    return value @ head.weight.double().T + head.bias.double()


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_the_chosen_step_changes_the_answer_least(seed: int) -> None:
    model, x = network(seed, solver=fixed(6, 0.9)), torch.randn(32, 5)
    weights = copy.deepcopy(model.state_dict())
    goal = by_hand(model, x, 0.9, 6)
    taus = [0.5 + 0.1 * i for i in range(16)]
    same, tau = calibrate_steps(model, x, 2, taus=taus)
    assert same is model
    assert [model[i].solver for i in (0, 1)] == [fixed(2, tau)] * 2
    assert all(torch.equal(t, weights[k]) for k, t in model.state_dict().items())
    off = [(by_hand(model, x, t, 2) - goal).norm(dim=1) / goal.norm(dim=1) for t in taus]
    means = [float(t.mean()) for t in off]
    assert means[taus.index(tau)] <= min(means) * (1 + 1e-4)


def test_a_calibrated_patch_network_is_nearer() -> None:
    torch.manual_seed(0)
    small: Any = {"widths": (16, 16), "depth": 1, "hidden": 8}
    model = eq.models.create("geq_stack_cifar_3m", 4, in_channels=1, image_size=8, **small).eval()
    x = torch.randn(16, 1, 8, 8)
    with torch.no_grad():
        goal = model(x)
        plain = set_steps(copy.deepcopy(model), 2)(x)
        calibrated = calibrate_steps(copy.deepcopy(model), x, 2)[0](x)
    assert (calibrated - goal).norm() < 0.5 * (plain - goal).norm()


def test_layers_without_a_step_are_refused() -> None:
    model = network(solver=eq.Anderson(rtol=0.0, atol=0.0, max_steps=4))
    with pytest.raises(ValueError, match="OptEq with Anderson"):
        calibrate_steps(model, torch.randn(2, 5), 2)


class WithSkip(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x), x], 1)


def test_calibration_passes_over_inputs_that_are_not_numbers() -> None:
    solver = eq.ProximalGradient(rtol=0.0, atol=0.0, max_steps=20, accelerate=False)
    model = WithSkip(eq.nn.GEQ(6, 8, in_channels=5, hidden=4, gamma=0.1, solver=solver))
    x = torch.randn(4, 5)
    right = calibrate_steps(copy.deepcopy(model), x[:3], 1, taus=(0.1, 1.0))[1]
    assert right == 1.0
    x[3, 0] = float("nan")
    assert calibrate_steps(copy.deepcopy(model), x, 1, taus=(0.1, 1.0))[1] == right
    for given, taus in ((x[3:], (0.1, 1.0)), (x, ())):
        with pytest.raises(ValueError, match="at least one τ"):
            calibrate_steps(model, given, 1, taus=taus)
