"""Metrics of classification against numpy, scikit-learn and torchmetrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, log_loss, top_k_accuracy_score
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from equilibria.evaluation import NonFiniteError, classification_metrics
from equilibria.evaluation.metrics import ClassificationMeter, check_finite


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


def test_ece_is_that_of_torchmetrics() -> None:
    logits, y = drawn(500, 7, 3)
    expected = multiclass_calibration_error(logits, y, num_classes=7, n_bins=15)
    assert classification_metrics(logits, y).ece == pytest.approx(float(expected), abs=1e-7)


def test_batches_add_up_to_the_whole() -> None:
    logits, y = drawn(101, 6, 1)
    meter = ClassificationMeter(6)
    for a, b in zip(logits.split(17), y.split(17), strict=True):
        meter.update(a, b)
    parts, whole = meter.compute(), classification_metrics(logits, y)
    for name in ("samples", "accuracy", "top_k", "nll", "brier", "ece"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), abs=1e-12)
    assert torch.equal(parts.confusion, whole.confusion)


def test_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(9.0), 0.0], [0.0, 0.0]])
    found = classification_metrics(logits, torch.tensor([1, 1, 1]))
    # p_y = 3/4, 1/10, 1/2; the tie goes to class 0 and is wrong.
    assert found.accuracy == pytest.approx(1 / 3)
    assert found.nll == pytest.approx(-(math.log(0.75) + math.log(0.1) + math.log(0.5)) / 3)
    assert found.brier == pytest.approx((2 * 0.25**2 + 2 * 0.9**2 + 2 * 0.5**2) / 3)
    assert found.per_class[1] == pytest.approx(1 / 3)
    assert math.isnan(found.per_class[0])


def test_nothing_is_lost_at_a_confidence_of_one() -> None:
    logits = torch.tensor([[100.0, 0.0], [0.0, 100.0], [100.0, 0.0]])
    found = classification_metrics(logits, torch.tensor([0, 1, 1]))
    assert int(found.reliability.count.sum()) == 3
    assert int(found.reliability.count[-1]) == 3
    assert found.ece == pytest.approx(1 / 3)
    assert found.reliability.mce == pytest.approx(1 / 3)


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
    with pytest.raises(NonFiniteError, match=r"net: 2 of 10 samples .* numbers 3, 7\.") as caught:
        check_finite(found.nonfinite, 10, "net")
    assert caught.value.samples == (3, 7)


def test_all_samples_not_finite() -> None:
    found = classification_metrics(torch.full((4, 3), math.nan), torch.tensor([0, 1, 2, 0]))
    assert found.accuracy == 0.0
    assert math.isnan(found.nll)
    assert math.isnan(found.ece)
    assert found.nonfinite == (0, 1, 2, 3)


def test_low_precision_logits_are_judged_in_double() -> None:
    logits, y = drawn(64, 5, 2)
    half = classification_metrics(logits.bfloat16(), y)
    same = classification_metrics(logits.bfloat16().double(), y)
    assert half.nll == same.nll


def test_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"logits \[N, K\]"):
        classification_metrics(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected logits \[N, 3\], got shape \(2, 4\)"):
        ClassificationMeter(3).update(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected targets \[2\]"):
        ClassificationMeter(3).update(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="no batch"):
        ClassificationMeter(3).compute()
    with pytest.raises(ValueError, match="bins=0"):
        classification_metrics(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), bins=0)
