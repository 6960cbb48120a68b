"""nn.Envelope is 1-Lipschitz, and its branch is the gradient of the optimal value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.problems import GAUSSIAN_CONCAVITY
from tests.contracts.layer_contract import check_gradients

PRIORS = [eq.NonNegative(), eq.Free(), eq.Tanh(), eq.SoftThreshold(0.2), eq.Box(-0.5, 1.0)]
TIGHT = eq.ProximalGradient(rtol=1e-10, atol=0.0, max_steps=5000)


def dense(kind: str, bound: float, seed: int, prior: Any = PRIORS[0], gamma: float = 0.5) -> Any:
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "in_channels": 5,
        "prior": prior,
        "constraint": eq.nn.NormBounded(bound=bound),
        "solver": TIGHT,
    }
    layer: Any
    if kind == "linear":
        layer = eq.nn.OptEq(6, 7, form="hidden", **options)
    else:
        layer = eq.nn.GEQ(6, 7, hidden=7, gamma=gamma, **options)
    with torch.no_grad():
        layer.W.weight = layer.W.weight * 50.0  # onto the bound
    made = eq.nn.Envelope(layer)
    with torch.no_grad():
        layer.U.weight = layer.U.weight * 50.0
    return made.double().eval()


def convolutional(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"in_channels": 4, "kernel_size": 3, "solver": TIGHT}
    layer: Any
    if kind == "linear":
        layer = eq.nn.OptEq(4, 8, form="hidden", **options)
    else:
        layer = eq.nn.GEQ(4, 8, patch=eq.Patches(channels=4, size=2), gamma=0.7, **options)
    return eq.nn.Envelope(layer).double().eval()


def jacobian(layer: Any, x: Tensor) -> Tensor:
    """∂y/∂x of one sample, dense."""
    found: Tensor = torch.autograd.functional.jacobian(
        lambda v: layer(v.view_as(x)).flatten(), x.flatten()
    )
    return found


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")  # where z* is nearly 0
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["linear", "gaussian"]),
    st.sampled_from(range(len(PRIORS))),
    st.floats(0.1, 0.96),
    st.floats(-2.0, 2.0),
    st.integers(0, 10**6),
)
def test_no_singular_value_exceeds_one(
    kind: str, prior: int, bound: float, size: float, seed: int
) -> None:
    bound = bound if kind == "linear" else 1.5 * bound
    layer = dense(kind, bound, seed, PRIORS[prior], gamma=10.0 ** (size / 2))
    x = torch.randn(1, 5, dtype=torch.float64) * 10.0**size
    assert float(torch.linalg.svdvals(jacobian(layer, x))[0]) <= 1.0 + 1e-7
    assert 1.0 <= layer.lipschitz(x) <= 1.0 + 1e-12


@pytest.mark.parametrize("kind", ["linear", "gaussian"])
def test_a_convolutional_one_is_as_long_as_its_constant_allows(kind: str) -> None:
    layer = convolutional(kind, 0)
    x = torch.randn(1, 4, 4, 4, dtype=torch.float64)
    largest = float(torch.linalg.svdvals(jacobian(layer, x))[0])
    assert 0.9 < largest <= 1.0 + 1e-9
    assert 1.0 <= layer.lipschitz(x) <= 1.0 + 1e-12


def optimal_value(kind: str, layer: Any, problem: Any, c: Tensor) -> float:
    """φ(c): G by its formula in numpy, γ = 0.5, at its minimizer."""
    posed = problem.with_inputs(c.unsqueeze(0), *problem.inputs()[1:])
    z = eq.minimize(posed, solver=TIGHT).value[0].detach().numpy()
    w, features = layer.layer.W.weight.detach().numpy(), c.numpy()
    if kind == "linear":
        return float(0.5 * z @ z - features @ z - 0.5 * ((z @ w) ** 2).sum())
    h = (features - w @ z) @ layer.layer.W_h.weight.detach().numpy()
    return float(0.5 * z @ z - math.exp(-0.5 * h @ h))


@pytest.mark.parametrize("kind", ["linear", "gaussian"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_branch_is_the_gradient_of_the_optimal_value(kind: str, seed: int) -> None:
    """Against central differences."""
    layer = dense(kind, 0.9, seed)
    problem = layer.layer.problem(torch.randn(1, 5, dtype=torch.float64))
    ours = problem.coupling.value_gradient(eq.minimize(problem, solver=TIGHT).value)[0]
    c = problem.coupling.c[0].detach()
    for i, step in enumerate(1e-4 * torch.eye(len(c), dtype=torch.float64)):
        up, down = (optimal_value(kind, layer, problem, moved) for moved in (c + step, c - step))
        assert float(ours[i].detach()) == pytest.approx((up - down) / 2e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["linear", "gaussian"])
def test_the_curvature_of_the_optimal_value_lies_within_its_bounds(kind: str) -> None:
    lowest, highest = math.inf, -math.inf
    for seed in range(20):
        bound = 0.95 if kind == "linear" else 1.4
        layer = dense(kind, bound, seed)
        c = torch.randn(1, 7, dtype=torch.float64) * (0.3 + seed / 5)
        problem = layer.layer.problem(torch.zeros(1, 5, dtype=torch.float64))

        def gradient(c: Tensor, problem: Any = problem) -> Tensor:
            posed = problem.with_inputs(c.view(1, -1), *problem.inputs()[1:])
            z = eq.minimize(posed, solver=TIGHT).value
            return posed.coupling.value_gradient(z).flatten()

        hessian = torch.autograd.functional.jacobian(gradient, c.flatten())
        values = torch.linalg.eigvalsh(0.5 * (hessian + hessian.mT))
        bounds = problem.coupling.value_curvature()
        assert bounds.rigorous
        assert float(bounds.lower) - 1e-7 <= float(values[0])
        assert float(values[-1]) <= float(bounds.upper) + 1e-7
        lowest, highest = min(lowest, float(values[0])), max(highest, float(values[-1]))
    # The bounds are reached, or nearly so, in the direction that matters.
    assert lowest < (-2.0 if kind == "linear" else -0.3)
    assert highest > (-0.01 if kind == "linear" else 0.5)


def test_without_w_it_is_the_convex_potential_layer() -> None:
    layer = dense("linear", 0.5, 0)
    with torch.no_grad():
        layer.layer.W.weight = torch.zeros_like(layer.layer.W.weight)
    x = torch.randn(3, 5, dtype=torch.float64)
    u, b = layer.layer.U.weight, layer.layer.U.bias
    wanted = x - 2.0 * torch.relu(x @ u.mT + b) @ u
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: torch.nn.Linear(4, 4), "GEQ or an OptEq"),
        (lambda: eq.nn.GEQ(4, 4, gamma=0.5, constraint=None), "NormBounded"),
        (lambda: eq.nn.GEQ(4, 4), "depends on the input"),
        (lambda: eq.nn.OptEq(4, 4), "form='hidden'"),
        (
            lambda: eq.nn.GEQ(4, 4, gamma=0.5, constraint=eq.nn.NormBounded(bound=1.49)),
            "must be below",
        ),
    ],
)
def test_what_has_no_bound_is_refused(layer: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        eq.nn.Envelope(layer())


@pytest.mark.parametrize("kind", ["linear", "gaussian"])
@pytest.mark.parametrize("scale", [50.0, 0.5])
def test_gradients(kind: str, scale: float) -> None:
    """On the bound of ‖W‖, and inside, where the scale of the branch moves with the weight."""
    layer = dense(kind, 0.9, 3)
    with torch.no_grad():
        layer.layer.W.weight = layer.layer.W.weight * scale
    check_gradients(layer, torch.randn(4, 5, dtype=torch.float64))


def test_the_limits_of_the_gaussian_are_those_of_the_facts() -> None:
    """κ = b/(1 − b‖W‖²) and L = 1 + κ."""
    coupling = dense("gaussian", 1.0, 0).layer.problem(torch.zeros(1, 5).double()).coupling
    bounds = coupling.value_curvature(1.0)
    assert float(bounds.lower) == pytest.approx(-GAUSSIAN_CONCAVITY / (1 - GAUSSIAN_CONCAVITY))
    assert float(bounds.upper) == 1.0
