"""Filters against scipy, numpy and Pillow; the random numbers of an image by their laws."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage, stats

from equilibria.evaluation.corruptions import filters
from equilibria.evaluation.corruptions.filters import ImageNoise as Noise

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
    found = filters.zoom(torch.from_numpy(x)[None, None], factor)
    np.testing.assert_allclose(found[0, 0].numpy(), expected, atol=1e-9)


def images(count: int = 4, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 8, 8), generator=draw, dtype=torch.uint8)


def test_uniform_by_the_test_of_kolmogorov() -> None:
    u = Noise(images(8), (0, 1)).uniform(3, 5000)
    assert u.shape == (8, 5000)
    assert float(u.min()) > 0.0
    assert float(u.max()) < 1.0
    for row in u.numpy():
        assert stats.kstest(row, "uniform").pvalue > 1e-4
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-4


def test_bits_neighbors_streams_and_images_are_uncorrelated() -> None:
    noise = Noise(images(2), (0,))
    a, b = noise.uniform(0, 40000), noise.uniform(1, 40000)
    pairs = [(a[0], a[1]), (a[0], b[0]), (a[0, :-1], a[0, 1:]), (a[0, :-32], a[0, 32:])]
    for left, right in pairs:
        r = torch.corrcoef(torch.stack([left, right]))[0, 1]
        assert abs(float(r)) < 4 / 200  # four standard deviations of 1/√40000
    bits = (a[0, :, None] * 2 ** torch.arange(1, 17)).floor().long() % 2
    assert float((bits.double().mean(0) - 0.5).abs().max()) < 4 * 0.5 / 200


def test_one_changed_pixel_a_seed_or_a_stream_change_everything() -> None:
    batch = images(1)
    other = batch.clone()
    other[0, 2, 7, 7] ^= 1
    base = Noise(batch, (0,)).uniform(0, 1000)
    for different in (
        Noise(other, (0,)).uniform(0, 1000),
        Noise(batch, (1,)).uniform(0, 1000),
        Noise(batch, (1 << 40,)).uniform(0, 1000),
        Noise(batch, (-1,)).uniform(0, 1000),
        Noise(batch, (0,)).uniform(1, 1000),
    ):
        assert abs(float(torch.corrcoef(torch.cat([base, different]))[0, 1])) < 0.15


def test_swapped_pixels_are_another_image() -> None:
    batch = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    batch[0, 0, 0, 0], batch[1, 0, 0, 1] = 9, 9
    keys = Noise(batch, ()).keys
    assert all(int(k[0]) != int(k[1]) for k in keys)
