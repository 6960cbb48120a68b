"""Filters as matrices against scipy and Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from equilibria.evaluation.corruptions import filters
from tests.evaluation.standins import picture_tensor, pictures

FIELD = np.random.default_rng(0).random((9, 13))


@settings(max_examples=30, deadline=None)
@given(
    sigma=st.floats(0.05, 8.0),
    border=st.sampled_from(["nearest", "reflect", "mirror"]),
    truncate=st.sampled_from([3.0, 4.0]),
)
def test_gaussian_is_scipys(sigma: float, border: str, truncate: float) -> None:
    # Reaches far beyond the field too: 8·4 pixels against 9.
    found = filters.gaussian(torch.from_numpy(FIELD), sigma, truncate=truncate, border=border)
    expected = ndimage.gaussian_filter(FIELD, sigma, mode=border, truncate=truncate)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("border", ["nearest", "reflect", "mirror"])
def test_border_index_reads_as_numpy_pads(border: str) -> None:
    name = {"nearest": "edge", "reflect": "symmetric", "mirror": "reflect"}[border]
    row = np.arange(5)
    expected = np.pad(row, 17, mode=name)
    found = filters.border_index(torch.arange(-17, 22), 5, border)
    assert found.tolist() == expected.tolist()
    assert filters.border_index(torch.tensor([-3, 0, 4]), 1, border).tolist() == [0, 0, 0]


@settings(max_examples=50, deadline=None)
@given(factor=st.floats(1.0, 5.0), size=st.integers(4, 40))
def test_zoom_is_scipys_of_the_middle(factor: float, size: int) -> None:
    x = np.random.default_rng(size).random((size, size))
    cut = int(np.ceil(size / factor))
    top = (size - cut) // 2
    # mode="nearest": by rounding, scipy's last row may fall outside and read as zero otherwise.
    big = ndimage.zoom(x[top : top + cut, top : top + cut], factor, order=1, mode="nearest")
    trim = (big.shape[0] - size) // 2
    expected = big[trim : trim + size, trim : trim + size]
    found = filters.zoom(torch.from_numpy(x), factor)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("size", [(30, 30), (20, 27), (8, 8), (64, 64), (33, 31)])
def test_box_resize_is_pillows(size: tuple[int, int]) -> None:
    gray = pictures(1)[0, ..., 0]
    found = filters.box_resize(torch.from_numpy(gray).double(), *size)
    expected = Image.fromarray(gray).resize(size[::-1], Image.Resampling.BOX)
    # Pillow rounds after each of its two passes.
    assert np.abs(found.numpy() - np.asarray(expected, float)).max() <= 1.01


@pytest.mark.parametrize("width", [3, 5, 7, 15, 21])
def test_correlate_is_scipys(width: int) -> None:
    """Both ways: by convolution and by Fourier transforms; wider than the field too."""
    kernel = np.random.default_rng(1).random((width, width))
    found = filters.correlate(torch.from_numpy(FIELD)[None, None], torch.from_numpy(kernel))
    expected = ndimage.correlate(FIELD, kernel, mode="mirror")
    np.testing.assert_allclose(found[0, 0].numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("border", ["nearest", "reflect", "mirror"])
def test_bilinear_is_scipys(border: str) -> None:
    draw = np.random.default_rng(2)
    rows, columns = draw.uniform(-20, 30, (2, 11, 6))
    found = filters.bilinear(
        torch.from_numpy(FIELD)[None, None],
        torch.from_numpy(rows)[None],
        torch.from_numpy(columns)[None],
        border,
    )
    expected = ndimage.map_coordinates(FIELD, [rows, columns], order=1, mode=border)
    np.testing.assert_allclose(found[0, 0].numpy(), expected, atol=1e-9)


def test_filters_keep_the_dtype_and_do_not_mix_planes() -> None:
    x = picture_tensor(3).float() / 255
    blurred = filters.gaussian(x, 1.0)
    assert blurred.dtype == torch.float32
    assert torch.equal(blurred[1:2], filters.gaussian(x[1:2], 1.0))
