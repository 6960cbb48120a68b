"""Closed-form training curves against an ODE solver and step by step; real runs beside them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch import Tensor, nn

import equilibria as eq
from equilibria_papers.theory import compare_training, linear_gradient_descent, linear_gradient_flow


def problem(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, n, generator=generator, dtype=torch.float64)
    start, targets = torch.randn(2, n, generator=generator, dtype=torch.float64)
    return rows @ rows.mT / n, start, targets


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 6), st.integers(0, 99), st.floats(0.1, 2.0))
def test_gradient_flow_is_the_solution_of_its_equation(n: int, seed: int, scale: float) -> None:
    kernel, start, targets = problem(n, seed)
    times = [0.0, 0.3, 1.0, 4.0]
    found = linear_gradient_flow(kernel, start, targets, times, scale=scale)
    k, y = kernel.numpy(), targets.numpy()
    exact = {"t_eval": times, "rtol": 1e-9, "atol": 1e-11}
    solved = solve_ivp(lambda _, f: -scale * k @ (f - y), (0, 4), start.numpy(), **exact)
    np.testing.assert_allclose(found.outputs.numpy(), solved.y.T, atol=1e-6)
    losses = 0.5 * scale * ((solved.y.T - y) ** 2).sum(1)
    np.testing.assert_allclose(found.losses.numpy(), losses, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(0, 99), st.floats(0.01, 1.5))
def test_gradient_descent_is_its_own_iteration(n: int, seed: int, lr: float) -> None:
    """Also where a factor 1 − ηλ is negative."""
    kernel, start, targets = problem(n, seed)
    found = linear_gradient_descent(kernel, start, targets, lr, 7, scale=0.5)
    f = start.clone()
    for t in range(8):
        torch.testing.assert_close(found.outputs[t], f, rtol=1e-8, atol=1e-8)
        f = f - lr * 0.5 * kernel @ (f - targets)
    some = linear_gradient_descent(kernel, start, targets, lr, [3, 7], scale=0.5)
    torch.testing.assert_close(some.losses, found.losses[[3, 7]])


def digits(count: int) -> tuple[Tensor, Tensor]:
    data = eq.data.load("digits", "train", progress=False)
    x = data.normalize(data.images[:count]).double()  # type: ignore[arg-type]
    return x.flatten(1), nn.functional.one_hot(data.targets[:count], 10).double()  # type: ignore[arg-type]


def test_a_linear_model_follows_its_kernel_exactly() -> None:
    x, y = digits(12)
    model = nn.Linear(64, 10).double()
    before = model.weight.clone()
    found = compare_training(model, x, y, steps=30, record=7)
    assert found.steps.tolist() == [0, 7, 14, 21, 28, 30]
    assert float(found.gap.max()) < 1e-10
    assert float(found.outputs_gap.max()) < 1e-10
    assert found.drift < 1e-12
    assert found.actual[-1] < found.actual[0]
    assert torch.equal(model.weight, before)
    assert found.lr == pytest.approx(0.1 * found.largest_lr)


@pytest.mark.parametrize("kind", ["opteq", "monotone"])
def test_equilibrium_networks_follow_their_kernel_at_first(kind: str) -> None:
    x, y = digits(16)
    torch.manual_seed(0)
    layer: nn.Module = eq.nn.OptEq(96, 128, in_channels=64)
    if kind == "monotone":
        layer = eq.nn.MonotoneDEQ(96, in_channels=64)
    model = nn.Sequential(layer, nn.Linear(96, 10)).double()
    found = compare_training(model, x, y, steps=20, record=5)
    assert not found.diverged
    assert found.actual[-1] < 0.9 * found.actual[0]
    assert float(found.gap[1:].max()) < 0.1
    assert float(found.gap[1]) < float(found.gap.max()) + 1e-12
    assert 0 < found.drift < 1


def test_a_run_that_diverges_ends_there_and_says_so() -> None:
    x, y = digits(8)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    found = compare_training(model, x, y, steps=400, lr=10.0)
    assert found.diverged
    assert math.isnan(found.drift)
    assert bool(torch.isfinite(found.actual).all())
    assert len(found.steps) == len(found.predicted) == len(found.actual) < 401


def test_what_does_not_fit_is_refused() -> None:
    kernel, start, targets = problem(3, 0)
    with pytest.raises(ValueError, match="do not fit"):
        linear_gradient_flow(kernel, start[:2], targets[:2], [1.0])
    with pytest.raises(ValueError, match="0 or more"):
        linear_gradient_flow(kernel, start, targets, [-1.0])
    with pytest.raises(ValueError, match="positive"):
        linear_gradient_descent(kernel, start, targets, 0.0, 3)
    with pytest.raises(ValueError, match="numbers of steps"):
        linear_gradient_descent(kernel, start, targets, 0.1, [])
    x, y = digits(4)
    with pytest.raises(ValueError, match="targets have the shape"):
        compare_training(nn.Linear(64, 10).double(), x, y[:, :3])
    with pytest.raises(ValueError, match="1 or more"):
        compare_training(nn.Linear(64, 10).double(), x, y, steps=0)
