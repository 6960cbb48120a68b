"""RandAugment's operations against Pillow's, and how they are drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from equilibria.data import RandAugment, rand_augment
from equilibria.data.geometry import warp
from equilibria.data.rand_augment import OPERATIONS, affine, change_color
from tests.data.made_files import pictures

PIXELS = pictures(3, 24, 20)
X = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255
LEVEL = 12.0


def of_pillow(name: str, picture: Image.Image) -> Image.Image:
    factor = 1 + 0.03 * LEVEL
    match name:
        case "brightness":
            return ImageEnhance.Brightness(picture).enhance(factor)
        case "contrast":
            return ImageEnhance.Contrast(picture).enhance(factor)
        case "saturation":
            return ImageEnhance.Color(picture).enhance(factor)
        case "sharpness":
            return ImageEnhance.Sharpness(picture).enhance(factor)
        case "posterize":
            return ImageOps.posterize(picture, 8 - round(4 * LEVEL / 30))
        case "solarize":
            return ImageOps.solarize(picture, round(255 * (1 - LEVEL / 30)))
        case "autocontrast":
            return ImageOps.autocontrast(picture)
        case "equalize":
            return ImageOps.equalize(picture)
    raise AssertionError(name)


@pytest.mark.parametrize("name", OPERATIONS[6:])
def test_colors_are_pillows(name: str) -> None:
    theirs = np.stack([np.asarray(of_pillow(name, Image.fromarray(p))) for p in PIXELS])
    ours = change_color(X, name, torch.full((3,), LEVEL))
    difference = (ours - torch.from_numpy(theirs).permute(0, 3, 1, 2) / 255).abs() * 255
    # Pillow rounds to whole numbers and solarizes by them: a few pixels stand on the threshold.
    near = 0.1 if name == "posterize" else 2.1
    assert (difference <= near).double().mean() > (0.99 if name == "solarize" else 0.9999)


@pytest.mark.parametrize("name", OPERATIONS[1:6])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_moves_are_pillows(name: str, sign: float) -> None:
    """On a smooth picture, where bilinear weights hardly matter; away from the border."""
    i, j = np.mgrid[0:24, 0:20]
    smooth = (120 + 60 * np.sin(i / 5) + 50 * np.cos(j / 4)).astype(np.uint8)
    m = sign * 25.0
    # Pillow: the output at (x, y) is the input at (a x + b y + c, d x + e y + f).
    middle_x, middle_y = 10.0, 12.0
    a, b, d, e, tx, ty = 1.0, 0.0, 0.0, 1.0, 0.0, 0.0
    if name == "rotate":
        angle = np.deg2rad(m)
        a, b, d, e = np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)
    elif name == "shear_x":
        b = 0.01 * m
    elif name == "shear_y":
        d = 0.01 * m
    elif name == "translate_x":
        tx = 0.015 * m * 20
    else:
        ty = 0.015 * m * 24
    c = middle_x - a * middle_x - b * middle_y + tx
    f = middle_y - d * middle_x - e * middle_y + ty
    theirs = Image.fromarray(smooth).transform(
        (20, 24), Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BILINEAR
    )
    x = torch.from_numpy(smooth / 255).float().view(1, 1, 24, 20)
    ours, _ = warp(x, None, affine([name], torch.tensor([m]), 24, 20), border=False)
    away = (slice(8, 16), slice(8, 12))
    difference = np.abs(ours[0, 0].numpy() * 255 - np.asarray(theirs, float))[away]
    assert difference.max() < 2.5
    assert np.abs(np.asarray(theirs, float) - smooth)[away].max() > 4  # it does move


def test_every_operation_is_drawn_for_every_sample_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, int] = {}
    moved: list[str] = []
    original, original_affine = change_color, affine

    def noted(x: torch.Tensor, name: str, level: torch.Tensor) -> torch.Tensor:
        seen[name] = seen.get(name, 0) + len(x)
        assert torch.equal(level.abs(), torch.full((len(x),), 9.0))
        return original(x, name, level)

    def noted_affine(kinds: list[str], level: torch.Tensor, h: int, w: int) -> torch.Tensor:
        moved.extend(kinds)
        return original_affine(kinds, level, h, w)

    monkeypatch.setattr(rand_augment, "change_color", noted)
    monkeypatch.setattr(rand_augment, "affine", noted_affine)
    x = X[:1].expand(700, 3, 24, 20)
    found = RandAugment(n=1)(x, torch.Generator().manual_seed(0))
    counts = [*seen.values(), *(moved.count(k) for k in OPERATIONS[1:6])]
    assert len(counts) == 13
    assert min(counts) > 25  # 50 each on average
    untouched = (found == x).flatten(1).all(1).sum()
    assert abs(int(untouched) - (700 - sum(counts))) <= 70  # identity, and changes that change none
    assert found.min() >= 0
    assert found.max() <= 1


def test_repeats_with_the_generator_and_moves_on() -> None:
    x = X.repeat(5, 1, 1, 1)
    g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    one, two = RandAugment()(x, g), RandAugment()(x, g)
    assert not torch.equal(one, two)
    assert torch.equal(RandAugment()(x, h), one)
    assert torch.equal(RandAugment()(x, h), two)


def test_magnitude_zero_changes_little() -> None:
    x = X.repeat(4, 1, 1, 1)
    found = RandAugment(n=1, magnitude=0)(x, torch.Generator().manual_seed(0))
    kept = ((found - x).abs() < 1.1 / 255).flatten(1).double().mean(1)
    assert (kept > 0.99).double().mean() > 0.6  # all but autocontrast and equalize


def test_masks_move_along_and_ignore_the_outside() -> None:
    y = torch.randint(0, 5, (60, 6, 5)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    x = torch.rand(60, 3, 24, 20)
    moved, mask = RandAugment(n=2, magnitude=20)(x, y, torch.Generator().manual_seed(0))
    assert moved.shape == x.shape
    assert mask.shape == y.shape
    assert set(mask.unique().tolist()) <= {0, 1, 2, 3, 4, 255}
    changed = (mask != y).flatten(1).any(1)
    assert 0.2 < changed.double().mean() < 0.9
    assert (mask == 255).any()
    _, labels = RandAugment()(x, torch.arange(60), None)
    assert torch.equal(labels, torch.arange(60))


def test_gray_images() -> None:
    found = RandAugment(n=3)(X[:, :1].repeat(10, 1, 1, 1), torch.Generator().manual_seed(0))
    assert found.shape == (30, 1, 24, 20)
    assert torch.isfinite(found).all()


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="magnitude=31"):
        RandAugment(magnitude=31)
    with pytest.raises(ValueError, match="n=0"):
        RandAugment(n=0)
    with pytest.raises(ValueError, match="'hue' is not one of"):
        change_color(X, "hue", torch.ones(3))
