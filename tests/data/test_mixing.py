"""Mixup and CutMix: the images and the labels tell the same story."""

from __future__ import annotations

import pytest
import torch

from equilibria.data import Augmentation, CutMix, Flip, Mixup


def flat_batch(n: int = 12, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Each image is one color, which is its class: k/classes."""
    y = torch.arange(n) % classes
    return (y / classes).view(-1, 1, 1, 1).expand(n, 1, 8, 10).clone(), y


def test_mixup_blends_images_and_labels_alike() -> None:
    x, y = flat_batch()
    shares = set()
    for seed in range(40):
        mixed, soft = Mixup(num_classes=4)(x, y, torch.Generator().manual_seed(seed))
        torch.testing.assert_close(soft.sum(1), torch.ones(12))
        color = (soft * torch.arange(4) / 4).sum(1)  # the color that the labels tell
        torch.testing.assert_close(mixed[:, 0, 0, 0], color)
        assert torch.all(mixed == mixed[:, :, :1, :1])
        shares.add(round(float(soft[soft > 0].min()), 4))
    assert len(shares) > 10


def test_the_share_of_mixup_is_beta() -> None:
    """Var Beta(α, α) = 1/(4(2α + 1))."""
    x, y = flat_batch(2, 2)
    drawn = []
    for seed in range(600):
        mixed, soft = Mixup(num_classes=2, alpha=1.0)(x, y, torch.Generator().manual_seed(seed))
        if not torch.equal(mixed, x):
            drawn.append(float(soft[0, 0]))
    share = torch.tensor(drawn)
    assert abs(float(share.mean()) - 0.5) < 0.06
    assert abs(float(share.var()) - 1 / 12) < 0.02


def test_cutmix_counts_the_pixels_that_are_there() -> None:
    x, y = flat_batch()
    areas = set()
    for seed in range(60):
        mixed, soft = CutMix(num_classes=4)(x, y, torch.Generator().manual_seed(seed))
        for k in range(12):
            own = float((mixed[k] == x[k]).double().mean())
            told = float(soft[k, y[k]])
            assert told == pytest.approx(own, abs=1e-6)
            for value in mixed[k].unique():
                assert float(soft[k, round(float(value) * 4)]) > 0
        areas.add(round(float(soft.max(1).values.min()), 3))
    assert len(areas) > 8


def test_with_other_transforms() -> None:
    x, y = flat_batch()
    both = Augmentation([Flip(), Mixup(num_classes=4), CutMix(num_classes=4)])
    mixed, soft = both(x, y, torch.Generator().manual_seed(0))
    assert mixed.shape == x.shape
    torch.testing.assert_close(soft.sum(1), torch.ones(12))


@pytest.mark.parametrize("kind", [Mixup, CutMix])
def test_what_they_are_not_for(kind: type[Mixup] | type[CutMix]) -> None:
    x, _ = flat_batch()
    with pytest.raises(ValueError, match=r"call it with \(x, y, generator\)"):
        kind(num_classes=4)(x, None)
    with pytest.raises(ValueError, match="not for masks"):
        kind(num_classes=4)(x, torch.zeros(12, 8, 10, dtype=torch.long), None)
    with pytest.raises(ValueError, match="num_classes=1"):
        kind(num_classes=1)
    with pytest.raises(ValueError, match="alpha=0"):
        kind(num_classes=3, alpha=0)
