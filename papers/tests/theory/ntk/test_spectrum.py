"""Spectra against numpy and against kernels whose numbers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria_papers.theory import spectrum


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 999))
def test_numbers_of_random_kernels(n: int, width: int, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(n, width))
    kernel = rows @ rows.T
    found = spectrum(torch.from_numpy(kernel))
    values = np.sort(np.linalg.svd(rows, compute_uv=False) ** 2)[::-1]
    padded = np.concatenate([values, np.zeros(max(0, n - len(values)))])[:n]
    np.testing.assert_allclose(found.eigenvalues.numpy(), padded, atol=1e-9 * values[0])
    assert found.rank == min(n, width)
    assert found.largest == pytest.approx(values[0])
    assert found.trace == pytest.approx(np.trace(kernel))
    p = values / values.sum()
    assert found.effective_rank == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-6)
    assert found.participation == pytest.approx(1 / (p**2).sum())
    assert found.stable_rank == pytest.approx(1 / p[0])
    if width < n:
        assert math.isinf(found.condition)
    elif width > n + 2:
        assert found.condition == pytest.approx(np.linalg.cond(kernel), rel=1e-6)


def test_kernels_whose_numbers_are_known() -> None:
    whole = spectrum(2.0 * torch.eye(5))
    assert whole.condition == 1.0
    assert whole.rank == 5
    for number in (whole.effective_rank, whole.participation, whole.stable_rank):
        assert number == pytest.approx(5.0)
    one = spectrum(torch.ones(4, 4))
    assert one.rank == 1
    assert one.effective_rank == pytest.approx(1.0, abs=1e-6)
    assert math.isinf(one.condition)
    nothing = spectrum(torch.zeros(3, 3))
    assert (nothing.rank, nothing.effective_rank, nothing.stable_rank) == (0, 0.0, 0.0)


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="square"):
        spectrum(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="NaN or infinity"):
        spectrum(torch.full((2, 2), float("nan")))
    with pytest.raises(ValueError, match="not symmetric"):
        spectrum(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
