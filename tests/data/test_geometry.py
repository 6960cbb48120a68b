"""Crop, flip, cutout and zoom against loops over samples in numpy; masks move with images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.data import Augmentation, Crop, Cutout, Flip, ResizedCrop, Transform
from equilibria.data.geometry import warp


def batch(n: int = 6, h: int = 9, w: int = 11, c: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, c, h, w, generator=torch.Generator().manual_seed(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=40)
@given(
    st.integers(1, 5), st.integers(6, 12), st.integers(6, 12), st.integers(1, 4), st.integers(0, 99)
)
@pytest.mark.parametrize("mode", ["reflect", "zero"])
def test_crop_is_pad_and_cut(mode: Any, n: int, h: int, w: int, padding: int, seed: int) -> None:
    x = batch(n, h, w)
    found = Crop(padding=padding, mode=mode)(x, generator(seed)).numpy()
    widths = ((0, 0), (padding, padding), (padding, padding))
    for k in range(n):
        kind: Any = {"mode": "reflect"} if mode == "reflect" else {"mode": "constant"}
        padded = np.pad(x[k].numpy(), widths, **kind)
        cuts = [
            padded[:, a : a + h, b : b + w]
            for a in range(2 * padding + 1)
            for b in range(2 * padding + 1)
        ]
        assert any(np.array_equal(found[k], cut) for cut in cuts)


def test_crop_goes_everywhere_and_by_itself() -> None:
    x = batch(1, 7, 7).expand(2000, 3, 7, 7)
    found = Crop(padding=1)(x, generator())
    kinds, counts = torch.unique(found.flatten(1), dim=0, return_counts=True)
    assert len(kinds) == 9
    assert counts.min() > 2000 / 9 * 0.7


def test_flip_is_numpys() -> None:
    x = batch(500, 4, 5)
    found = Flip()(x, generator())
    turned = np.array([not np.array_equal(a, b) for a, b in zip(found, x, strict=True)])
    for k in range(500):
        by_hand = x[k].numpy()[:, :, ::-1] if turned[k] else x[k].numpy()
        assert np.array_equal(found[k], by_hand)
    assert 180 < turned.sum() < 320
    assert torch.equal(Flip(p=0.0)(x, generator()), x)
    assert torch.equal(Flip(p=1.0)(x, generator()), x.flip(-1))


@pytest.mark.parametrize("size", [1, 4, 5])
def test_cutout_hides_one_square(size: int) -> None:
    x = batch(200, 9, 11)
    found = Cutout(size=size, fill=0.0)(x, generator())
    tops, lefts = set(), set()
    for k in range(200):
        changed = (found[k] != x[k]).any(0).numpy()
        rows, columns = np.nonzero(changed)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        assert changed[top:bottom, left:right].all()
        assert changed.sum() == (bottom - top) * (right - left)
        assert bottom - top == size or top == 0 or bottom == 9
        assert right - left == size or left == 0 or right == 11
        assert bottom - top <= size
        assert right - left <= size
        assert torch.all(found[k][:, top:bottom, left:right] == 0)
        tops.add(top)
        lefts.add(left)
    assert len(tops) > 5
    assert len(lefts) > 5


def test_cutout_fills_with_the_mean_color() -> None:
    x = batch(5)
    found = Cutout(size=3)(x, generator())
    for k in range(5):
        changed = (found[k] != x[k]).any(0)
        mean = x[k].mean(dim=(1, 2))
        torch.testing.assert_close(
            found[k][:, changed], mean[:, None].expand(3, int(changed.sum()))
        )


def test_resized_crop_of_everything_is_the_image() -> None:
    x = batch(4, 8, 8)
    found = ResizedCrop(scale=(1.0, 1.0), ratio=(1.0, 1.0))(x, generator())
    torch.testing.assert_close(found, x, atol=1e-5, rtol=0)


def test_resized_crop_reads_a_rectangle_of_the_right_area() -> None:
    """On a picture of its own coordinates, rows and columns are affine in the place."""
    h, w = 40, 60
    rows = ((torch.arange(h) + 0.5) / h).view(1, 1, h, 1).expand(64, 1, h, w)
    columns = ((torch.arange(w) + 0.5) / w).view(1, 1, 1, w).expand(64, 1, h, w)
    found = ResizedCrop(scale=(0.2, 0.5))(torch.cat([rows, columns], 1), generator())
    inside_h = (found[:, 0, -2, 5] - found[:, 0, 1, 5]) / (h - 3) * h  # height, of the whole
    inside_w = (found[:, 1, 5, -2] - found[:, 1, 5, 1]) / (w - 3) * w
    area = inside_h * inside_w
    assert torch.all((area > 0.19) & (area < 0.51))
    shape = inside_w * w / (inside_h * h)
    assert torch.all((shape > 0.74) & (shape < 1.35))
    assert found.min() >= 0
    assert found.max() <= 1
    assert found[:, 0].amin(dim=(1, 2)).std() > 0.05  # places differ


GEOMETRIC: list[Transform] = [
    Crop(padding=3),
    Crop(padding=3, mode="zero"),
    Flip(),
    ResizedCrop(),
    Augmentation([Crop(padding=2), Flip()]),
]


@pytest.mark.parametrize("transform", GEOMETRIC, ids=repr)
def test_masks_move_with_their_images(transform: Transform) -> None:
    """Where the image is its own mask in gray, both say the same after the move."""
    classes = torch.randint(0, 5, (8, 3, 3), generator=generator(1))
    y = classes.repeat_interleave(4, 1).repeat_interleave(4, 2)  # patches, so that edges are few
    x = (y.float() / 10).unsqueeze(1)
    moved, mask = transform(x, y, generator(2))
    alone = transform(x, generator(2))
    assert torch.equal(alone, moved)  # the same numbers are drawn in both forms
    assert mask.dtype == torch.long
    shown = moved[:, 0] * 10
    agree = (shown - mask).abs() < 1e-4
    agree |= (mask == 255) & (shown == 0)
    exact = not isinstance(transform, ResizedCrop)  # a blend at the edges is between two classes
    assert agree.all() if exact else agree.double().mean() > 0.6
    assert not torch.equal(mask, y)


def test_labels_stay_with_geometric_transforms() -> None:
    y = torch.arange(6)
    for transform in GEOMETRIC:
        assert torch.equal(transform(batch(), y, generator())[1], y)


def test_zero_padding_is_ignored_in_masks() -> None:
    y = torch.ones(50, 6, 6, dtype=torch.long)
    x = torch.ones(50, 1, 6, 6)
    moved, mask = Crop(padding=2, mode="zero")(x, y, generator())
    assert torch.equal(mask == 255, moved[:, 0] == 0)
    assert (mask == 255).any()


def test_warp_by_whole_pixels_is_exact() -> None:
    x, y = batch(2, 8, 8), torch.arange(128).view(2, 8, 8) % 7
    theta = torch.tensor([[1.0, 0.0, 2 * 2 / 8], [0.0, 1.0, -2 * 1 / 8]]).expand(2, 2, 3)
    moved, mask = warp(x, y, theta, border=False)
    # the output at (i, j) is the input at (i − 1, j + 2)
    by_hand = np.zeros_like(x.numpy())
    by_hand[:, :, 1:, :6] = x.numpy()[:, :, :7, 2:]
    np.testing.assert_allclose(moved, by_hand, atol=1e-5)
    expected = np.full((2, 8, 8), 255)
    expected[:, 1:, :6] = y.numpy()[:, :7, 2:]
    assert np.array_equal(mask, expected)


@pytest.mark.parametrize("transform", [*GEOMETRIC, Cutout()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeats_with_the_generator(transform: Transform, dtype: torch.dtype) -> None:
    x = batch(c=1).to(dtype)
    one, two = transform(x, generator(3)), transform(x, generator(3))
    assert torch.equal(one, two)
    assert one.dtype == dtype
    assert one.shape == x.shape
    assert not torch.equal(one, transform(x, generator(4)))
    torch.manual_seed(0)
    default = transform(x)
    torch.manual_seed(0)
    assert torch.equal(transform(x), default)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Crop(padding=0), r"Crop\(padding=0\)"),
        (lambda: Crop(mode="edge"), "mode='edge'"),
        (lambda: Crop(pading=3), "Did you mean 'padding'"),
        (lambda: Flip(p=1.5), "p=1.5"),
        (lambda: Cutout(size=0), "size=0"),
        (lambda: Cutout(fill=2.0), "fill=2.0"),
        (lambda: ResizedCrop(scale=(0.5, 1.5)), "at most 1"),
        (lambda: ResizedCrop(ratio=(2.0, 1.0)), "ratio="),
        (lambda: Augmentation([3]), "takes transforms, got int"),
        (lambda: Crop(padding=9)(batch()), "cannot mirror more"),
        (lambda: Flip()(batch()[0]), r"floats \[B, C, H, W\]"),
        (lambda: Flip()(torch.zeros(1, 3, 4, 4, dtype=torch.uint8)), r"torch\.uint8"),
    ],
)
def test_wrong_options(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()
