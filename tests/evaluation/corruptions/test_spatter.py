"""Spatter: each link of the chain against scipy, numpy, or what OpenCV gave."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from equilibria.evaluation.corruptions import weather as spatter
from equilibria.evaluation.corruptions.filters import ImageNoise as Noise
from tests.evaluation.standins import picture_tensor

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
    found = spatter.canny(torch.tensor([LEVELS], dtype=torch.float64), 50.0, 150.0)[0]
    assert ["".join("#" if v else "." for v in row) for row in found] == EDGES


def test_canny_follows_weak_edges_from_strong_ones_only() -> None:
    """A step of falling height: strong at one end, weak further on, linked; alone it is nothing."""
    heights = torch.linspace(60.0, 16.0, 24, dtype=torch.float64)
    step = torch.zeros(2, 24, 16, dtype=torch.float64)
    step[0, :, 8:] = heights[:, None]
    step[1, :, 8:] = heights.flip(0).clamp_max(30.0)[:, None]  # never above the upper threshold
    found = spatter.canny(step, 50.0, 150.0)
    assert found[0].any(1).sum() == 24
    assert not found[1].any()


@pytest.mark.parametrize("share", [0.0, 0.002, 0.1])
def test_distance_is_the_euclidean_one_up_to_the_limit(share: float) -> None:
    mask = np.random.default_rng(1).random((3, 40, 50)) < share
    found = spatter.distance_to(torch.from_numpy(mask), 20).numpy()
    for row in range(3):
        if mask[row].any():
            expected = np.minimum(ndimage.distance_transform_edt(~mask[row]), 20)
        else:
            expected = np.full((40, 50), 20.0)
        np.testing.assert_allclose(found[row], expected, atol=1e-6)


def test_equalize_makes_the_histogram_even() -> None:
    level = np.random.default_rng(2).integers(10, 60, (2, 16, 16)) ** 2 // 20
    found = spatter.equalize(torch.from_numpy(level).double()).numpy()
    for before, after in zip(level, found, strict=True):
        values, counts = np.unique(before, return_counts=True)
        share = (counts.cumsum() - counts[0]) / (counts.sum() - counts[0])
        table = dict(zip(values.tolist(), (share * 255).tolist(), strict=True))
        exact = np.vectorize(table.get)(before)
        assert np.abs(after - exact).max() < 0.5 + 1e-9  # a half may round either way
        assert np.array_equal(after, np.rint(after))
        assert after.min() == 0
        assert after.max() == 255


def test_equalize_leaves_one_level_alone() -> None:
    level = torch.full((1, 4, 4), 20.0)
    assert torch.equal(spatter.equalize(level), level)


def test_mud_covers_and_water_brightens() -> None:
    images = picture_tensor(4)
    x, noise = images.float() / 255, Noise(images, (0,))
    water = spatter.spatter(x, (0.65, 0.3, 1.0, 0.69, 0.5, 0), noise)
    assert bool((water >= x - 1e-6).all())
    assert bool((water > x + 0.05).any())
    mud = spatter.spatter(x, (0.65, 0.1, 0.5, 0.68, 0.6, 1), noise)
    covered = (mud - x).abs().amax(1) > 1e-6
    assert bool(covered.any())
    brown = torch.tensor([63.0, 42.0, 20.0]) / 255
    # At least 0.8 of the color under mud is brown.
    rest = (mud - x * 0.2).permute(0, 2, 3, 1)[covered]
    assert bool((rest - brown).abs().max() < 0.25)


def test_no_drop_no_change() -> None:
    images = picture_tensor(1)
    x = images.float() / 255
    dry = spatter.spatter(x, (0.1, 0.01, 1.0, 0.9, 0.5, 0), Noise(images, (0,)))
    assert torch.equal(dry, x)
