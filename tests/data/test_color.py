"""Blends of color against Pillow's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from equilibria.data import ColorJitter
from equilibria.data.color import autocontrast, brightness, contrast, gray, saturation
from tests.data.made_files import pictures

PIXELS = pictures(4, 16, 12)
X = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255


def by_pillow(change: Callable[[Image.Image, int], Image.Image]) -> torch.Tensor:
    made = [np.asarray(change(Image.fromarray(p), k)) for k, p in enumerate(PIXELS)]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2) / 255


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (brightness, ImageEnhance.Brightness),
        (contrast, ImageEnhance.Contrast),
        (saturation, ImageEnhance.Color),
    ],
)
def test_blends_are_pillows(ours: Any, theirs: Any) -> None:
    factors = [0.2, 0.9, 1.0, 1.7]
    expected = by_pillow(lambda p, k: theirs(p).enhance(factors[k]))
    torch.testing.assert_close(ours(X, torch.tensor(factors)), expected, atol=2.1 / 255, rtol=0)


def test_autocontrast_is_pillows() -> None:
    dull = (PIXELS // 3 + 20).astype(np.uint8)
    x = torch.from_numpy(dull).permute(0, 3, 1, 2) / 255
    expected = np.stack([np.asarray(ImageOps.autocontrast(Image.fromarray(p))) for p in dull])
    torch.testing.assert_close(
        autocontrast(x),
        torch.from_numpy(expected).permute(0, 3, 1, 2) / 255,
        atol=1.1 / 255,
        rtol=0,
    )
    flat = torch.full((1, 3, 4, 4), 0.3)
    assert torch.equal(autocontrast(flat), flat)


def test_gray_is_pillows() -> None:
    expected = np.stack([np.asarray(Image.fromarray(p).convert("L")) for p in PIXELS]) / 255
    np.testing.assert_allclose(gray(X)[:, 0], expected, atol=0.6 / 255)
    assert torch.equal(gray(X[:, :1]), X[:, :1])


def test_jitter_stays_inside_and_is_each_samples_own() -> None:
    same = X[:1].expand(50, 3, 16, 12)
    found = ColorJitter()(same, torch.Generator().manual_seed(0))
    assert found.min() >= 0
    assert found.max() <= 1
    assert len(torch.unique(found.flatten(1), dim=0)) == 50
    still = ColorJitter(brightness=0, contrast=0, saturation=0)(X)
    torch.testing.assert_close(still, X)
    one = ColorJitter()(X[:, :1], torch.Generator().manual_seed(0))
    assert one.shape == (4, 1, 16, 12)
    masks = torch.ones(4, 16, 12, dtype=torch.long)
    assert ColorJitter()(X, masks, None)[1] is masks


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="contrast=2"):
        ColorJitter(contrast=2)
