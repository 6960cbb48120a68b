"""The Jacobian penalty against a dense Jacobian in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.training.module import JacobianPenalty


class Linear(eq.nn.MapLayer):
    """z = Az/2 + x: its Jacobian is A/2 everywhere."""

    def __init__(self, size: int) -> None:
        super().__init__(solver=eq.Picard(max_steps=200))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(size, size)).Q)

    def inject(self, x: Any) -> tuple[Any, ...]:
        return (x,)

    def step(self, z: Any, x: Any) -> Any:
        return 0.5 * z @ self.weight.mT + x

    def start(self, x: Any, *injected: Any) -> Any:
        return torch.zeros_like(x)


def total(penalty: JacobianPenalty, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with penalty.collect() as found:
        model(x)
    return torch.stack(found).sum()


def test_it_estimates_the_frobenius_norm_of_every_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        eq.nn.GEQ(5, 5, in_channels=3, hidden=None), nn.Linear(5, 6), Linear(6)
    ).double()
    x = torch.randn(64, 3, dtype=torch.float64)
    penalty = JacobianPenalty(model, 2.0)
    with torch.no_grad():
        z = model[0](x)
    problem = model[0].problem(x)
    dense = torch.autograd.functional.jacobian(lambda s: problem.step(s).sum(0), z)
    norms = dense.movedim(1, 0).flatten(1).square().sum(1) / 5
    expected = 2.0 * (norms.mean() + 0.25)  # ‖A/2‖²_F/n = 1/4 for an orthogonal A
    found = torch.stack([total(penalty, model, x).detach() for _ in range(30)]).mean()
    assert float(found) == pytest.approx(float(expected), rel=0.08)


def test_it_has_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Linear(6))
    total(JacobianPenalty(model, 1.0), model, torch.randn(4, 6)).backward()
    # E‖Jᵀv‖²/n falls as A shrinks.
    assert float((model[0].weight.grad * model[0].weight.detach()).sum()) > 0.0


def test_layers_with_a_weight_of_their_own_keep_it() -> None:
    class Own(Linear):
        jacobian_weight = 0.0

    model = nn.Sequential(Own(3), Own(3))
    model[1].jacobian_weight = 0.7
    penalty = JacobianPenalty(model, 0.2)
    assert (model[0].jacobian_weight, model[1].jacobian_weight) == (0.2, 0.7)
    assert penalty.active


def test_without_a_weight_nothing_is_collected() -> None:
    model = nn.Sequential(Linear(3))
    penalty = JacobianPenalty(model, 0.0)
    assert not penalty.active
    with penalty.collect() as found:
        model(torch.randn(2, 3))
    assert found == []


def test_a_model_without_equilibrium_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="there is none"):
        JacobianPenalty(nn.Linear(2, 2), 1.0)
