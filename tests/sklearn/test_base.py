"""The networks behind the estimators: seeds, layers, solvers, norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equilibria.sklearn.base import PREDICTION_SOLVER, TRAINING_SOLVER, build, training_solver
from equilibria.solvers import Picard


def made(choice: object = "geq", **options: object) -> Any:
    given = {"bound": 0.9, "solver": None, "adjoint": None, "seed": 3, **options}
    return build(choice, 5, 8, 2, **given)  # type: ignore[arg-type]


def test_the_explicit_twin_has_as_many_weights() -> None:
    def count(network: Any) -> int:
        return sum(p.numel() for p in network.parameters())

    assert count(made("explicit")) == count(made("geq")) == count(made("opteq"))


def test_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = made()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other, third = made(), made(seed=4)
    assert torch.equal(one.head.weight, other.head.weight)
    assert not torch.equal(one.head.weight, third.head.weight)


def test_the_solver_of_training_is_put_back_and_norms_are_settled() -> None:
    network = made().double()
    layer = network.layer
    with training_solver(network, None):
        assert layer.solver == TRAINING_SOLVER
        with torch.no_grad():  # a jump that no power iteration has seen
            layer.W.parametrizations.weight.original.copy_(torch.randn(8, 8).double())
        layer.eval()
        assert np.linalg.norm(layer.W.weight.detach().numpy(), 2) > 0.95
    assert layer.solver == PREDICTION_SOLVER
    assert np.linalg.norm(layer.W.weight.detach().numpy(), 2) == pytest.approx(0.9, rel=1e-4)


def test_a_given_solver_is_used_throughout() -> None:
    network = made(solver=Picard(max_steps=7))
    with training_solver(network, Picard(max_steps=7)):
        assert network.layer.solver == Picard(max_steps=7)


def test_a_layer_of_ones_own() -> None:
    network = made(lambda features, hidden: nn.Linear(features, hidden))
    assert isinstance(network.layer, nn.Linear)
    with pytest.raises(TypeError, match=r"must return an nn\.Module, got int"):
        made(lambda features, hidden: features)
