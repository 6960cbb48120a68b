"""EquilibriumLayer: write down a problem, get a layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.nn import EquilibriumLayer
from equilibria.problems import (
    L1,
    ConvOperator,
    Gaussian,
    HiddenProblem,
    Linear,
    NonNegative,
    Polynomial,
    Problem,
    SquaredNorm,
)
from tests.contracts.layer_contract import EXACT, TIGHT
from tests.problems.test_operators import randn


def gaussian(x: Tensor, W: nn.Linear, U: nn.Linear) -> Problem:
    return Problem(NonNegative(), Gaussian(W, U(x), gamma=0.5))


def made(**options: Any) -> EquilibriumLayer:
    torch.manual_seed(0)
    W, U = nn.Linear(3, 5, bias=False), nn.Linear(4, 5)
    W.weight.data.mul_(0.5)
    return EquilibriumLayer(gaussian, W=W, U=U, **options).double()


def test_the_five_lines_of_the_issue() -> None:
    layer = EquilibriumLayer(
        lambda x, W, U: Problem(NonNegative(), Gaussian(W, U(x), gamma=0.5), L1(0.1)),
        W=nn.Linear(8, 16, bias=False),
        U=nn.Linear(4, 16),
    )
    x = torch.randn(5, 4)
    z = layer(x)
    z.square().sum().backward()
    assert z.shape == (5, 8)
    assert {name for name, _ in layer.named_parameters()} == {"W.weight", "U.weight", "U.bias"}
    assert all(p.grad is not None for p in layer.parameters())


def test_gradients() -> None:
    layer = made(solver=TIGHT, adjoint=EXACT)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = [randn(2, 4), *(p.detach().clone() for p in values)]
    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in inputs], atol=1e-6)


def test_second_derivatives() -> None:
    layer = made(solver=TIGHT, adjoint=EXACT)
    assert torch.autograd.gradgradcheck(layer, (randn(1, 4).requires_grad_(),), atol=1e-6)


def test_a_parameter_as_a_part() -> None:
    weight = nn.Parameter(0.1 * torch.randn(5, 4))
    layer = EquilibriumLayer(lambda x, W: Problem(NonNegative(), Linear(W, x)), W=weight)
    x = torch.randn(3, 4)
    expected = torch.relu(layer(x) @ weight.mT @ weight + x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=1e-3)
    layer(x).sum().backward()
    assert layer.W.grad is not None


def test_copy_and_state_dict() -> None:
    layer, x = made().eval(), randn(2, 4)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    torch.nn.init.zeros_(twin.W.weight)
    assert not torch.equal(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))


def test_solve_tells_all_and_takes_options() -> None:
    layer, x = made(), randn(3, 4)
    solution = layer.solve(x)
    assert solution.choice.startswith(("Picard", "Anderson"))
    assert solution.converged.all()
    other = layer.solve(x, solver=eq.Picard(rtol=1e-10, max_steps=500), throw=True)
    assert "Picard" in other.choice
    seen: list[int] = []
    layer.solve(x, callback=lambda step, z, residual: seen.append(step))
    assert seen[0] == 1
    warm = layer(x, other.value.detach())
    torch.testing.assert_close(warm, other.value, rtol=1e-6, atol=1e-8)


def test_a_start_away_from_zero() -> None:
    layer = EquilibriumLayer(
        lambda x, W: Problem(NonNegative(), Polynomial(W, 0.1 * x, offset=0.0)),
        W=nn.Parameter(0.1 * torch.randn(2, 4)),
    )
    with pytest.warns(UserWarning, match="degenerate"):
        problem = layer.problem(torch.randn(3, 4))
    assert (layer.start(problem, torch.randn(3, 4)) != 0).any()


def test_a_subclass_writes_its_problem() -> None:
    class Denoiser(EquilibriumLayer):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(0.05 * torch.randn(2, 1, 3, 3))

        def problem(self, x: Tensor) -> HiddenProblem:
            return Problem(NonNegative(), Linear(ConvOperator(self.kernel), x), SquaredNorm(0.5))

    layer = Denoiser()
    z = layer(torch.rand(2, 1, 5, 5))
    z.sum().backward()
    assert z.shape == (2, 1, 5, 5)
    assert layer.kernel.grad is not None


def test_transformed_problems() -> None:
    torch.manual_seed(0)
    parts = {"W": nn.Parameter(0.1 * torch.randn(5, 4))}
    plain = EquilibriumLayer(lambda x, W: Problem(NonNegative(), Linear(W, x)), **parts)
    skip = EquilibriumLayer(lambda x, W: Problem(NonNegative(), Linear(W, x)).moreau(0.5), **parts)
    x = torch.randn(3, 4)
    torch.testing.assert_close(skip(x), plain(x), rtol=1e-2, atol=1e-3)


def test_errors() -> None:
    with pytest.raises(TypeError, match="has no problem"):
        EquilibriumLayer()(torch.zeros(1, 2))
    with pytest.raises(TypeError, match="must return a Problem, got Tensor"):
        EquilibriumLayer(lambda x: x)(torch.zeros(1, 2))
    with pytest.raises(TypeError, match=r"W=.*nn.Module or nn.Parameter, got Tensor"):
        EquilibriumLayer(gaussian, W=torch.zeros(2, 2))
    with pytest.raises(TypeError, match="solver must be"):
        EquilibriumLayer(gaussian, "anderson")
    with pytest.raises(TypeError, match="adjoint must be"):
        EquilibriumLayer(gaussian, None, "implicit")
    weight = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="problem_fn captures 'weight'"):
        EquilibriumLayer(lambda x: Problem(NonNegative(), Linear(weight, x)))


def test_a_bad_sample_harms_no_weight_of_a_problem_function() -> None:
    torch.manual_seed(0)
    layer = EquilibriumLayer(
        lambda x, W, U: Problem(NonNegative(), Gaussian(W, U(x), gamma=0.5)),
        W=nn.Linear(4, 5, bias=False),
        U=nn.Linear(3, 5),
    ).double()
    x = torch.randn(3, 3, dtype=torch.float64)
    wanted = torch.autograd.grad(layer(x[[0, 2]]).sum(), list(layer.parameters()))
    x[1, 0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning):
        solution = layer.solve(x)
    found = torch.autograd.grad(solution.value[[0, 2]].sum(), list(layer.parameters()))
    assert solution.result[1] == eq.Result.nonfinite
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
