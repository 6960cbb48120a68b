"""Augmentations against loops in numpy and against Pillow; masks move with their images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from equilibria.data import (
    Augmentation,
    ColorJitter,
    Crop,
    CutMix,
    Cutout,
    Flip,
    Mixup,
    RandAugment,
    ResizedCrop,
    Transform,
    augmentation,
    build_augmentation,
)
from equilibria.data.augmentation import OPERATIONS, affine, change_color, gray, warp
from tests.data.made_files import pictures

PIXELS = pictures(3, 24, 20)
X = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255


def batch(n: int = 6, h: int = 9, w: int = 11, c: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, c, h, w, generator=generator(seed))


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
    places = range(2 * padding + 1)
    for k in range(n):
        padded = np.pad(x[k].numpy(), widths, mode="reflect" if mode == "reflect" else "constant")
        cuts = [padded[:, a : a + h, b : b + w] for a in places for b in places]
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


@pytest.mark.parametrize(("size", "fill"), [(1, 0.0), (4, None), (5, 0.0)])
def test_cutout_hides_one_square(size: int, fill: float | None) -> None:
    x = batch(200, 9, 11)
    found = Cutout(size=size, fill=fill)(x, generator())
    tops, lefts = set(), set()
    for k in range(200):
        changed = (found[k] != x[k]).any(0).numpy()
        rows, columns = np.nonzero(changed)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        assert changed[top:bottom, left:right].all()
        assert changed.sum() == (bottom - top) * (right - left)
        assert bottom - top == size or top == 0 or bottom == 9
        assert right - left == size or left == 0 or right == 11
        assert max(bottom - top, right - left) <= size
        color = x[k].mean(dim=(1, 2), keepdim=True) * (fill is None)
        hidden = found[k][:, top:bottom, left:right]
        torch.testing.assert_close(hidden, color.expand_as(hidden))
        tops.add(top)
        lefts.add(left)
    assert min(len(tops), len(lefts)) > 5


def test_resized_crop_reads_a_rectangle_of_the_right_area() -> None:
    """On an image of its own coordinates, rows and columns are affine in the place."""
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
    x = batch(4, 8, 8)
    whole = ResizedCrop(scale=(1.0, 1.0), ratio=(1.0, 1.0))(x, generator())
    torch.testing.assert_close(whole, x, atol=1e-5, rtol=0)


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
    assert torch.equal(transform(x, generator(2)), moved)  # both forms draw the same numbers
    assert mask.dtype == torch.long
    shown = moved[:, 0] * 10
    agree = (shown - mask).abs() < 1e-4
    agree |= (mask == 255) & (shown == 0)
    exact = not isinstance(transform, ResizedCrop)  # a blend at the edges is between two classes
    assert agree.all() if exact else agree.double().mean() > 0.6
    assert not torch.equal(mask, y)
    labels = torch.arange(8)
    assert torch.equal(transform(x, labels, generator())[1], labels)


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


@pytest.mark.parametrize("transform", [*GEOMETRIC, Cutout(), RandAugment()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeats_with_the_generator_and_moves_on(transform: Transform, dtype: torch.dtype) -> None:
    x, same = batch(c=1).to(dtype), generator(3)
    one, two = transform(x, generator(3)), transform(x, same)
    assert torch.equal(one, two)
    assert one.dtype == dtype
    assert one.shape == x.shape
    assert not torch.equal(one, transform(x, same))
    assert not torch.equal(one, transform(x, generator(4)))
    torch.manual_seed(0)
    default = transform(x)
    torch.manual_seed(0)
    assert torch.equal(transform(x), default)


LEVEL = 12.0


def enhanced(kind: str, factor: float) -> tuple[str, float, Any]:
    enhance = getattr(ImageEnhance, {"saturation": "Color"}.get(kind, kind.capitalize()))
    return kind, factor, lambda image: enhance(image).enhance(factor)


BY_PILLOW: list[tuple[str, float, Any]] = [
    *(enhanced(kind, factor) for kind in OPERATIONS[6:10] for factor in (0.2, 1.0, 1.36, 1.7)),
    ("posterize", LEVEL / 30, lambda p: ImageOps.posterize(p, 8 - round(4 * LEVEL / 30))),
    ("solarize", LEVEL / 30, lambda p: ImageOps.solarize(p, round(255 * (1 - LEVEL / 30)))),
    ("autocontrast", 0.0, ImageOps.autocontrast),
    ("equalize", 0.0, ImageOps.equalize),
]


@pytest.mark.parametrize(("name", "level", "change"), BY_PILLOW)
@pytest.mark.parametrize("dull", [False, True])
def test_colors_are_pillows(name: str, level: float, change: Any, dull: bool) -> None:
    pixels = (PIXELS // 3 + 20).astype(np.uint8) if dull else PIXELS
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    theirs = np.stack([np.asarray(change(Image.fromarray(p))) for p in pixels])
    ours = change_color(x, name, torch.full((3,), level))
    difference = (ours - torch.from_numpy(theirs).permute(0, 3, 1, 2) / 255).abs() * 255
    # Pillow rounds to whole numbers and solarizes by them: a few pixels lie on the threshold.
    near = 0.1 if name in ("posterize", "equalize") else 2.1
    assert (difference <= near).double().mean() > (0.99 if name == "solarize" else 0.9999)


def test_flat_and_tiny_images_keep_their_colors() -> None:
    flat = torch.full((1, 3, 4, 4), 0.3)
    for name in ("autocontrast", "equalize"):
        assert torch.equal(change_color(flat, name, torch.zeros(1)), flat)
    assert torch.equal(gray(X[:, :1]), X[:, :1])
    tiny = batch(2, 2, 2)
    torch.testing.assert_close(change_color(tiny, "sharpness", torch.full((2,), 1.5)), tiny)


def test_jitter_stays_inside_and_is_each_samples_own() -> None:
    found = ColorJitter()(X[:1].expand(50, 3, 24, 20), generator())
    assert found.min() >= 0
    assert found.max() <= 1
    assert len(torch.unique(found.flatten(1), dim=0)) == 50
    torch.testing.assert_close(ColorJitter(brightness=0, contrast=0, saturation=0)(X), X)
    assert ColorJitter()(X[:, :1], generator()).shape == (3, 1, 24, 20)
    masks = torch.ones(3, 24, 20, dtype=torch.long)
    assert ColorJitter()(X, masks, None)[1] is masks


@pytest.mark.parametrize("name", OPERATIONS[1:6])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_moves_are_pillows(name: str, sign: float) -> None:
    """On a smooth image, where bilinear weights hardly matter; away from the border."""
    i, j = np.mgrid[0:24, 0:20]
    smooth = (120 + 60 * np.sin(i / 5) + 50 * np.cos(j / 4)).astype(np.uint8)
    m = sign * 25.0
    cos, sin = np.cos(np.deg2rad(m)), np.sin(np.deg2rad(m))
    # Pillow: the output at (x, y) is the input at (a x + b y + c, d x + e y + f).
    a, b, d, e, tx, ty = {
        "rotate": (cos, -sin, sin, cos, 0.0, 0.0),
        "shear_x": (1.0, 0.01 * m, 0.0, 1.0, 0.0, 0.0),
        "shear_y": (1.0, 0.0, 0.01 * m, 1.0, 0.0, 0.0),
        "translate_x": (1.0, 0.0, 0.0, 1.0, 0.015 * m * 20, 0.0),
        "translate_y": (1.0, 0.0, 0.0, 1.0, 0.0, 0.015 * m * 24),
    }[name]
    c, f = 10.0 - a * 10.0 - b * 12.0 + tx, 12.0 - d * 10.0 - e * 12.0 + ty  # about the middle
    theirs = Image.fromarray(smooth).transform(
        (20, 24), Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BILINEAR
    )
    x = torch.from_numpy(smooth / 255).float().view(1, 1, 24, 20)
    theta = affine(torch.tensor([OPERATIONS.index(name)]), torch.tensor([m]), 24, 20)
    ours, _ = warp(x, None, theta, border=False)
    away = (slice(8, 16), slice(8, 12))
    difference = np.abs(ours[0, 0].numpy() * 255 - np.asarray(theirs, float))[away]
    assert difference.max() < 2.5
    assert np.abs(np.asarray(theirs, float) - smooth)[away].max() > 4  # it does move


def test_every_operation_is_drawn_for_every_sample_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[str] = []

    def noted(x: torch.Tensor, name: str, level: torch.Tensor) -> torch.Tensor:
        drawn.extend([name] * len(x))
        return change_color(x, name, level)

    def noted_affine(chosen: torch.Tensor, level: torch.Tensor, h: int, w: int) -> torch.Tensor:
        drawn.extend(OPERATIONS[k] for k in chosen.tolist())
        assert torch.equal(level.abs(), torch.full((len(chosen),), 9.0))
        return affine(chosen, level, h, w)

    monkeypatch.setattr(augmentation, "change_color", noted)
    monkeypatch.setattr(augmentation, "affine", noted_affine)
    found = RandAugment(n=1)(X[:1].expand(700, 3, 24, 20), generator())
    assert min(drawn.count(name) for name in OPERATIONS[1:]) > 25  # 50 each on average
    assert 0 < 700 - len(drawn) < 100  # the identity
    assert found.min() >= 0
    assert found.max() <= 1


def test_rand_augment_moves_masks_and_ignores_the_outside() -> None:
    y = torch.randint(0, 5, (60, 6, 5)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    x = torch.rand(60, 3, 24, 20)
    moved, mask = RandAugment(n=2, magnitude=20)(x, y, generator())
    assert moved.shape == x.shape
    assert set(mask.unique().tolist()) <= {0, 1, 2, 3, 4, 255}
    changed = (mask != y).flatten(1).any(1)
    assert 0.2 < changed.double().mean() < 0.9
    assert (mask == 255).any()
    assert torch.equal(RandAugment()(x, torch.arange(60), None)[1], torch.arange(60))
    found = RandAugment(n=3)(X[:, :1].repeat(10, 1, 1, 1), generator())
    assert found.shape == (30, 1, 24, 20)
    assert torch.isfinite(found).all()


def flat_batch(n: int = 12, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Each image is one color, which is its class: k/classes."""
    y = torch.arange(n) % classes
    return (y / classes).view(-1, 1, 1, 1).expand(n, 1, 8, 10).clone(), y


