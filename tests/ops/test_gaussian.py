"""The message against loops in numpy, finite differences, and its behavior at extremes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from equilibria.ops import (
    gaussian_energies,
    gaussian_message,
    gaussian_message_jvp,
    gaussian_weights,
)
from tests.problems.test_operators import randn


def _by_loops(rows: np.ndarray, hidden: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    """GEQ's Algorithm 1 as printed: through the hidden rows rᵢW_h."""
    message = np.zeros_like(rows)
    for b, i in np.ndindex(rows.shape[:2]):
        h = rows[b, i] @ hidden
        message[b, i] = math.exp(-gamma[b] * float(h @ h)) * (hidden @ h)
    return message


@pytest.mark.parametrize("gamma", [1e-3, 0.5, 10.0])
@pytest.mark.parametrize("with_metric", [True, False])
def test_message_is_algorithm_1(gamma: float, with_metric: bool) -> None:
    """No metric is the identity."""
    rows = randn(3, 5, 4)
    hidden = randn(4, 7, seed=1) if with_metric else torch.eye(4, dtype=torch.float64)
    metric = hidden @ hidden.T if with_metric else None
    gammas = gamma * torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    message, s = gaussian_message(rows, metric, gammas)
    expected = _by_loops(rows.numpy(), hidden.numpy(), gammas.numpy())
    np.testing.assert_allclose(message.numpy(), expected, rtol=1e-11, atol=1e-14)
    energies = np.square(rows.numpy() @ hidden.numpy()).sum(-1)
    np.testing.assert_allclose(s.numpy(), energies, rtol=1e-12)
    np.testing.assert_allclose(gaussian_energies(rows, metric).numpy(), energies)
    np.testing.assert_allclose(
        gaussian_weights(s, gammas).numpy(), np.exp(-gammas.numpy()[:, None] * energies)
    )


def test_jvp_against_central_differences() -> None:
    rows, tangent, hidden = randn(2, 3, 4), randn(2, 3, 4, seed=1), randn(4, 5, seed=2)
    gamma = np.array([0.3, 1.1])
    h = 1e-6
    up, down = (
        _by_loops((rows + sign * h * tangent).numpy(), hidden.numpy(), gamma) for sign in (1, -1)
    )
    jvp = gaussian_message_jvp(rows, tangent, hidden @ hidden.T, torch.from_numpy(gamma))
    np.testing.assert_allclose(jvp.numpy(), (up - down) / (2 * h), rtol=1e-7, atol=1e-9)


def test_gradcheck_in_every_argument() -> None:
    def message(rows: Tensor, hidden: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return gaussian_message(rows, hidden @ hidden.mT, gamma)

    def jvp(rows: Tensor, tangent: Tensor, hidden: Tensor, gamma: Tensor) -> Tensor:
        return gaussian_message_jvp(rows, tangent, hidden @ hidden.mT, gamma)

    rows, hidden = (0.5 * randn(2, 2, 3)).requires_grad_(), randn(3, 2, seed=1).requires_grad_()
    gamma = torch.tensor([0.4, 0.9], dtype=torch.float64, requires_grad=True)
    tangent = randn(2, 2, 3, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(message, (rows, hidden, gamma))
    assert torch.autograd.gradgradcheck(message, (rows, hidden, gamma))
    assert torch.autograd.gradcheck(jvp, (rows, tangent, hidden, gamma))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("size", "gamma"),
    [(1e3, 1e3), (1e3, 1e30), (1.0, 1e38), (1e-3, 1e38), (0.0, 1e38), (100.0, 1e9), (1e25, 1e-3)],
)
def test_underflow_gives_zeros_and_never_nan(dtype: torch.dtype, size: float, gamma: float) -> None:
    if size > torch.finfo(dtype).max:
        pytest.skip("not a number of this dtype")
    rows = torch.full((1, 2, 3), size).to(dtype).requires_grad_()
    g = torch.tensor([gamma], dtype=torch.float32, requires_grad=True)
    metric = torch.eye(3, dtype=dtype)
    message, s = gaussian_message(rows, metric, g)
    jvp = gaussian_message_jvp(rows, torch.ones_like(rows), metric, g)
    first = torch.autograd.grad(message.float().sum(), (rows, g), create_graph=True)
    second = torch.autograd.grad(sum(t.float().sum() for t in first), (rows, g), allow_unused=True)
    for t in (message, s, jvp, *first, *second):
        assert t is not None
        assert torch.isfinite(t).all()
    if size:
        assert not message.any()
        assert not first[0].any()


def test_a_null_direction_of_the_metric_never_gives_a_weight_above_one() -> None:
    """Rounding makes rMrᵀ negative there; a large γ would blow the weight up."""
    hidden = randn(16, 3, seed=4, dtype=torch.float32)
    null = torch.linalg.svd(hidden.double().mT)[2][3:].float() * 1e3
    rows = null.unsqueeze(0)
    raw = (rows * (rows @ (hidden @ hidden.mT))).sum(-1)
    assert raw.min() < 0, "the example must round below zero to test anything"
    s = gaussian_energies(rows, hidden @ hidden.mT)
    assert s.min() >= 0
    assert gaussian_weights(s, 1e9).max() <= 1.0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_half_precision_keeps_dtype_and_float32_energies(
    dtype: torch.dtype, tolerance: float
) -> None:
    rows, hidden = 0.5 * randn(2, 6, 8), 0.5 * randn(8, 8, seed=1)
    metric = hidden @ hidden.T
    message, s = gaussian_message(rows.to(dtype), metric.to(dtype), 0.2)
    assert message.dtype == dtype
    assert s.dtype == torch.float32
    expected, _ = gaussian_message(rows, metric, 0.2)
    error = (message.double() - expected).norm() / expected.norm()
    assert error < tolerance


def test_compile_and_vmap() -> None:
    rows, metric = randn(3, 2, 4, 5), torch.eye(5, dtype=torch.float64)
    gamma = torch.rand(3, 2, dtype=torch.float64) + 0.1
    run = lambda r, g: gaussian_message(r, metric, g)[0]
    expected = torch.stack([run(r, g) for r, g in zip(rows, gamma, strict=True)])
    torch.testing.assert_close(torch.func.vmap(run)(rows, gamma), expected)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(rows[0], gamma[0]), expected[0])


def test_a_compiler_follows_the_permutation() -> None:
    """In one graph, with and without gradients; what is kept with M is for eager calls."""
    from equilibria.ops.gaussian import permuted

    metric = torch.randn(16, 16)
    whole = torch.compile(permuted, fullgraph=True, backend="eager")
    assert torch.equal(whole(metric, 4, 2), permuted(metric, 4, 2))
    with torch.no_grad():
        assert torch.equal(whole(metric, 4, 2), permuted(metric, 4, 2))
