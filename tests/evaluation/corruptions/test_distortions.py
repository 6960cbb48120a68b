"""Noise, blur and digital corruptions against scipy, numpy, colorsys and Pillow."""

from __future__ import annotations

import colorsys
import io
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats

from equilibria.evaluation.corruptions import distortions
from equilibria.evaluation.corruptions.filters import ImageNoise as Noise
from tests.evaluation.corruptions.test_weather import given, half_line
from tests.evaluation.standins import picture_tensor, pictures


def flat(value: int, size: int = 64) -> tuple[torch.Tensor, Noise]:
    image = torch.full((1, 3, size, size), value, dtype=torch.uint8)
    return image.float() / 255, Noise(image, (0,))


def test_gaussian_and_speckle_scale_with_one_and_with_x() -> None:
    x, draw = flat(102)
    for found, deviation in (
        (distortions.gaussian_noise(x, 0.1, draw) - x, 0.1),
        (distortions.speckle_noise(x, 0.1, draw) - x, 0.04),
    ):
        values = found.flatten().numpy() / deviation
        assert stats.kstest(values, "norm").pvalue > 1e-4


@pytest.mark.parametrize("value", [0, 1, 100, 255])
@pytest.mark.parametrize("photons", [3, 60, 500])
def test_shot_noise_is_poisson(value: int, photons: int) -> None:
    x, draw = flat(value)
    counts = np.rint(distortions.shot_noise(x, photons, draw).flatten().numpy() * photons).astype(
        int
    )
    mean = value / 255 * photons
    if value == 0:
        assert not counts.any()
        return
    # Of the whole distribution: distance of the distribution functions at every count.
    top = counts.max() + 2
    seen = np.array([(counts <= k).mean() for k in range(top)])
    expected = stats.poisson.cdf(np.arange(top), mean)
    assert np.abs(seen - expected).max() < 2.0 / np.sqrt(len(counts))


def test_impulse_noise_hits_its_share_with_both_ends() -> None:
    x, draw = flat(102)
    found = distortions.impulse_noise(x, 0.2, draw).flatten()
    count = found.numel()
    salt, pepper = int((found == 1).sum()), int((found == 0).sum())
    assert stats.binomtest(salt, count, 0.1).pvalue > 1e-4
    assert stats.binomtest(pepper, count, 0.1).pvalue > 1e-4
    assert torch.equal(found[(found != 0) & (found != 1)].unique(), x.unique())


X = picture_tensor(3).double() / 255
NONE = cast(Noise, None)


@pytest.mark.parametrize(("radius", "smoothing"), [(0.3, 0.4), (1.0, 0.2), (1.5, 0.5)])
def test_defocus_is_a_correlation_with_a_smoothed_disk(radius: float, smoothing: float) -> None:
    v, u = np.mgrid[-8:9, -8:9]
    hard = ((u**2 + v**2) <= radius**2).astype(float)
    kernel = ndimage.gaussian_filter(hard / hard.sum(), smoothing, radius=1)
    for size in (32, 4):
        x = X[:1, :, :size, :size]
        found = distortions.defocus_blur(x, (radius, smoothing), NONE)[0].numpy()
        expected = [ndimage.correlate(plane, kernel, mode="mirror") for plane in x[0].numpy()]
        np.testing.assert_allclose(found, expected, atol=1e-12)


