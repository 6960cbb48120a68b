"""Blurs against scipy and against loops that follow the definitions word by word."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from equilibria.evaluation.corruptions import distortions as blur
from equilibria.evaluation.corruptions.filters import ImageNoise as Noise
from tests.evaluation.standins import picture_tensor, pictures

X = picture_tensor(3).double() / 255
NOISE = Noise(picture_tensor(3), (0,))


def test_gaussian_blur() -> None:
    found = blur.gaussian_blur(X, 1.3, NOISE)
    expected = ndimage.gaussian_filter(X.numpy(), (0, 0, 1.3, 1.3), mode="nearest")
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("radius", [0.3, 1.0, 1.5, 3.0, 6.0, 8.0, 10.0])
def test_disk_is_a_smoothed_disk_of_sum_one(radius: float) -> None:
    kernel = blur.disk(radius, 0.5).numpy()
    reach = 8 if radius <= 8 else int(radius)
    v, u = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    hard = ((u**2 + v**2) <= radius**2).astype(float)
    edge = 1 if radius <= 8 else 2
    expected = ndimage.gaussian_filter(hard / hard.sum(), 0.5, radius=edge, mode="mirror")
    np.testing.assert_allclose(kernel, expected, atol=1e-12)
    if radius < 8:  # at 8 the disk touches the border, and reflections add a little
        assert kernel.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("constants", [(0.4, 0.5), (1.5, 0.1), (6.0, 0.5), (10.0, 0.5)])
def test_defocus_blur(constants: tuple[float, float]) -> None:
    found = blur.defocus_blur(X, constants, NOISE)
    kernel = blur.disk(*constants).numpy()
    expected = np.stack(
        [
            [ndimage.correlate(plane, kernel, mode="mirror") for plane in image]
            for image in X.numpy()
        ]
    )
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-10)


def published_pass(image: np.ndarray, offsets: np.ndarray, reach: int) -> np.ndarray:
    """The published double loop, its assignment of views included. image [H, W, C]."""
    x = image.copy()
    height, width = x.shape[:2]
    for h in range(height - reach, reach, -1):
        for w in range(width - reach, reach, -1):
            dy, dx = offsets[:, h, w]
            there = (h + dy, w + dx)
            x[h, w], x[there] = x[there], x[h, w]
    return x


@pytest.mark.parametrize("reach", [1, 2, 4])
@pytest.mark.parametrize("size", [(12, 12), (9, 15), (16, 11)])
def test_neighbors_are_taken_as_in_the_published_loop(reach: int, size: tuple[int, int]) -> None:
    draw = np.random.default_rng(reach)
    image = draw.integers(0, 256, (*size, 3))
    offsets = draw.integers(-reach, reach, (2, *size))
    found = blur.take_neighbors(
        torch.from_numpy(image).permute(2, 0, 1)[None].double(),
        torch.from_numpy(offsets)[None],
        reach,
    )
    expected = published_pass(image, offsets, reach)
    np.testing.assert_array_equal(found[0].permute(1, 2, 0).numpy(), expected)


def test_long_chains_of_neighbors() -> None:
    """Every pixel takes the one after it: the last value runs through whole rows."""
    image = torch.arange(64.0).reshape(1, 1, 8, 8)
    offsets = torch.zeros(1, 2, 8, 8, dtype=torch.long)
    offsets[:, 1] = 1
    found = blur.take_neighbors(image, offsets, 2)
    expected = published_pass(image[0].permute(1, 2, 0).numpy(), offsets[0].numpy(), 2)
    np.testing.assert_array_equal(found[0].permute(1, 2, 0).numpy(), expected)


def test_glass_blur_keeps_the_border_and_the_values() -> None:
    found = blur.glass_blur(X.float(), (0.05, 1, 2), NOISE)
    levels = (X * 255).round() / 255
    torch.testing.assert_close(found[..., 0, :], levels.float()[..., 0, :], atol=1e-6, rtol=0)
    for image, moved in zip(levels, found, strict=True):
        assert set((moved * 255).round().int().flatten().tolist()) <= set(
            (image * 255).round().int().flatten().tolist()
        )


@pytest.mark.parametrize("angle", [0.0, 30.0, -45.0, -90.0, -120.0])
@pytest.mark.parametrize(("radius", "sigma"), [(6, 1.5), (15, 8.0)])
def test_motion_is_a_correlation_with_a_half_line(angle: float, radius: int, sigma: float) -> None:
    width = 2 * radius + 1
    kernel = np.zeros((2 * width + 1, 2 * width + 1))
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(width)]
    for i, weight in enumerate(weights):
        down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        kernel[width + down, width + right] += weight / sum(weights)
    found = blur.motion(X[:1], radius, sigma, torch.tensor([angle]))
    expected = [ndimage.correlate(plane, kernel, mode="nearest") for plane in X[0].numpy()]
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-9)


def test_motion_angles_belong_to_images() -> None:
    angles = torch.tensor([10.0, -40.0, 33.0])
    whole = blur.motion(X, 6, 2.0, angles)
    for i in range(3):
        one = blur.motion(X[i : i + 1], 6, 2.0, angles[i : i + 1])
        torch.testing.assert_close(one[0], whole[i], atol=1e-12, rtol=0)


def test_zoom_blur_is_the_mean_of_zooms() -> None:
    gray = pictures(1)[0, ..., 0] / 255
    factors = (1.0, 1.05, 1.1)
    total = gray.copy()
    for factor in factors:
        cut = int(np.ceil(32 / factor))
        top = (32 - cut) // 2
        big = ndimage.zoom(gray[top : top + cut, top : top + cut], factor, order=1)
        trim = (big.shape[0] - 32) // 2
        total += big[trim : trim + 32, trim : trim + 32]
    found = blur.zoom_blur(torch.from_numpy(gray)[None, None], factors, NOISE)
    np.testing.assert_allclose(found[0, 0].numpy(), total / 4, atol=1e-9)
