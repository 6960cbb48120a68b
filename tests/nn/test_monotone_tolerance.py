"""A tolerance means ‖T(z) − z‖ ≤ rtol‖T(z)‖ of the layer's own map, whatever is iterated."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from tests.contracts.problems import quietly
from tests.nn.test_monotone import RELU, array, matrix_u, matrix_w, newton

Array = np.ndarray[Any, np.dtype[np.float64]]
SOLVERS = [
    eq.PeacemanRachford(),
    eq.PeacemanRachford(alpha=0.02, max_steps=20000, patience=10000),
    eq.PeacemanRachford(alpha=5.0, max_steps=20000, patience=10000),
    eq.ForwardBackward(max_steps=50000, patience=20000),
    eq.ForwardBackward(alpha=1e-3, max_steps=50000, patience=20000),
    eq.Anderson(max_steps=400),
]


def dense(layer: eq.nn.MonotoneDEQ, x: Tensor) -> tuple[Array, Array]:
    """W and c in float64 numpy, on the layer's numbers."""
    return matrix_w(layer, x), array(x) @ matrix_u(layer, x).T + array(layer.U.bias)


def relative(w: Array, c: Array, z: Tensor) -> Array:
    value = z.detach().double().numpy()
    image = np.maximum(value @ w.T + c, 0)
    size = np.linalg.norm(image, axis=1)
    return np.linalg.norm(image - value, axis=1) / np.where(size > 0, size, 1.0)


def made(seed: int, n: int = 8, *, m: float = 0.1, a: float = 1.0, b: float = 1.0) -> Any:
    torch.manual_seed(seed)
    layer = eq.nn.MonotoneDEQ(n, m=m)
    with torch.no_grad():
        layer.W.A.mul_(a)
        layer.W.B.mul_(b)
    return layer


def test_one_large_negative_input_does_not_hide_the_rest() -> None:
    """u holds −1e4·α where z is 0: four steps of u were 'converged' at a residual of 0.30."""
    for seed in range(5):
        layer = made(seed, a=2.0, b=3.0)
        with torch.no_grad():
            layer.U.weight.copy_(torch.eye(8))
            layer.U.bias.zero_()
        x = torch.randn(4, 8)
        x[:, 0] = -1e4
        for made_in in (layer, copy.deepcopy(layer).double()):
            given = x.to(made_in.U.weight.dtype)
            with quietly():  # 1e4 beside 1 leaves float32 few digits
                found = made_in.solve(given, solver=eq.PeacemanRachford(rtol=1e-4))
            w, c = dense(made_in, given)
            left, done = relative(w, c, found.value), found.converged.numpy()
            assert left[done].max() <= 1.1e-4
            np.testing.assert_allclose(found.stats.relative.numpy(), left, rtol=2e-2, atol=1e-6)
        assert done.all()


@given(
    seed=st.integers(0, 10**6),
    solver=st.sampled_from(SOLVERS),
    m=st.sampled_from([0.1, 0.5, 1.0]),
    stretch=st.sampled_from([0.3, 1.0, 2.0]),
    shift=st.sampled_from([-3.0, 0.0, 1.0]),
    size=st.sampled_from([1e-25, 1e-3, 1.0, 1e4, 1e20]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=40, deadline=None)
def test_the_tolerance_means_the_same_for_every_solver(
    seed: int,
    solver: eq.Solver,
    m: float,
    stretch: float,
    shift: float,
    size: float,
    dtype: torch.dtype,
) -> None:
    layer = made(seed, 6, m=m, a=stretch, b=stretch).to(dtype)
    with torch.no_grad():
        layer.U.bias.fill_(shift * size)
    x = (size * torch.randn(4, 6)).to(dtype)
    if isinstance(solver, eq.ForwardBackward) and solver.alpha is not None:
        solver = eq.ForwardBackward(alpha=0.5 * m / layer.bounds()[1] ** 2, max_steps=50000)
    rtol = 1e-3 if dtype == torch.float32 else 1e-6
    with quietly():
        found = layer.solve(x, solver=dataclasses.replace(solver, rtol=rtol))
    w, c = dense(layer, x)
    left = relative(w / 1.0, c / size, found.value.double() / size)
    done = found.converged.numpy()
    # Solvers that extrapolate end a little outside of the domain; the answer is moved into it.
    room = 3.0 if isinstance(solver, eq.Anderson) else 1.0
    assert (left[done] <= room * rtol * 1.05 + 1e-6 * (dtype == torch.float32)).all()
    if isinstance(solver, eq.PeacemanRachford):
        assert done.all()


@pytest.mark.parametrize("alpha", [None, 0.02])
def test_gradients_do_not_lose_digits_with_the_step(alpha: float | None) -> None:
    """Of a layer with the step scaled down, against dense algebra in float64."""
    layer = made(0, 6, m=0.5)
    x, g = torch.randn(3, 6), torch.randn(3, 6)
    if alpha is None:
        solver: eq.Solver = eq.PeacemanRachford(max_steps=5000)
    else:
        upper = layer.bounds()[1]
        solver = eq.ForwardBackward(alpha=alpha * 0.5 / upper**2, max_steps=100000, patience=9000)
    twin = copy.deepcopy(layer)
    value = twin.solve(x, solver=solver).value
    (found,) = torch.autograd.grad(value, twin.U.bias, g)
    w, c = dense(layer, x)
    exact = np.zeros(6)
    for row, gradient in zip(newton(w, c, *RELU), g.double().numpy(), strict=True):
        d = np.diag((row > 0).astype(float))
        exact += d @ np.linalg.solve(np.eye(6) - w.T @ d, gradient)
    np.testing.assert_allclose(
        found.double().numpy(), exact, rtol=0, atol=3e-3 * np.abs(exact).max()
    )


@pytest.mark.parametrize("tau", [1.0, 0.001])
def test_a_small_proximal_step_does_not_loosen_the_tolerance(tau: float) -> None:
    """‖T_τ(z) − z‖ is τ times ‖T(z) − z‖: with τ = 0.001 and rtol 1e-4 the answer was 10% off."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(5, 6, generator=generator)
    w = 0.7 * w / torch.linalg.matrix_norm(w, 2)
    c = torch.randn(4, 6, generator=generator)
    problem = eq.Problem(eq.NonNegative(), eq.Linear(w, c))
    for accelerate in (False, True):
        solver = eq.ProximalGradient(tau=tau, accelerate=accelerate, max_steps=20000)
        found = eq.minimize(problem, solver=solver)
        assert found.converged.all()
        z = found.value.double()
        image = torch.relu((z @ w.double().T) @ w.double() + c.double())
        left = torch.linalg.vector_norm(image - z, dim=1)
        assert (left <= 1.05e-4 * torch.linalg.vector_norm(image, dim=1)).all()
        torch.testing.assert_close(found.stats.residual.double(), left, rtol=0.05, atol=1e-7)
