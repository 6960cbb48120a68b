"""Snow, fog, frost and spatter against numpy, scipy, or what OpenCV gave."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy import ndimage

from equilibria.evaluation.corruptions import weather
from equilibria.evaluation.corruptions.filters import ImageNoise as Noise
from equilibria.evaluation.corruptions.weather import frost_texture
from tests.evaluation.standins import picture_tensor, pictures


class Given:
    """Random numbers that the test knows, in place of those of an image."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.draw = np.random.default_rng(seed)
        self.keys = [torch.zeros(count, dtype=torch.long)] * 2
        self.made: dict[int, np.ndarray] = {}

    def uniform(self, stream: int, *shape: int) -> torch.Tensor:
        self.made[stream] = self.draw.random((len(self.keys[0]), *shape))
        return torch.from_numpy(self.made[stream])

    def normal(self, stream: int, *shape: int) -> torch.Tensor:
        self.made[stream] = self.draw.normal(size=(len(self.keys[0]), *shape))
        return torch.from_numpy(self.made[stream])


def given(count: int = 1, seed: int = 0) -> tuple[Given, Noise]:
    made = Given(count, seed)
    return made, cast(Any, made)


def half_line(angle: float, radius: int, sigma: float) -> np.ndarray:
    """The kernel of ImageMagick's motion blur: taps on a line from the middle on."""
    width = 2 * radius + 1
    kernel = np.zeros((2 * width + 1, 2 * width + 1))
    weights = np.exp(-(np.arange(width) ** 2) / (2 * sigma**2))
    for i, weight in enumerate(weights / weights.sum()):
        down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        kernel[width + down, width + right] += weight
    return kernel


def numpy_plasma(size: int, decay: float, fields: list[np.ndarray]) -> np.ndarray:
    """Diamond-square on a torus, point by point; ``fields`` are uniform numbers, level by level."""
    a = np.zeros((size, size))
    step, wobble = size, 100.0
    numbers = iter(fields)
    while step >= 2:
        half = step // 2
        across = [(-half, -half), (-half, half), (half, -half), (half, half)]
        beside = [(-half, 0), (half, 0), (0, -half), (0, half)]
        # Where a new point lies in its cell, and the four whose mean it is.
        for down, right, near in ((half, half, across), (0, half, beside), (half, 0, beside)):
            drawn = next(numbers)
            for i, j in np.ndindex(drawn.shape):
                y, x = i * step + down, j * step + right
                mean = sum(a[(y + dy) % size, (x + dx) % size] for dy, dx in near) / 4
                a[y, x] = mean + wobble**2 * (2 * drawn[i, j] - 1)
        step, wobble = half, wobble / decay
    a -= a.min()
    return a / a.max()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 28), (8, 5)])
def test_fog(height: int, width: int) -> None:
    x = (picture_tensor(1).double() / 255)[..., :height, :width]
    known, noise = given()
    found = weather.fog(x, (0.75, 2.5), noise)
    fields = [known.made[stream][0] for stream in sorted(known.made)]
    size = 8 if height == 8 else 32
    cloud = numpy_plasma(size, 2.5, fields)[:height, :width]
    image, top = x[0].numpy(), float(x.max())
    np.testing.assert_allclose(found[0].numpy(), (image + 0.75 * cloud) * top / (top + 0.75))


def test_snow() -> None:
    """No zoom, so that a correlation is enough of an oracle."""
    mean, deviation, threshold, radius, sigma, kept = 0.1, 0.2, 0.3, 8, 3.0, 0.9
    image = pictures(1)[0] / 255
    known, noise = given()
    x = torch.from_numpy(image).permute(2, 0, 1)[None]
    found = weather.snow(x, (mean, deviation, 1.0, threshold, radius, sigma, kept), noise)
    flakes = mean + deviation * known.made[0][0, 0]
    flakes[flakes < threshold] = 0
    flakes = np.clip(flakes, 0, 1)
    angle = 90 * known.made[1][0] - 135
    smeared = ndimage.correlate(flakes, half_line(angle, radius, sigma), mode="nearest")
    gray = image @ [0.299, 0.587, 0.114]
    white = np.maximum(image, (1.5 * gray + 0.5)[..., None])
    expected = kept * image + (1 - kept) * white
    expected = expected + (smeared + np.rot90(smeared, 2))[..., None]
    np.testing.assert_allclose(found[0].permute(1, 2, 0).numpy(), expected, atol=1e-6)


def test_frost_textures_have_the_colors_and_spread_that_they_promise() -> None:
    images = picture_tensor(64)
    texture = frost_texture(32, 32, Noise(images, (0,)))
    assert texture.shape == (64, 3, 32, 32)
    assert float(texture.min()) >= 0.0
    assert float(texture.max()) <= 1.0
    means = 255 * texture.mean((2, 3))
    known = np.array([[78, 149, 166], [201, 205, 215], [138, 153, 165], [112, 123, 135]])
    distance = np.abs(means.numpy()[:, None] - known).max(2).min(1)
    assert distance.max() < 6.0
    nearest = np.abs(means.numpy()[:, None] - known).max(2).argmin(1)
    assert set(nearest) == {0, 1, 2, 3}
    # The one that stands twice in the table is drawn twice as often: 2 of 5.
    assert 12 <= (nearest == 1).sum() <= 40
    # Neighbors are alike, far pixels are not: structure, neither white noise nor a flat color.
    gray = texture.mean(1).numpy()
    gray = gray - gray.mean((1, 2), keepdims=True)
    near = (gray[:, :, 1:] * gray[:, :, :-1]).mean() / (gray**2).mean()
    far = (gray[:, :, 16:] * gray[:, :, :-16]).mean() / (gray**2).mean()
    assert 0.3 < near < 0.95
    assert far < near - 0.2


