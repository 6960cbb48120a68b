"""Metrics against numpy, scikit-learn, torchmetrics and sets of pixels."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    confusion_matrix,
    jaccard_score,
    log_loss,
    recall_score,
    top_k_accuracy_score,
)
from torch import Tensor
from torchmetrics.classification import MulticlassJaccardIndex

from equilibria.evaluation import NonFiniteError, classification_metrics, segmentation_metrics
from equilibria.evaluation.metrics import ClassificationMeter, SegmentationMeter, check_finite


def drawn(count: int, classes: int, seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    draw = np.random.default_rng(seed)
    logits = torch.from_numpy(draw.normal(size=(count, classes)) * scale)
    return logits, torch.from_numpy(draw.integers(0, classes, count))


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max(1, keepdims=True))
    return exp / exp.sum(1, keepdims=True)


def numpy_ece(p: np.ndarray, y: np.ndarray, bins: int) -> float:
    """By the definition, one bin after the other, (lo, hi]."""
    confidence, right = p.max(1), p.argmax(1) == y
    total = 0.0
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return total


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 80),
    classes=st.integers(2, 12),
    seed=st.integers(0, 10**6),
    bins=st.integers(1, 20),
)
def test_against_numpy_and_sklearn(count: int, classes: int, seed: int, bins: int) -> None:
    logits, y = drawn(count, classes, seed)
    found = classification_metrics(logits, y, bins=bins)
    p, labels = softmax(logits.numpy()), np.arange(classes)
    hot = np.eye(classes)[y.numpy()]
    assert found.samples == count
    assert found.accuracy == pytest.approx((p.argmax(1) == y.numpy()).mean())
    assert found.nll == pytest.approx(log_loss(y.numpy(), p, labels=labels))
    assert found.brier == pytest.approx(((p - hot) ** 2).sum(1).mean())
    assert found.ece == pytest.approx(numpy_ece(p, y.numpy(), bins))
    expected = confusion_matrix(y.numpy(), p.argmax(1), labels=labels)
    np.testing.assert_array_equal(found.confusion.numpy(), expected)
    k = min(5, classes)
    assert found.k == k
    if classes > 5:
        expected_top = top_k_accuracy_score(y.numpy(), p, k=k, labels=labels)
        assert found.top_k == pytest.approx(expected_top)
    else:
        assert found.top_k == 1.0


def test_a_tie_goes_to_the_earlier_class() -> None:
    found = classification_metrics(torch.zeros(2, 2), torch.tensor([1, 1]), k=1)
    assert found.accuracy == found.top_k == 0.0
    assert found.per_class[1] == 0.0
    assert math.isnan(found.per_class[0])  # it does not occur


def test_the_confusion_matrix_agrees_where_logits_differ_and_probabilities_do_not() -> None:
    logits, y = 1e-20 * torch.eye(3), torch.arange(3)
    found = classification_metrics(logits, y, k=1)
    assert found.accuracy == 1.0
    np.testing.assert_array_equal(found.confusion, np.eye(3))


def test_samples_that_are_not_finite_are_named_and_never_averaged() -> None:
    logits, y = drawn(10, 4, 0)
    spoiled = logits.clone()
    spoiled[3, 1], spoiled[7, 0] = math.nan, math.inf
    found = classification_metrics(spoiled, y)
    good = [i for i in range(10) if i not in (3, 7)]
    rest = classification_metrics(logits[good], y[good])
    assert found.nonfinite == (3, 7)
    assert found.samples == 10
    assert found.accuracy == pytest.approx(rest.accuracy * 8 / 10)
    assert found.nll == pytest.approx(rest.nll)
    assert found.brier == pytest.approx(rest.brier)
    assert found.ece == pytest.approx(rest.ece)
    assert torch.equal(found.confusion, rest.confusion)
    said = logits.argmax(1).numpy()
    said[[3, 7]] = 4  # no class at all
    recall = recall_score(y, said, labels=range(4), average=None, zero_division=math.nan)
    np.testing.assert_allclose(found.per_class, recall)
    with pytest.raises(NonFiniteError, match=r"net: 2 of 10 samples .* numbers 3, 7\.") as caught:
        check_finite(found.nonfinite, 10, "net")
    assert caught.value.samples == (3, 7)


def test_one_process_of_several_evaluates_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a training on several devices is made by the first; nobody else answers."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    logits, targets = torch.randn(20, 3), torch.arange(20) % 3
    found = classification_metrics(logits, targets).confusion
    np.testing.assert_array_equal(found, confusion_matrix(targets, logits.argmax(1)))


def test_all_samples_not_finite() -> None:
    found = classification_metrics(torch.full((4, 3), math.nan), torch.tensor([0, 1, 2, 0]))
    assert found.accuracy == 0.0
    assert math.isnan(found.nll)
    assert math.isnan(found.ece)
    assert found.nonfinite == (0, 1, 2, 3)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 4),
    classes=st.integers(2, 6),
    ignored=st.sampled_from([None, 0, 255, -100]),
    seed=st.integers(0, 10**6),
)
@example(count=2, classes=4, ignored=0, seed=0)
def test_maps_against_numpy(count: int, classes: int, ignored: int | None, seed: int) -> None:
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
        union = (own | said).sum() * (k != ignored)  # a class that is ignored is no class
        ious.append((own & said).sum() / union if union else math.nan)
    np.testing.assert_allclose(found.iou.numpy(), ious)
    assert found.pixels == counts.sum()
    if counts.any():
        assert found.miou == pytest.approx(np.nanmean(ious))
        trained = MulticlassJaccardIndex(classes, ignore_index=ignored)  # what training shows
        assert found.miou == pytest.approx(
            float(trained(torch.from_numpy(logits), torch.from_numpy(target)))
        )
        assert found.accuracy == pytest.approx((guess == target)[counts].mean())
    else:
        assert math.isnan(found.miou)


def test_maps_that_are_not_finite_are_named_and_count_as_wrong() -> None:
    logits, target = torch.randn(3, 3, 4, 4), torch.randint(0, 3, (3, 4, 4))
    target[:, 0] = 255
    guess = logits.argmax(1)
    logits[1, 0, 0, 0], guess[1] = math.nan, 3  # no class at all
    found = segmentation_metrics(logits, target, ignore_index=255)
    assert found.nonfinite == (1,)
    assert found.samples == 3
    assert found.pixels == 36
    own, said = target[target < 255].numpy(), guess[target < 255].numpy()
    every = range(3)
    assert found.accuracy == pytest.approx((own == said).mean(), rel=1e-12)
    np.testing.assert_allclose(found.iou, jaccard_score(own, said, labels=every, average=None))
    np.testing.assert_allclose(found.per_class, recall_score(own, said, labels=every, average=None))


def test_edges_belong_to_the_bin_below_and_empty_bins_do_not_count() -> None:
    # Confidences 1/2, 0.7, 0.7 and 1, in four bins (lo, hi].
    logits = torch.tensor([0.0, math.log(7 / 3), math.log(7 / 3), 100.0]).double()
    logits = torch.stack([logits, torch.zeros(4).double()], 1)
    found = classification_metrics(logits, torch.tensor([0, 0, 1, 0]), bins=4).reliability
    assert found.edges.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert found.count.tolist() == [0, 1, 2, 1]
    assert found.confidence[1:].tolist() == pytest.approx([0.5, 0.7, 1.0], rel=1e-6)
    assert found.accuracy[1:].tolist() == pytest.approx([1.0, 0.5, 1.0])
    assert math.isnan(found.accuracy[0])
    assert found.ece == pytest.approx(0.5 / 4 + 0.2 * 2 / 4, rel=1e-6)
    assert found.mce == pytest.approx(0.5)


ZEROS = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda: classification_metrics(torch.zeros(0, 3), ZEROS[:0]), r"logits \[N, K\]"),
        (lambda: classification_metrics(torch.zeros(2, 3, 4), ZEROS), r"logits \[N, K\]"),
        (lambda: classification_metrics(torch.zeros(3, 3), ZEROS), r"targets \[3\]"),
        (lambda: ClassificationMeter(3).compute(), "no batch"),
        (lambda: classification_metrics(torch.zeros(2, 3), ZEROS, bins=0), "bins=0"),
        (
            lambda: segmentation_metrics(torch.zeros(1, 3, 2, 2), ZEROS.expand(1, 4, 2)),
            r"maps of \(2, 2\) pixels",
        ),
        (lambda: segmentation_metrics(torch.zeros(1, 3), ZEROS), "at least one sample"),
        (lambda: SegmentationMeter(3).compute(), "no batch"),
    ],
)
def test_wrong_input(run: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        run()
