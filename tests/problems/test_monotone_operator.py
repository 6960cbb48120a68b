"""Monotone operators: W as numpy writes it, its transpose, resolvent, modulus and norms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from equilibria.problems.monotone_operator import DenseMonotone, gram_bound
from tests.problems.test_operators import randn

Array = NDArray[np.float64]

law = settings(max_examples=25, deadline=None, derandomize=True)


def numpy_w(a: Array, b: Array, m: float) -> Array:
    """(1 − m)I − AᵀA + B − Bᵀ."""
    return (1.0 - m) * np.eye(len(b)) - a.T @ a + b - b.T


def modulus(w: Array) -> float:
    """The least eigenvalue of the symmetric part of I − W."""
    return float(np.linalg.eigvalsh(np.eye(len(w)) - 0.5 * (w + w.T))[0])


def drawn(
    n: int, seed: int, a: float = 0.5, b: float = 0.5, m: float = 0.3
) -> tuple[DenseMonotone, Array]:
    source = np.random.default_rng(seed)
    left, right = a * source.standard_normal((n, n)), b * source.standard_normal((n, n))
    operator = DenseMonotone(torch.from_numpy(left), torch.from_numpy(right), m)
    return operator, numpy_w(left, right, m)


def test_products_with_w_and_its_transpose() -> None:
    operator, w = drawn(6, 0)
    z = randn(4, 6)
    np.testing.assert_allclose(operator((z,))[0], z.numpy() @ w.T, atol=1e-14)
    np.testing.assert_allclose(operator.adjoint((z,))[0], z.numpy() @ w, atol=1e-14)


@pytest.mark.parametrize("alpha", [0.05, 1.0, 7.0])
def test_the_resolvent(alpha: float) -> None:
    operator, w = drawn(6, 1)
    inverse = np.linalg.inv(np.eye(6) + alpha * (np.eye(6) - w))
    resolvent, u = operator.resolvent(alpha), randn(4, 6)
    np.testing.assert_allclose(resolvent((u,))[0], u.numpy() @ inverse.T, atol=1e-13)


@law
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 12),
    a=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    b=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    m=st.sampled_from([1e-3, 0.3, 1.0, 4.0]),
)
def test_the_modulus_is_proven_whatever_the_weights(
    seed: int, n: int, a: float, b: float, m: float
) -> None:
    operator, w = drawn(n, seed, a, b, m)
    least, size = modulus(w), float(np.linalg.norm(w)) + 1.0 + m
    found = operator.modulus_lower()
    assert found <= least + 1e-14 * size  # numpy's own rounding
    assert found >= m - 1e-12 * size * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_modulus_is_that_of_the_rounded_weights(dtype: torch.dtype) -> None:
    """W in a lower precision has another modulus, which may lie below m."""
    a, b = (0.5 * randn(40, 40).to(dtype) for _ in range(2))
    operator = DenseMonotone(a, b, 0.1)
    w = operator.weight.double().numpy()
    assert operator.weight.dtype == dtype
    # The slack: 16 roundings of 44 entries of a matrix of size about 60.
    assert modulus(w) - 1e-10 <= operator.modulus_lower() <= modulus(w) + 1e-13
    # Composed in float32: W differs from the exact one by its own rounding alone.
    exact = numpy_w(a.double().numpy(), b.double().numpy(), 0.1)
    relative = np.abs(w - exact).max() / np.abs(exact).max()
    assert relative < 4 * torch.finfo(dtype).eps


@law
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30), a=st.sampled_from([0.0, 0.2, 2.0]))
def test_norms(seed: int, n: int, a: float) -> None:
    operator, w = drawn(n, seed, a)
    difference = np.linalg.norm(np.eye(n) - w, 2)
    upper, norm = operator.norm_uppers()
    assert difference <= upper <= difference * (1 + 1e-12)
    assert np.linalg.norm(w, 2) <= norm <= np.linalg.norm(w, 2) * (1 + 1e-12)
    # The cheap bound: at most n^{1/128} above.
    assert (
        difference * (1 - 1e-12)
        <= float(operator.norm_bound())
        <= difference * n ** (1 / 128) * (1 + 1e-10)
    )
    rms = np.sqrt(np.mean(np.linalg.svd(np.eye(n) - w, compute_uv=False) ** 2))
    np.testing.assert_allclose(float(operator.scale()), rms, rtol=1e-12)


def test_the_cheap_bound_holds_in_float32_and_for_every_scale() -> None:
    for scale in (1e-12, 1.0, 1e12):
        for flat in (True, False):
            matrix = torch.eye(50) if flat else torch.randn(50, 50)
            found = gram_bound(scale * matrix)
            true = torch.linalg.matrix_norm(scale * matrix.double(), 2)
            assert true <= found <= 1.05 * true
    assert float(gram_bound(torch.zeros(3, 3))) < 1e-15


def test_the_bound_on_rounding_covers_the_rounding() -> None:
    """Against products in extended precision (64 bits of mantissa where the machine has them)."""
    operator, _ = drawn(30, 3, 3.0, 3.0)
    z = 10.0 * randn(5, 30)
    weight = operator.weight.numpy().astype(np.longdouble)
    for transposed, matrix in ((False, weight.T), (True, weight)):
        product = operator.adjoint((z,))[0] if transposed else operator((z,))[0]
        exact = z.numpy().astype(np.longdouble) @ matrix
        bound = operator.rounding((z,), transposed=transposed)[0].numpy()
        error = np.abs(product.numpy() - exact).astype(np.float64)
        assert (error <= bound).all()
        assert (error > 0).any()
        assert bound.max() < 1e-10  # of products of size 1e4


def test_gradients_reach_a_and_b() -> None:
    z = randn(2, 4)

    def run(a: Tensor, b: Tensor) -> Tensor:
        operator = DenseMonotone(a, b, 0.3)
        return operator((z,))[0] + operator.resolvent(0.7)((z,))[0]

    assert torch.autograd.gradcheck(
        run, (randn(4, 4).requires_grad_(), randn(4, 4).requires_grad_())
    )


def test_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"A \[k, n\] and B \[n, n\], got \(3, 4\) and \(3, 3\)"):
        DenseMonotone(randn(3, 4), randn(3, 3), 1.0)
