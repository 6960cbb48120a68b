"""Running moments against numpy on all rows at once, and scikit-learn's StandardScaler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from equilibria.sklearn.moments import Moments


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    offset=st.floats(-1e3, 1e3),
)
def test_parts_add_up(seed: int, parts: list[int], offset: float) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal((n, 3)) + offset for n in parts]
    weights = [rng.uniform(0.1, 3.0, n) for n in parts]
    found = Moments.none(3)
    for part, weight in zip(rows, weights, strict=True):
        found = found.updated(part, weight)
    every, weight = np.concatenate(rows), np.concatenate(weights)
    mean = np.average(every, axis=0, weights=weight)
    variance = np.average((every - mean) ** 2, axis=0, weights=weight)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.variance, variance, rtol=1e-7, atol=1e-9)
    assert found.count == pytest.approx(weight.sum())
    np.testing.assert_allclose(found.restored(found.standardized(every)), every, atol=1e-8)


def test_as_the_standard_scaler() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 4)) * [1e-6, 1.0, 1e6, 0.0] + [0.0, 1.0, 1e5, 7.3]
    scaler = StandardScaler().fit(rows)
    found = Moments.none(4).updated(rows, np.ones(50))
    np.testing.assert_allclose(found.standardized(rows), scaler.transform(rows), atol=1e-9)
    assert found.scale[3] == 1.0  # a constant column


def test_a_weight_counts_rows() -> None:
    rng = np.random.default_rng(1)
    rows, weight = rng.standard_normal((6, 2)), np.array([0, 1, 2, 3, 0, 1])
    ours = Moments.none(2).updated(rows, weight.astype(float))
    theirs = Moments.none(2).updated(rows.repeat(weight, axis=0), np.ones(weight.sum()))
    np.testing.assert_allclose(ours.variance, theirs.variance)
    assert Moments.none(2).updated(rows, np.zeros(6)).count == 0.0
