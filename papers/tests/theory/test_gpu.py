"""On a GPU the theory gives the numbers of the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria_papers.theory import empirical_ntk
from equilibria_papers.theory.bounds import lipschitz_report
from equilibria_papers.theory.landscapes import Grid, measure_landscape
from equilibria_papers.theory.trajectories import record_path

pytestmark = pytest.mark.gpu


def network() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    solver = eq.Anderson(rtol=1e-12, max_steps=400)
    layer = eq.nn.OptEq(6, 8, in_channels=4, solver=solver)
    return nn.Sequential(layer, nn.Linear(6, 3)).double().eval(), torch.randn(5, 4).double()


def on_gpu(model: nn.Module) -> Any:
    return copy.deepcopy(model).cuda()


@pytest.mark.parametrize("method", ["vmap", "autograd"])
def test_tangent_kernel(method: Any) -> None:
    model, x = network()
    wanted = empirical_ntk(model, x, method=method).matrix
    found = empirical_ntk(on_gpu(model), x.cuda(), method=method).matrix
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-8, atol=1e-9)


def test_landscape() -> None:
    model, x = network()
    y, grid = torch.arange(5) % 3, Grid(points=3, radius=0.02)
    wanted = measure_landscape(model, (x, y), grid=grid)
    found = measure_landscape(on_gpu(model), (x.cuda(), y.cuda()), grid=grid)
    torch.testing.assert_close(found.loss.cpu(), wanted.loss, rtol=1e-8, atol=1e-9)


def test_path_of_a_solver() -> None:
    model, x = network()
    solver = eq.Picard(max_steps=6)
    wanted = record_path(model[0], x, solver=solver)
    found = record_path(on_gpu(model[0]), x.cuda(), solver=solver)
    for mine, other in ((found.states, wanted.states), (found.residual, wanted.residual)):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-9, atol=1e-12)


def test_lipschitz_report() -> None:
    torch.manual_seed(0)
    layer, x = eq.nn.GEQ(6, 7, in_channels=4, gamma=0.3).double(), torch.randn(5, 4).double()
    wanted, found = lipschitz_report(layer, x), lipschitz_report(on_gpu(layer), x.cuda())
    for name in ("measured", "pairs"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6), name
