"""EquilibriumLayer: write down a problem, get a layer."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.nn.layer import WeightedLayer
from tests.contracts.layer_contract import EXACT, TIGHT
from tests.nn.checks import check_gradients
from tests.problems.test_operators import randn


def gaussian(x: Tensor, W: nn.Linear, U: nn.Linear) -> eq.Problem:
    return eq.Problem(eq.NonNegative(), eq.Gaussian(W, U(x), gamma=0.5))


def made(**options: Any) -> eq.nn.EquilibriumLayer:
    torch.manual_seed(0)
    W, U = nn.Linear(3, 5, bias=False), nn.Linear(4, 5)
    W.weight.data.mul_(0.5)
    return eq.nn.EquilibriumLayer(gaussian, W=W, U=U, **options).double()


def test_an_l1_norm_in_the_problem() -> None:
    """z = relu(−∇q(z) − λ) at the answer, written out."""
    torch.manual_seed(0)
    layer = eq.nn.EquilibriumLayer(
        lambda x, W, U: eq.Problem(eq.NonNegative(), eq.Gaussian(W, U(x), gamma=0.5), eq.L1(0.01)),
        W=nn.Linear(8, 16, bias=False),
        U=nn.Linear(4, 16),
    ).double()
    x = 0.5 * randn(5, 4)
    layer.W.weight.data.mul_(0.5)
    assert {name for name, _ in layer.named_parameters()} == {"W.weight", "U.weight", "U.bias"}
    z = layer.solve(x, solver=TIGHT).value
    r = layer.U(x) - layer.W(z)
    message = torch.exp(-0.5 * r.square().sum(1, keepdim=True)) * (r @ layer.W.weight)
    assert 0 < int((z > 0).sum()) < z.numel()
    torch.testing.assert_close(z, torch.relu(message - 0.01), rtol=0, atol=1e-10)


def test_a_parameter_as_a_part() -> None:
    weight = nn.Parameter(0.1 * torch.randn(5, 4))
    layer = eq.nn.EquilibriumLayer(
        lambda x, W: eq.Problem(eq.NonNegative(), eq.Linear(W, x)), W=weight
    )
    x = torch.randn(3, 4)
    expected = torch.relu(layer(x) @ weight.mT @ weight + x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=1e-3)
    layer(x).sum().backward()
    assert layer.W.grad is not None


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


def test_gradients() -> None:
    layer = made(solver=TIGHT, adjoint=EXACT)
    check_gradients(layer, randn(2, 4), atol=1e-6)
    check_gradients(layer, randn(1, 4), second=True)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: eq.nn.EquilibriumLayer()(torch.zeros(1, 2)), TypeError, "has no problem"),
        (
            lambda: eq.nn.EquilibriumLayer(lambda x: x)(torch.zeros(1, 2)),
            TypeError,
            "must return a Problem, got Tensor",
        ),
        (
            lambda: eq.nn.EquilibriumLayer(gaussian, W=torch.zeros(2, 2)),
            TypeError,
            "W=.*nn.Module or nn.Parameter, got Tensor",
        ),
        (lambda: eq.nn.EquilibriumLayer(gaussian, "anderson"), TypeError, "solver must be"),
        (lambda: eq.nn.EquilibriumLayer(gaussian, None, "implicit"), TypeError, "adjoint must be"),
        (
            lambda: capturing(nn.Linear(2, 2, bias=False)),
            ValueError,
            "problem_fn captures 'weight'",
        ),
    ],
)
def test_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def capturing(weight: nn.Linear) -> eq.nn.EquilibriumLayer:
    return eq.nn.EquilibriumLayer(lambda x: eq.Problem(eq.NonNegative(), eq.Linear(weight, x)))


# ---------------------------------------------------------------------- what all layers share


@pytest.mark.parametrize("kind", [eq.nn.GEQ, eq.nn.KerDEQ, eq.nn.OptEq, eq.nn.PolynomialEq])
def test_shared_options_are_written_once(kind: type[WeightedLayer]) -> None:
    known = set(inspect.signature(WeightedLayer.__init__).parameters)
    shared = known - {"self", "channels", "mid", "features"}
    assert shared == set(get_type_hints(eq.nn.LayerOptions))
    assert not shared & set(inspect.signature(kind.__init__).parameters)
    with pytest.raises(TypeError, match="kernal_size"):
        kind(4, 4, kernal_size=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "layer",
    [
        eq.nn.DeepOptEq(4, (4,), kernel_size=3),
        eq.nn.MonotoneDEQ(4, kernel_size=3),
        eq.nn.OptEq(4, 4, kernel_size=3),
        eq.nn.GEQ(4, 4, patch=eq.Patches(channels=2, size=2)),
        eq.nn.MDEQ((4, 4), groups=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize(
    ("shape", "text"), [((0, 4, 4, 4), "batch size zero"), ((2, 4, 0, 4), "no pixels")]
)
def test_there_is_nothing_to_solve(layer: nn.Module, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=rf"{type(layer).__name__} got x .* with {text}"):
        layer(torch.zeros(shape))
