"""Spectra against numpy and against kernels whose numbers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equilibria_papers.theory import (
    empirical_ntk,
    kernel_alignment,
    kernel_distance,
    kernel_drift,
    label_alignment,
    spectrum,
)


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


def test_a_kernel_of_zeros() -> None:
    nothing = spectrum(torch.zeros(3, 3))
    assert (nothing.rank, nothing.effective_rank, nothing.stable_rank) == (0, 0.0, 0.0)
    assert math.isinf(nothing.condition)


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="square"):
        spectrum(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="NaN or infinity"):
        spectrum(torch.full((2, 2), float("nan")))
    with pytest.raises(ValueError, match="not symmetric"):
        spectrum(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))


# Drift, distance and alignment: their laws, and numpy's formulas.


def kernel(n: int, seed: int) -> Tensor:
    rows = torch.randn(n, n + 1, generator=torch.Generator().manual_seed(seed)).double()
    return rows @ rows.mT


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(0, 99), st.floats(0.01, 100))
def test_laws(n: int, seed: int, scale: float) -> None:
    a, b = kernel(n, seed), kernel(n, seed + 1000)
    assert kernel_drift(a, a) == 0.0
    assert kernel_drift(scale * a, a) == pytest.approx(abs(scale - 1), abs=1e-12)
    assert kernel_distance(scale * a, a) == pytest.approx(0.0, abs=1e-12)
    assert kernel_distance(a, b) == pytest.approx(kernel_distance(b, scale * a), abs=1e-12)
    assert 0 <= kernel_distance(a, b) <= 2
    assert kernel_alignment(a, scale * a) == pytest.approx(1.0)
    shifted = a + scale  # a constant is no information once centered
    assert kernel_alignment(shifted, b) == pytest.approx(kernel_alignment(a, b), abs=1e-9)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    moved = a[order][:, order], b[order][:, order]
    assert kernel_alignment(*moved) == pytest.approx(kernel_alignment(a, b), abs=1e-12)


def test_alignment_by_the_centering_matrix() -> None:
    a, b = kernel(6, 0).numpy(), kernel(6, 1).numpy()
    h = np.eye(6) - 1 / 6
    p, q = h @ a @ h, h @ b @ h
    expected = np.trace(p @ q) / np.sqrt(np.trace(p @ p) * np.trace(q @ q))
    found = kernel_alignment(torch.from_numpy(a), torch.from_numpy(b))
    assert found == pytest.approx(expected)


def test_the_kernel_of_the_labels_fits_them_and_a_constant_one_does_not() -> None:
    labels = torch.tensor([3, 3, 7, 7, 9])
    same = (labels[:, None] == labels[None, :]).double()
    assert label_alignment(same, labels) == pytest.approx(1.0)
    assert label_alignment(torch.ones(5, 5), labels) == 0.0
    values = torch.nn.functional.one_hot(labels - 3).double()
    assert label_alignment(same, values) == pytest.approx(1.0)


def test_of_a_full_kernel_the_trace_is_compared() -> None:
    model, x = nn.Linear(3, 4).double(), torch.randn(6, 3).double()
    labels = torch.arange(6) % 2
    full = label_alignment(empirical_ntk(model, x), labels)
    assert full == pytest.approx(label_alignment(x @ x.mT + 1, labels))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="same samples and outputs"):
        kernel_drift(torch.eye(2), torch.eye(3))
    with pytest.raises(ValueError, match="square"):
        kernel_alignment(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="for a kernel of 2 samples"):
        label_alignment(torch.eye(2), torch.zeros(3))
    with pytest.raises(ValueError, match="classes"):
        label_alignment(torch.eye(2), torch.zeros(2, 2, dtype=torch.long))
