"""OneStep: the contract, and its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from tests.contracts.adjoint_contract import (
    FORWARD,
    TANH,
    AdjointContract,
    assert_close,
    dense_of,
    loss_of,
    weights_of_loss,
)


class TestOneStep(AdjointContract):
    def make_adjoint(self) -> Any:
        return eq.OneStep()

    def propagator(self, jacobian: Tensor) -> Tensor:
        return torch.eye(len(jacobian), dtype=jacobian.dtype)


def test_gradient_is_that_of_one_application_at_the_solution() -> None:
    """∂L/∂W = (D g)ᵀz* and ∂L/∂x = D g with D = 1 − z*² for tanh(zWᵀ + x)."""
    weight, x = TANH.leaves()
    value = eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=FORWARD, adjoint=eq.OneStep())
    found = torch.autograd.grad(loss_of(value.value), (weight, x))
    z = dense_of("tanh").z.view(3, 4)
    pulled = (1 - z * z) * (weights_of_loss(z) + z.reshape(-1)).view(3, 4)
    assert_close(found, [pulled.T @ z, pulled])


def test_it_takes_no_options() -> None:
    with pytest.raises(TypeError, match="no options"):
        eq.OneStep(steps=2)
