"""Copies of a model with another solver or adjoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.evaluation import replaced, with_solver
from equilibria.nn.monotone import MonotoneDEQ
from equilibria.nn.multi_branch import MultiBranch
from equilibria.solvers.peaceman_rachford import PeacemanRachford
from tests.evaluation.standins import tiny_geq


def test_every_layer_of_a_copy_is_changed_and_the_model_is_not() -> None:
    branches = MultiBranch(
        [eq.nn.GEQ(2, 2, hidden=None, patch=eq.Patches(channels=1, size=2))], [4]
    )
    model = nn.ModuleList([tiny_geq(), branches])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tight = eq.Auto(rtol=1e-6)
    made = replaced(model, solver=tight, adjoint=eq.OneStep())
    layers = [made[0][1], made[1], made[1].branches[0]]
    assert all(layer.solver is tight for layer in layers)
    assert all(layer.adjoint == eq.OneStep() for layer in layers)
    assert isinstance(model[0][1].solver, eq.Picard)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_none_keeps() -> None:
    model = tiny_geq()
    assert with_solver(model, None) is model
    made = replaced(model, adjoint=eq.OneStep())
    assert isinstance(made[1].solver, eq.Picard)  # type: ignore[index]


def test_the_copy_gives_the_equilibrium() -> None:
    model = tiny_geq().double()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    made = with_solver(model, eq.Auto(rtol=1e-12, max_steps=500))
    with torch.no_grad():
        z = made[:2](x)  # type: ignore[index]
        problem = model[1].problem(model[0](x))
        torch.testing.assert_close(problem.step(z), z, rtol=0, atol=1e-10)
        assert float((model[:2](x) - z).abs().max()) > 1e-4


def test_auto_leaves_a_splitting_its_kind_and_gives_it_tolerances() -> None:
    layer = MonotoneDEQ(4)
    made = with_solver(layer, eq.Auto(rtol=1e-7, max_steps=1000))
    assert isinstance(made.solver, PeacemanRachford)
    assert made.solver.rtol == 1e-7
    assert made.solver.max_steps == 1000
    assert isinstance(with_solver(layer, eq.Anderson()).solver, eq.Anderson)


def test_wrong_objects() -> None:
    with pytest.raises(TypeError, match="solver='auto': expected a solver object"):
        replaced(tiny_geq(), solver="auto")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="adjoint="):
        replaced(tiny_geq(), adjoint=eq.Anderson())  # type: ignore[arg-type]