def test_frost_is_a_mixture() -> None:
    images = picture_tensor(2)
    x = images.double() / 255
    noise = Noise(images, (3,))
    found = weather.frost(x, (0.75, 0.45), noise)
    torch.testing.assert_close(found, 0.75 * x + 0.45 * frost_texture(32, 32, noise))
    gray = weather.frost(x[:, :1], (0.75, 0.45), noise)
    texture = frost_texture(32, 32, noise)
    expected = 0.299 * texture[:, 0] + 0.587 * texture[:, 1] + 0.114 * texture[:, 2]
    torch.testing.assert_close(gray[:, 0], 0.75 * x[:, 0] + 0.45 * expected)


# Levels of a liquid layer, and the edges that OpenCV 5.0.0 finds: cv2.Canny(levels, 50, 150).
LEVELS = [
    [0, 179, 186, 0, 0, 185, 215, 202, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 181, 191, 183, 0, 0, 195, 199, 177, 176, 184, 0, 0, 0, 191, 213],
    [0, 0, 179, 181, 0, 0, 0, 188, 185, 180, 180, 0, 0, 0, 200, 218],
    [0, 0, 0, 0, 179, 179, 0, 182, 188, 0, 0, 0, 0, 0, 183, 190],
    [0, 0, 0, 0, 191, 194, 180, 186, 202, 183, 0, 0, 0, 179, 179, 0],
    [0, 0, 0, 0, 186, 177, 0, 0, 195, 187, 0, 178, 187, 180, 0, 0],
    [188, 180, 179, 180, 0, 0, 0, 0, 176, 0, 0, 0, 0, 0, 0, 0],
    [0, 184, 189, 181, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 180, 176, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 181, 190, 178, 0, 182, 181, 0, 0, 0, 0, 0],
]
EDGES = [
    ".#.#.#..#.......",
    ".#...##.###...##",
    ".##...#...#...#.",
    "....##.#.#...#..",
    "....#....#.##..#",
    "##..####.#....#.",
    "..#......#.###..",
    "##.#............",
    "..#.............",
    "................",
    ".....###........",
    ".....#.####.....",
]


def test_canny_is_opencvs() -> None:
    found = weather.canny(torch.tensor([LEVELS], dtype=torch.float64), 50.0, 150.0)[0]
    assert ["".join("#" if v else "." for v in row) for row in found] == EDGES


def test_canny_follows_weak_edges_from_strong_ones_only() -> None:
    """A step of falling height: strong at one end, weak further on, linked; alone it is nothing."""
    heights = torch.linspace(60.0, 16.0, 24, dtype=torch.float64)
    step = torch.zeros(2, 24, 16, dtype=torch.float64)
    step[0, :, 8:] = heights[:, None]
    step[1, :, 8:] = heights.flip(0).clamp_max(30.0)[:, None]  # never above the upper threshold
    found = weather.canny(step, 50.0, 150.0)
    assert found[0].any(1).sum() == 24
    assert not found[1].any()


@pytest.mark.parametrize("share", [0.0, 0.002, 0.1])
def test_distance_is_the_euclidean_one_up_to_the_limit(share: float) -> None:
    mask = np.random.default_rng(1).random((3, 40, 50)) < share
    found = weather.distance_to(torch.from_numpy(mask), 20).numpy()
    for row in range(3):
        if mask[row].any():
            expected = np.minimum(ndimage.distance_transform_edt(~mask[row]), 20)
        else:
            expected = np.full((40, 50), 20.0)
        np.testing.assert_allclose(found[row], expected, atol=1e-6)


def test_equalize_makes_the_histogram_even() -> None:
    level = np.random.default_rng(2).integers(10, 60, (2, 16, 16)) ** 2 // 20
    found = weather.equalize(torch.from_numpy(level).double()).numpy()
    for before, after in zip(level, found, strict=True):
        values, counts = np.unique(before, return_counts=True)
        share = (counts.cumsum() - counts[0]) / (counts.sum() - counts[0])
        table = dict(zip(values.tolist(), (share * 255).tolist(), strict=True))
        exact = np.vectorize(table.get)(before)
        assert np.abs(after - exact).max() < 0.5 + 1e-9  # a half may round either way
        assert np.array_equal(after, np.rint(after))
        assert after.min() == 0
        assert after.max() == 255


def test_mud_covers_and_water_brightens() -> None:
    images = picture_tensor(4)
    x, noise = images.float() / 255, Noise(images, (0,))
    water = weather.spatter(x, (0.65, 0.3, 1.0, 0.69, 0.5, 0), noise)
    assert bool((water >= x - 1e-6).all())
    assert bool((water > x + 0.05).any())
    mud = weather.spatter(x, (0.65, 0.1, 0.5, 0.68, 0.6, 1), noise)
    covered = (mud - x).abs().amax(1) > 1e-6
    assert bool(covered.any())
    brown = torch.tensor([63.0, 42.0, 20.0]) / 255
    # At least 0.8 of the color under mud is brown.
    rest = (mud - x * 0.2).permute(0, 2, 3, 1)[covered]
    assert bool((rest - brown).abs().max() < 0.25)
