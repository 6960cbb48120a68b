"""Metrics of segmentation from the confusion matrix C of pixels (row the class, column the guess).

    IoU_k = C_kk / (Σ_j C_kj + Σ_i C_ik − C_kk),   mIoU = mean over the classes that occur

in targets or predictions. Pixels of the class ``ignore_index`` do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .extras import torchmetrics_module

__all__ = ["SegmentationMeter", "SegmentationMetrics", "segmentation_metrics"]

_NOWHERE = -1


@dataclass(frozen=True, eq=False)
class SegmentationMetrics:
    """Over all pixels of all samples that count; NaN where none does."""

    samples: int
    pixels: int
    confusion: Tensor
    """Long [K, K] of pixels."""
    nonfinite: tuple[int, ...] = ()
    """The samples with logits that are not finite, by number; their pixels are left out."""

    @property
    def iou(self) -> Tensor:
        """[K]; NaN for a class that neither occurs nor was predicted."""
        hit = self.confusion.diagonal().double()
        return hit / (self.confusion.sum(1) + self.confusion.sum(0) - hit)

    @property
    def miou(self) -> float:
        known = self.iou[~self.iou.isnan()]
        return float(known.mean()) if known.numel() else float("nan")

    @property
    def accuracy(self) -> float:
        """Share of pixels that are right."""
        total = int(self.confusion.sum())
        return float(self.confusion.diagonal().sum()) / total if total else float("nan")

    @property
    def per_class(self) -> Tensor:
        """Share of right pixels of each class, [K]; NaN for a class without pixels."""
        return self.confusion.diagonal().double() / self.confusion.sum(1)

    @property
    def headline(self) -> dict[str, float]:
        """The numbers of a table, by name."""
        return {"mIoU": self.miou, "pixel accuracy": self.accuracy}

    def to_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "pixels": self.pixels,
            "miou": self.miou,
            "pixel_accuracy": self.accuracy,
            "iou": self.iou,
            "per_class": self.per_class,
            "confusion": self.confusion,
            "nonfinite": list(self.nonfinite),
        }


class SegmentationMeter:
    """``update(logits, targets)`` batch by batch, then ``compute()``."""

    def __init__(self, classes: int, ignore_index: int | None = None) -> None:
        self.classes = classes
        self.ignore_index = ignore_index
        self._confusion: Any = None
        self._bad: list[Tensor] = []

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits [N, K, H, W], targets [N, H, W] long of 0 … K − 1 or ``ignore_index``."""
        if logits.ndim != 4 or logits.shape[1] != self.classes:
            raise ValueError(
                f"expected logits [N, {self.classes}, H, W], got shape {tuple(logits.shape)}."
            )
        if targets.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(
                f"the model gives maps of {tuple(logits.shape[2:])} pixels and the targets are "
                f"{tuple(targets.shape)}: they must agree."
            )
        finite = logits.isfinite().flatten(1).all(1)
        guess = logits.argmax(1)
        counts = finite[:, None, None].expand_as(targets)
        if self.ignore_index is not None:
            counts = counts & (targets != self.ignore_index)
        if self._confusion is None:
            made = torchmetrics_module().classification.MulticlassConfusionMatrix(
                self.classes, ignore_index=_NOWHERE, validate_args=False
            )
            self._confusion = made.to(logits.device)
        self._confusion.update(guess, torch.where(counts, targets, _NOWHERE))
        self._bad.append(~finite)

    def compute(self) -> SegmentationMetrics:
        """Read the sums; here the host waits."""
        if self._confusion is None:
            raise ValueError("no batch was given: there is nothing to compute.")
        confusion = self._confusion.compute().long().cpu()
        bad = torch.cat(self._bad)
        return SegmentationMetrics(
            samples=len(bad),
            pixels=int(confusion.sum()),
            confusion=confusion,
            nonfinite=tuple(bad.nonzero()[:, 0].tolist()),
        )


def segmentation_metrics(
    logits: Tensor, targets: Tensor, *, ignore_index: int | None = None
) -> SegmentationMetrics:
    """mIoU and the rest of logits [N, K, H, W] against targets [N, H, W] at once."""
    if logits.ndim != 4 or logits.shape[0] == 0:
        raise ValueError(
            f"expected logits [N, K, H, W] of at least one sample, got {tuple(logits.shape)}."
        )
    meter = SegmentationMeter(logits.shape[1], ignore_index)
    meter.update(logits, targets)
    return meter.compute()
