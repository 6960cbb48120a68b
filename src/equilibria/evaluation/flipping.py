"""Test-time flip: the prediction for an image and its mirror image together.

    p = (softmax f(x) + softmax f(x̃))/2,   x̃ the image mirrored left to right

The mean is of probabilities, not of logits: p is what a draw between the two predictions gives,
so its NLL and its Brier score are at most the means of theirs (both are convex in p), and a
constant that is added to the logits of one pass changes nothing. For segmentation f(x̃) is
mirrored back first.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["log_probabilities", "mean_log_probabilities", "mirrored"]


def mirrored(x: Tensor) -> Tensor:
    """Left and right exchanged: images or maps [..., H, W]."""
    return x.flip(-1)


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax over the classes of logits [B, K] or [B, K, H, W], in float64, a new tensor.

    NaN where a logit is not finite: −∞ alone would vanish in a mean of probabilities.
    """
    return logits.double().log_softmax(1).masked_fill_(~logits.isfinite(), float("nan"))


def mean_log_probabilities(one: Tensor, other: Tensor) -> Tensor:
    """log((eᵃ + eᵇ)/2) = max(a, b) + log(1 + (e^−|a − b| − 1)/2), element by element.

    Exact where a = b, so that a network which does not tell left from right keeps its metrics.
    """
    gap = (one - other).abs_().neg_().expm1_().mul_(0.5).log1p_()
    return one.maximum(other).add_(gap)
