"""Brightness to JPEG against colorsys, numpy, scipy and Pillow."""

from __future__ import annotations

import colorsys
import io
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from equilibria.evaluation.corruptions import distortions as digital
from equilibria.evaluation.corruptions.filters import ImageNoise as Noise
from tests.evaluation.corruptions.test_weather import given
from tests.evaluation.standins import picture_tensor, pictures

IMAGE = pictures(3)[2]
X = torch.from_numpy(IMAGE).permute(2, 0, 1)[None].double() / 255
NONE = cast(Noise, None)
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
def test_brightness_is_value_in_hsv(image: np.ndarray, amount: float) -> None:
    found = digital.brightness(as_tensor(image), amount, NONE)[0].permute(1, 2, 0)
    expected = in_hsv(image, lambda h, s, v: (h, s, min(1.0, v + amount)))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("image", [IMAGE, COLORS], ids=["picture", "colors"])
@pytest.mark.parametrize("constants", [(0.1, 0.0), (2.0, 0.1), (20.0, 0.2)])
def test_saturate_is_saturation_in_hsv(image: np.ndarray, constants: tuple[float, float]) -> None:
    found = digital.saturate(as_tensor(image), constants, NONE)[0].permute(1, 2, 0)
    a, b = constants
    expected = in_hsv(image, lambda h, s, v: (h, min(1.0, a * s + b), v))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_gray_images_have_no_saturation_and_their_own_value() -> None:
    gray = X[:, :1]
    assert torch.equal(digital.saturate(gray, (2.0, 0.1), NONE), gray)
    lifted = digital.brightness(gray, 0.3, NONE)
    torch.testing.assert_close(lifted, (gray + 0.3).clamp_max(1.0))


def test_contrast_keeps_the_mean() -> None:
    found = digital.contrast(X, 0.4, NONE)[0].numpy()
    image = X[0].numpy()
    mean = image.mean((1, 2), keepdims=True)
    np.testing.assert_allclose(found, 0.4 * image + 0.6 * mean)


@pytest.mark.parametrize("share", [0.95, 0.65, 0.3, 0.25])
def test_pixelate_is_pillows(share: float) -> None:
    found = digital.pixelate(X, share, NONE)[0].permute(1, 2, 0) * 255
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
    found = (digital.jpeg_compression(x, quality, NONE)[0].permute(1, 2, 0) * 255).round()
    np.testing.assert_array_equal(found.numpy(), expected)


def test_elastic_without_displacement_is_an_affine_map() -> None:
    known, noise = given()
    found = digital.elastic_transform(X, (0.0, 0.0, 0.08), noise)[0].numpy()
    # The three corners of the published code, as (column, row), and where they go.
    corners = np.array([[26.0, 26.0], [26.0, 6.0], [6.0, 6.0]])
    moved = corners + 32 * 0.08 * (2 * known.made[0][0] - 1)
    back = np.linalg.solve(np.c_[moved, np.ones(3)], corners)  # [column, row, 1] @ back
    matrix = back[:2].T[::-1, ::-1]  # in (row, column)
    offset = back[2][::-1]
    for plane, expected in zip(found, X[0].numpy(), strict=True):
        reference = ndimage.affine_transform(expected, matrix, offset, order=1, mode="mirror")
        np.testing.assert_allclose(plane, reference, atol=1e-9)


def test_elastic_without_an_affine_map_is_a_smooth_displacement() -> None:
    known, noise = given()
    amount, blur = 0.1, 0.04
    found = digital.elastic_transform(X, (amount, blur, 0.0), noise)[0].numpy()
    sway = [
        32
        * amount
        * ndimage.gaussian_filter(2 * field - 1, 32 * blur, mode="reflect", truncate=3.0)
        for field in known.made[1][0]
    ]
    v, u = np.mgrid[0:32, 0:32]
    for plane, image in zip(found, X[0].numpy(), strict=True):
        expected = ndimage.map_coordinates(
            image, [v + sway[0], u + sway[1]], order=1, mode="reflect"
        )
        np.testing.assert_allclose(plane, expected, atol=1e-9)


def test_elastic_of_images_that_are_not_square() -> None:
    images = picture_tensor(2)[..., :20]
    found = digital.elastic_transform(images.float() / 255, (0.1, 0.04, 0.05), Noise(images, (0,)))
    assert found.shape == images.shape
    assert bool(found.isfinite().all())