def published_pass(image: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The published double loop, its assignment of views included. image [H, W, C]."""
    x = image.copy()
    height, width = x.shape[:2]
    for h in range(height - 1, 1, -1):
        for w in range(width - 1, 1, -1):
            dy, dx = offsets[:, h, w]
            there = (h + dy, w + dx)
            x[h, w], x[there] = x[there], x[h, w]
    return x


@pytest.mark.parametrize("size", [(4, 4), (12, 12), (9, 15), (16, 11)])
def test_neighbors_are_taken_as_in_the_published_loop(size: tuple[int, int]) -> None:
    draw = np.random.default_rng(0)
    image = draw.integers(0, 256, (*size, 3))
    offsets = draw.integers(-1, 1, (2, *size))
    found = distortions.take_neighbors(
        torch.from_numpy(image).permute(2, 0, 1)[None].double(), torch.from_numpy(offsets)[None]
    )
    expected = published_pass(image, offsets)
    np.testing.assert_array_equal(found[0].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("angle", [0.0, 30.0, -45.0, -90.0, -120.0])
@pytest.mark.parametrize(("radius", "sigma"), [(6, 1.5), (15, 8.0)])
def test_motion_is_a_correlation_with_a_half_line(angle: float, radius: int, sigma: float) -> None:
    kernel = half_line(angle, radius, sigma)
    found = distortions.motion(X[:1], radius, sigma, torch.tensor([angle]))
    expected = [ndimage.correlate(plane, kernel, mode="nearest") for plane in X[0].numpy()]
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-9)


IMAGE = pictures(3)[2]
ONE = torch.from_numpy(IMAGE).permute(2, 0, 1)[None].double() / 255
# Black, white, gray, the corners of the cube and some between.
COLORS = np.array(
    [(a, b, c) for a in (0, 90, 255) for b in (0, 90, 200) for c in (0, 90, 255)], np.uint8
).reshape(1, -1, 3)


def in_hsv(image: np.ndarray, change: Any) -> np.ndarray:
    out = np.zeros(image.shape)
    for place in np.ndindex(image.shape[:2]):
        out[place] = colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*(image[place] / 255))))
    return out


def as_tensor(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)[None].double() / 255


@pytest.mark.parametrize("image", [IMAGE, COLORS], ids=["picture", "colors"])
@pytest.mark.parametrize("amount", [0.05, 0.5])
@pytest.mark.parametrize("factor", [0.1, 2.0, 20.0])
def test_brightness_and_saturation_are_those_of_hsv(
    image: np.ndarray, amount: float, factor: float
) -> None:
    x = as_tensor(image)
    bright = distortions.brightness(x, amount, NONE)[0].permute(1, 2, 0)
    expected = in_hsv(image, lambda h, s, v: (h, s, min(1.0, v + amount)))
    np.testing.assert_allclose(bright.numpy(), expected, atol=1e-12)
    colored = distortions.saturate(x, (factor, amount), NONE)[0].permute(1, 2, 0)
    expected = in_hsv(image, lambda h, s, v: (h, min(1.0, factor * s + amount), v))
    np.testing.assert_allclose(colored.numpy(), expected, atol=1e-12)


def test_gray_images_have_no_saturation_and_their_own_value() -> None:
    gray = ONE[:, :1]
    assert torch.equal(distortions.saturate(gray, (2.0, 0.1), NONE), gray)
    lifted = distortions.brightness(gray, 0.3, NONE)
    torch.testing.assert_close(lifted, (gray + 0.3).clamp_max(1.0))


def test_contrast_keeps_the_mean() -> None:
    found = distortions.contrast(ONE, 0.4, NONE)[0].numpy()
    image = ONE[0].numpy()
    mean = image.mean((1, 2), keepdims=True)
    np.testing.assert_allclose(found, 0.4 * image + 0.6 * mean)


@pytest.mark.parametrize("share", [0.95, 0.65, 0.3, 0.25])
def test_pixelate_is_pillows(share: float) -> None:
    found = distortions.pixelate(ONE, share, NONE)[0].permute(1, 2, 0) * 255
    small = int(32 * share)
    picture = Image.fromarray(IMAGE).resize((small, small), Image.Resampling.BOX)
    expected = np.asarray(picture.resize((32, 32), Image.Resampling.BOX), float)
    assert np.abs(found.numpy() - expected).max() <= 1.01


@pytest.mark.parametrize("quality", [80, 25, 7])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_jpeg_is_pillows(quality: int, mode: str) -> None:
    image = IMAGE if mode == "RGB" else IMAGE[..., 0]
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "JPEG", quality=quality)
    expected = np.atleast_3d(np.asarray(Image.open(stream)))
    x = torch.from_numpy(np.atleast_3d(image)).permute(2, 0, 1)[None].float() / 255
    found = (distortions.jpeg_compression(x, quality, NONE)[0].permute(1, 2, 0) * 255).round()
    np.testing.assert_array_equal(found.numpy(), expected)


def test_elastic_without_displacement_is_an_affine_map() -> None:
    known, noise = given()
    found = distortions.elastic_transform(ONE, (0.0, 0.0, 0.08), noise)[0].numpy()
    # The three corners of the published code, as (column, row), and where they go.
    corners = np.array([[26.0, 26.0], [26.0, 6.0], [6.0, 6.0]])
    moved = corners + 32 * 0.08 * (2 * known.made[0][0] - 1)
    back = np.linalg.solve(np.c_[moved, np.ones(3)], corners)  # [column, row, 1] @ back
    matrix = back[:2].T[::-1, ::-1]  # in (row, column)
    offset = back[2][::-1]
    for plane, expected in zip(found, ONE[0].numpy(), strict=True):
        reference = ndimage.affine_transform(expected, matrix, offset, order=1, mode="mirror")
        np.testing.assert_allclose(plane, reference, atol=1e-9)


def test_elastic_without_an_affine_map_is_a_smooth_displacement() -> None:
    known, noise = given()
    amount, blur = 0.1, 0.04
    found = distortions.elastic_transform(ONE, (amount, blur, 0.0), noise)[0].numpy()
    sway = [
        32
        * amount
        * ndimage.gaussian_filter(2 * field - 1, 32 * blur, mode="reflect", truncate=3.0)
        for field in known.made[1][0]
    ]
    v, u = np.mgrid[0:32, 0:32]
    for plane, image in zip(found, ONE[0].numpy(), strict=True):
        expected = ndimage.map_coordinates(
            image, [v + sway[0], u + sway[1]], order=1, mode="reflect"
        )
        np.testing.assert_allclose(plane, expected, atol=1e-9)