@pytest.mark.parametrize("before", [[], [Flip(), Mixup(num_classes=4)]], ids=["alone", "after"])
def test_mixup_blends_images_and_labels_alike(before: list[Transform]) -> None:
    x, y = flat_batch()
    shares = set()
    for seed in range(40):
        mixed, soft = Augmentation([*before, Mixup(num_classes=4)])(x, y, generator(seed))
        torch.testing.assert_close(soft.sum(1), torch.ones(12))
        color = (soft * torch.arange(4) / 4).sum(1)  # the color that the labels say
        torch.testing.assert_close(mixed[:, 0, 0, 0], color)
        assert torch.all(mixed == mixed[:, :, :1, :1])
        shares.add(round(float(soft[soft > 0].min()), 4))
    assert len(shares) > 10


def test_the_share_of_mixup_is_beta() -> None:
    """Var Beta(α, α) = 1/(4(2α + 1))."""
    x, y = flat_batch(2, 2)
    drawn = []
    for seed in range(600):
        mixed, soft = Mixup(num_classes=2, alpha=1.0)(x, y, generator(seed))
        if not torch.equal(mixed, x):
            drawn.append(float(soft[0, 0]))
    share = torch.tensor(drawn)
    assert abs(float(share.mean()) - 0.5) < 0.06
    assert abs(float(share.var()) - 1 / 12) < 0.02


