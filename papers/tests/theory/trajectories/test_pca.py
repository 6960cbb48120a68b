"""Principal components against numpy's SVD."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria_papers.theory.trajectories import principal_components


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 30), st.integers(2, 40), st.integers(0, 99), st.integers(1, 4))
def test_components_are_those_of_the_svd(points: int, dims: int, seed: int, count: int) -> None:
    cloud = np.random.default_rng(seed).normal(size=(points, dims)) * np.linspace(1, 3, dims)
    found = principal_components(torch.from_numpy(cloud), count)
    centered = cloud - cloud.mean(0)
    _, values, rows = np.linalg.svd(centered, full_matrices=False)
    rank = min(points - 1, dims)
    assert found.components.shape == (count, dims)
    for i in range(min(count, rank)):
        row = found.components[i].numpy()
        assert row[np.abs(row).argmax()] > 0
        np.testing.assert_allclose(abs(row @ rows[i]), 1.0, rtol=1e-7)
        share = values[i] ** 2 / (values**2).sum()
        np.testing.assert_allclose(float(found.explained[i]), share, rtol=1e-8)
        np.testing.assert_allclose(
            found.project(torch.from_numpy(cloud))[:, i].numpy(), centered @ row, atol=1e-9
        )
    assert not bool(found.components[rank:].any())


def test_signs_do_not_depend_on_the_order_of_points_or_their_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    cloud = torch.randn(50, 7, generator=generator) * torch.arange(1.0, 8.0)
    first = principal_components(cloud)
    again = principal_components(cloud.flip(0).double())
    torch.testing.assert_close(first.components, again.components, rtol=1e-5, atol=1e-6)


def test_wide_clouds_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    cloud = torch.randn(3, 4, 25, generator=generator, dtype=torch.float64)
    whole = principal_components(cloud, 2)
    monkeypatch.setattr("equilibria_papers.theory.trajectories.training._CHUNK", 4)
    parts = principal_components(cloud, 2)
    torch.testing.assert_close(whole.components, parts.components)
    torch.testing.assert_close(whole.project(cloud), parts.project(cloud))
    assert parts.project(cloud).shape == (3, 4, 2)


def test_points_that_are_not_finite_are_left_out() -> None:
    cloud = torch.tensor([[0.0, 0.0], [2.0, 0.0], [torch.nan, 1.0], [torch.inf, 0.0]])
    found = principal_components(cloud)
    torch.testing.assert_close(found.mean, torch.tensor([1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(found.explained, torch.tensor([1.0, 0.0], dtype=torch.float64))


def test_equal_points_have_no_components() -> None:
    found = principal_components(torch.ones(5, 3))
    assert not bool(found.components.any())
    assert found.explained.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("points", "count", "match"),
    [
        (torch.ones(3), 2, r"\[..., n\]"),
        (torch.ones(3, 2, dtype=torch.long), 2, "floating"),
        (torch.full((3, 2), torch.nan), 2, "two finite points"),
        (torch.ones(3, 2), 0, "count"),
    ],
)
def test_what_cannot_be(points: torch.Tensor, count: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        principal_components(points, count)
