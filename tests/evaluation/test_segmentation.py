"""mIoU and pixel accuracy against sets of pixels counted in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.evaluation import segmentation_metrics
from equilibria.evaluation.segmentation import SegmentationMeter


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 4),
    classes=st.integers(2, 6),
    ignored=st.sampled_from([None, 0, 255, -100]),
    seed=st.integers(0, 10**6),
)
def test_against_numpy(count: int, classes: int, ignored: int | None, seed: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(count, classes, 5, 7))
    target = draw.integers(0, max(1, classes - 1), (count, 5, 7))  # the last class is absent
    if ignored is not None:
        target[draw.random(target.shape) < 0.3] = ignored
    found = segmentation_metrics(
        torch.from_numpy(logits), torch.from_numpy(target), ignore_index=ignored
    )
    guess = logits.argmax(1)
    counts = np.ones_like(target, bool) if ignored is None else target != ignored
    ious = []
    for k in range(classes):
        own, said = (target == k) & counts, (guess == k) & counts
        union = (own | said).sum()
        ious.append((own & said).sum() / union if union else math.nan)
    np.testing.assert_allclose(found.iou.numpy(), ious)
    assert found.pixels == counts.sum()
    if counts.any():
        assert found.miou == pytest.approx(np.nanmean(ious))
        assert found.accuracy == pytest.approx((guess == target)[counts].mean())
    else:
        assert math.isnan(found.miou)


def test_a_class_that_is_only_predicted_counts_as_zero() -> None:
    logits = torch.zeros(1, 3, 1, 2)
    logits[0, 2, 0, 0] = logits[0, 0, 0, 1] = 1.0
    found = segmentation_metrics(logits, torch.tensor([[[0, 0]]]))
    assert found.iou.tolist()[0] == 0.5
    assert math.isnan(found.iou[1])
    assert float(found.iou[2]) == 0.0
    assert found.miou == 0.25


def test_samples_that_are_not_finite_are_named_and_left_out() -> None:
    logits = torch.zeros(3, 2, 2, 2)
    logits[1, 0, 0, 0] = math.nan
    found = segmentation_metrics(logits, torch.zeros(3, 2, 2, dtype=torch.long))
    assert found.nonfinite == (1,)
    assert found.samples == 3
    assert found.pixels == 8


def test_batches_add_up() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, target = torch.randn(5, 4, 6, 6, generator=draw), torch.randint(0, 4, (5, 6, 6))
    meter = SegmentationMeter(4)
    for a, b in zip(logits.split(2), target.split(2), strict=True):
        meter.update(a, b)
    assert torch.equal(meter.compute().confusion, segmentation_metrics(logits, target).confusion)


def test_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"maps of \(2, 2\) pixels"):
        segmentation_metrics(torch.zeros(1, 3, 2, 2), torch.zeros(1, 4, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"logits \[N, 3, H, W\]"):
        SegmentationMeter(3).update(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4))
    with pytest.raises(ValueError, match="at least one sample"):
        segmentation_metrics(torch.zeros(1, 3), torch.zeros(1))
    with pytest.raises(ValueError, match="no batch"):
        SegmentationMeter(3).compute()
