"""GEQ Prop 1: the truncated series reproduces the Gaussian coupling, within its bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equilibria.problems import Gaussian, truncated_gaussian_coupling, truncation_error_bound
from tests.problems.test_operators import randn


@pytest.mark.parametrize("gamma", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_converges_to_the_gaussian_coupling(gamma: float, n: int) -> None:
    c, y = randn(20, n), randn(20, n, seed=1)
    target = -np.exp(-gamma * np.square(c.numpy() - y.numpy()).sum(-1)) / (2 * gamma)
    errors = []
    for terms in range(1, 61):
        made = truncated_gaussian_coupling(c, y, gamma, terms).numpy()
        error = np.abs(made - target)
        bound = truncation_error_bound(c, y, gamma, terms).numpy()
        assert (error <= bound * (1 + 1e-9) + 1e-14 / gamma).all()
        errors.append(error.max())
    assert errors[0] > 1e-3, "one term alone must not do"
    assert errors[-1] < 1e-13 / gamma
    assert min(errors[:8]) > errors[-1]


@pytest.mark.parametrize("terms", [1, 2, 5])
def test_the_series_is_the_inner_product_of_the_features(terms: int) -> None:
    """Φ written out for n = 2: √((2γ)^k/k!) times the k-fold Kronecker power."""
    gamma, c, y = 0.4, randn(6, 2), randn(6, 2, seed=1)

    def features(x: np.ndarray) -> np.ndarray:
        blocks, power, factor = [], np.ones(1), 1.0
        for k in range(terms):
            blocks.append(np.sqrt(factor) * power)
            power, factor = np.kron(power, x), factor * 2 * gamma / (k + 1)
        return np.concatenate(blocks)

    made = truncated_gaussian_coupling(c, y, gamma, terms)
    for a, b, found in zip(c.numpy(), y.numpy(), made.tolist(), strict=True):
        scale = np.exp(-gamma * (a @ a + b @ b)) / (2 * gamma)
        assert found == pytest.approx(-scale * features(a) @ features(b), rel=1e-12)


def test_is_the_gaussian_coupling_of_a_layer_with_its_gradient() -> None:
    weight, c, z = randn(3, 4), randn(5, 3, seed=1).requires_grad_(), randn(5, 4, seed=2)
    q = Gaussian(weight, c, gamma=0.3).value(z)
    made = truncated_gaussian_coupling(c, z @ weight.T, 0.3, 120)
    torch.testing.assert_close(made, q, rtol=1e-11, atol=1e-14)
    assert torch.autograd.gradcheck(lambda c: truncated_gaussian_coupling(c, c.flip(0), 0.5, 6), c)


def test_bad_input_is_named() -> None:
    x = torch.zeros(1, 2)
    for y, gamma, terms, words in (
        (x, 0, 3, "gamma=0"),
        (x, 1.0, 0, "terms=0"),
        (x, 1.0, 1.5, r"terms=1\.5"),
        (torch.zeros(1, 3), 1.0, 3, r"\(1, 2\), \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=words):
            truncated_gaussian_coupling(x, y, gamma, terms)  # type: ignore[arg-type]
