"""GEQ Prop 1: the truncated feature map reproduces the Gaussian coupling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from equilibria.problems.feature_map import (
    gaussian_feature_map,
    truncated_gaussian_coupling,
    truncation_error_bound,
)
from equilibria.problems.gaussian import Gaussian
from tests.problems.test_operators import randn


def _exact(c: np.ndarray, y: np.ndarray, gamma: float) -> np.ndarray:
    return -np.exp(-gamma * np.square(c - y).sum(-1)) / (2 * gamma)


@pytest.mark.parametrize("gamma", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_converges_to_the_gaussian_coupling(gamma: float, n: int) -> None:
    c, y = randn(20, n), randn(20, n, seed=1)
    target = _exact(c.numpy(), y.numpy(), gamma)
    errors = []
    for terms in range(1, 61):
        made = truncated_gaussian_coupling(c, y, gamma, terms).numpy()
        error = np.abs(made - target)
        bound = truncation_error_bound(c, y, gamma, terms).numpy()
        assert (error <= bound * (1 + 1e-9) + 1e-14 / gamma).all()
        errors.append(error.max())
    assert errors[0] > 1e-3 / gamma * gamma, "one term alone must not do"
    assert errors[-1] < 1e-13 / gamma
    assert min(errors[:8]) > errors[-1]


def test_is_the_gaussian_coupling_of_a_layer() -> None:
    weight, c, z = randn(3, 4), randn(5, 3, seed=1), randn(5, 4, seed=2)
    q = Gaussian(weight, c, gamma=0.3).value(z)
    made = truncated_gaussian_coupling(c, z @ weight.T, 0.3, 120)
    torch.testing.assert_close(made, q, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("terms", [1, 2, 5, 7])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_explicit_map_has_the_series_as_inner_product(n: int, terms: int) -> None:
    gamma = 0.4
    c, y = randn(6, n), randn(6, n, seed=1)
    phi_c, phi_y = (gaussian_feature_map(t, gamma, terms) for t in (c, y))
    assert phi_c.shape[1] == sum(n**k for k in range(terms))
    scale = torch.exp(-gamma * (c.square().sum(1) + y.square().sum(1)))
    made = -(scale / (2 * gamma)) * (phi_c * phi_y).sum(1)
    torch.testing.assert_close(
        made, truncated_gaussian_coupling(c, y, gamma, terms), rtol=1e-12, atol=1e-14
    )


def test_explicit_map_entry_by_entry() -> None:
    """Block k is √((2γ)^k/k!) times the products of the entries at every multi-index."""
    x, gamma = np.array([0.7, -1.3]), 0.9
    phi = gaussian_feature_map(torch.from_numpy(x)[None], gamma, 4)[0].numpy()
    expected = [
        math.sqrt((2 * gamma) ** k / math.factorial(k)) * np.prod([x[i] for i in index])
        for k in range(4)
        for index in np.ndindex(*(2,) * k)
    ]
    np.testing.assert_allclose(phi, expected, rtol=1e-13)


def test_gradients() -> None:
    args = (randn(2, 3).requires_grad_(), randn(2, 3, seed=1).requires_grad_())
    run = lambda c, y: truncated_gaussian_coupling(c, y, 0.5, 6)
    assert torch.autograd.gradcheck(run, args)
    assert torch.autograd.gradcheck(lambda x: gaussian_feature_map(x, 0.5, 4), args[:1])
    zero = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(truncated_gaussian_coupling(zero, args[0][:1, :2], 0.5, 6), zero)
    assert torch.isfinite(grad).all()


def test_bad_input_is_named() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="gamma=0"):
        truncated_gaussian_coupling(x, x, 0, 3)
    with pytest.raises(ValueError, match="terms=0"):
        gaussian_feature_map(x, 1.0, 0)
    with pytest.raises(ValueError, match=r"terms=1\.5"):
        gaussian_feature_map(x, 1.0, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(1, 2\), \(1, 3\)"):
        truncated_gaussian_coupling(x, torch.zeros(1, 3), 1.0, 3)
    with pytest.raises(ValueError, match="features"):
        gaussian_feature_map(torch.zeros(1, 10), 1.0, 8)