def test_cutmix_counts_the_pixels_that_are_there() -> None:
    x, y = flat_batch()
    areas = set()
    for seed in range(60):
        mixed, soft = CutMix(num_classes=4)(x, y, generator(seed))
        for k in range(12):
            own = float((mixed[k] == x[k]).double().mean())
            assert float(soft[k, y[k]]) == pytest.approx(own, abs=1e-6)
            for value in mixed[k].unique():
                assert float(soft[k, round(float(value) * 4)]) > 0
        areas.add(round(float(soft.max(1).values.min()), 3))
    assert len(areas) > 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Crop(padding=0), r"Crop\(padding=0\)"),
        (lambda: Crop(mode="edge"), "mode='edge'"),
        (lambda: Crop(pading=3), "Did you mean 'padding'"),
        (lambda: Flip(p=1.5), "p=1.5"),
        (lambda: Cutout(fill=2.0), "fill=2.0"),
        (lambda: ResizedCrop(scale=(0.5, 1.5)), "at most 1"),
        (lambda: ResizedCrop(ratio=(2.0, 1.0)), "ratio="),
        (lambda: RandAugment(magnitude=31), "magnitude=31"),
        (lambda: change_color(X, "hue", torch.ones(3)), "'hue' is not one of"),
        (lambda: Augmentation([3]), "takes transforms, got int"),
        (lambda: Crop(padding=9)(batch()), "cannot mirror more"),
        (lambda: Flip()(batch()[0]), r"floats \[B, C, H, W\]"),
        (lambda: Mixup(num_classes=4)(batch()), r"call it with \(x, y, generator\)"),
        (lambda: CutMix(num_classes=4)(batch(), torch.zeros(6, 9, 11).long()), "not for masks"),
        (lambda: CutMix(num_classes=3, alpha=0), "alpha=0"),
        (lambda: build_augmentation(["cropp"]), "Did you mean 'crop'"),
        (lambda: build_augmentation([{"crop": 4}]), "options are a mapping"),
        (lambda: build_augmentation([{"crop": {"padding": 4}, "flip": {}}]), "a name or"),
        (lambda: build_augmentation([3]), "a name or"),
        (lambda: build_augmentation([{"crop": {"pad": 4}}]), "Crop has no option 'pad'"),
        (lambda: build_augmentation(["mixup"]), "num_classes"),
    ],
)
def test_wrong_options(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_augmentations_from_names_and_options() -> None:
    crop = {"resized_crop": {"scale": [0.5, 1.0]}}
    made = build_augmentation(["crop", {"cutout": {"size": 5}}, crop, {"flip": None}, Flip()])
    assert made is not None
    zoom = ResizedCrop(scale=(0.5, 1.0))
    assert made.parts == (Crop(), Cutout(size=5), zoom, Flip(), Flip())
    assert build_augmentation([]) is None


@pytest.mark.parametrize("name", ["CutMix", "cut_mix", "cutmix", "cut-mix"])
def test_names_may_be_written_as_the_classes_are(name: str) -> None:
    made = build_augmentation([name], num_classes=7)
    assert made is not None
    assert made.parts == (CutMix(num_classes=7),)
