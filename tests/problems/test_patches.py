"""Patches against explicit loops, in every memory format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equilibria.problems.patches import Patches
from tests.problems.test_operators import randn


def rows_by_loops(r: np.ndarray, channels: int, size: int) -> np.ndarray:
    """The documented order, one number at a time."""
    b, c, h, w = r.shape
    groups, high, wide = c // channels, h // size, w // size
    rows = np.full((b, groups * high * wide, channels * size * size), np.nan)
    for n, g, y, x, k, i, j in np.ndindex(b, groups, high, wide, channels, size, size):
        patch = (g * high + y) * wide + x
        rows[n, patch, (k * size + i) * size + j] = r[
            n, g * channels + k, y * size + i, x * size + j
        ]
    return rows


def _layouts(r: Tensor) -> dict[str, Tensor]:
    return {
        "contiguous": r.contiguous(),
        "channels_last": r.contiguous(memory_format=torch.channels_last),
        "transposed": r.mT.contiguous().mT,
        "sliced": torch.stack([r, r], -1)[..., 0],
    }


@given(
    b=st.integers(1, 3),
    groups=st.integers(1, 3),
    channels=st.integers(1, 3),
    size=st.integers(1, 3),
    high=st.integers(1, 3),
    wide=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_split_by_loops_and_merge_back(
    b: int, groups: int, channels: int, size: int, high: int, wide: int
) -> None:
    patches = Patches(channels=channels, size=size)
    r = randn(b, groups * channels, high * size, wide * size)
    expected = rows_by_loops(r.numpy(), channels, size)
    assert patches.count(r.shape) == expected.shape[1]
    assert patches.width == expected.shape[2]
    for name, laid in _layouts(r).items():
        rows = patches.split(laid)
        np.testing.assert_array_equal(rows.numpy(), expected, err_msg=name)
        for layout in (torch.contiguous_format, torch.channels_last):
            merged = patches.merge(rows, r.shape, layout)
            assert torch.equal(merged, r)
            assert merged.is_contiguous(memory_format=layout)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 6, 4, 4), r"channels=4.*channels is 6"),
        ((2, 8, 5, 4), r"size=2.*height is 5"),
        ((2, 8, 4, 7), r"size=2.*width is 7"),
        ((2, 0, 4, 4), r"channels is 0"),
        ((2, 8), r"\(2, 8\)"),
    ],
)
def test_a_size_that_does_not_divide_is_an_error_with_both_numbers(
    shape: tuple[int, ...], words: str
) -> None:
    patches = Patches(channels=4, size=2)
    with pytest.raises(ValueError, match=words):
        patches.check(shape)
    with pytest.raises(ValueError, match=r"channels|size|takes \[B, C, H, W\]"):
        patches.split(torch.zeros(shape))


def test_merge_checks_the_rows_and_the_layout() -> None:
    patches = Patches(channels=4, size=2)
    with pytest.raises(ValueError, match=r"\(1, 4, 16\)"):
        patches.merge(torch.zeros(1, 3, 16), (1, 4, 4, 4))
    with pytest.raises(ValueError, match="memory_format"):
        patches.merge(torch.zeros(1, 4, 16), (1, 4, 4, 4), torch.preserve_format)
