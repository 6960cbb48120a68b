"""Metrics of classification, added up batch by batch without waiting for the device.

    accuracy = mean [argmax p = y],   NLL = mean −log p_y,   Brier = mean Σ_k (p_k − [k = y])²

A sample with NaN or infinity among its logits is never averaged away: it is named
(``nonfinite``), counts as wrong, and stays out of NLL, Brier, the bins and the confusion matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .calibration import Reliability, ReliabilityMeter
from .extras import torchmetrics_module

__all__ = [
    "ClassificationMeter",
    "ClassificationMetrics",
    "NonFiniteError",
    "check_finite",
    "classification_metrics",
]


class NonFiniteError(ValueError):
    """Logits with NaN or infinity; ``samples`` names them."""

    def __init__(self, message: str, samples: tuple[int, ...]) -> None:
        super().__init__(message)
        self.samples = samples


def check_finite(
    nonfinite: tuple[int, ...], total: int, what: str, *, optional: bool = False
) -> None:
    """Raise ``NonFiniteError`` if there are any; ``optional``: the caller could go on instead."""
    if nonfinite:
        some = ", ".join(str(i) for i in nonfinite[:10])
        more = f" and {len(nonfinite) - 10} more" if len(nonfinite) > 10 else ""
        raise NonFiniteError(
            f"{what}: {len(nonfinite)} of {total} samples have logits with NaN or infinity: "
            f"numbers {some}{more}. Look at these inputs and at the weights: a solve may have "
            "diverged"
            + (", or pass nonfinite='report' to count them as wrong." if optional else "."),
            nonfinite,
        )


@dataclass(frozen=True, eq=False)
class ClassificationMetrics:
    """Over all samples; NaN where nothing was counted."""

    samples: int
    accuracy: float
    top_k: float
    """Share of samples whose class is among the k largest logits."""
    k: int
    nll: float
    brier: float
    reliability: Reliability
    confusion: Tensor
    """Long [K, K]: row the class, column the prediction."""
    nonfinite: tuple[int, ...] = ()
    """The samples whose logits are not finite, by number."""

    @property
    def ece(self) -> float:
        return self.reliability.ece

    @property
    def per_class(self) -> Tensor:
        """Share of right predictions of each class, [K]; NaN for a class without samples."""
        return self.confusion.diagonal().double() / self.confusion.sum(1)

    @property
    def headline(self) -> dict[str, float]:
        """The numbers of a table, by name."""
        top = {f"top-{self.k}": self.top_k} if self.k > 1 else {}
        return {
            "accuracy": self.accuracy,
            **top,
            "nll": self.nll,
            "brier": self.brier,
            "ece": self.ece,
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "accuracy": self.accuracy,
            "top_k": {"k": self.k, "accuracy": self.top_k},
            "nll": self.nll,
            "brier": self.brier,
            "ece": self.ece,
            "mce": self.reliability.mce,
            "reliability": self.reliability.to_dict(),
            "per_class": self.per_class,
            "confusion": self.confusion,
            "nonfinite": list(self.nonfinite),
        }


class ClassificationMeter:
    """``update(logits, targets)`` batch by batch, then ``compute()``."""

    def __init__(self, classes: int, *, bins: int = 15, k: int = 5) -> None:
        self.classes = classes
        self.k = max(1, min(k, classes))
        self._bins = ReliabilityMeter(bins)
        self._confusion: Any = None
        self._sums: Tensor | None = None
        self._bad: list[Tensor] = []

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits [N, K] floating, targets [N] long of 0 … K − 1."""
        if logits.ndim != 2 or logits.shape[1] != self.classes:
            raise ValueError(
                f"expected logits [N, {self.classes}], got shape {tuple(logits.shape)}."
            )
        if targets.shape != logits.shape[:1]:
            raise ValueError(
                f"expected targets [{logits.shape[0]}], got shape {tuple(targets.shape)}."
            )
        finite = logits.isfinite().all(1)
        kept = torch.where(finite[:, None], logits.double(), 0.0)
        log_p = kept.log_softmax(1)
        p = log_p.exp()
        own = targets[:, None]
        confidence, predicted = p.max(1)
        # As argmax does, an earlier class wins a tie.
        place = torch.arange(self.classes, device=logits.device)
        mine = kept.gather(1, own)
        ahead = (kept > mine) | ((kept == mine) & (place < own))
        rank = ahead.sum(1)
        right, near = finite & (rank == 0), finite & (rank < self.k)
        brier = p.square().sum(1) - 2 * p.gather(1, own)[:, 0] + 1.0
        loss = -log_p.gather(1, own)[:, 0]
        rows = torch.stack([finite, right, near]).double()
        sums = torch.cat([rows.sum(1), torch.stack([loss, brier]).mul(rows[0]).sum(1)])
        self._sums = sums if self._sums is None else self._sums + sums
        self._bins.update(confidence, right, finite)
        if self._confusion is None:
            made = torchmetrics_module().classification.MulticlassConfusionMatrix(
                self.classes, ignore_index=-1, validate_args=False
            )
            self._confusion = made.to(logits.device)
        self._confusion.update(predicted, torch.where(finite, targets, -1))
        self._bad.append(~finite)

    def compute(self) -> ClassificationMetrics:
        """Read the sums; here the host waits."""
        if self._sums is None:
            raise ValueError("no batch was given: there is nothing to compute.")
        bad = torch.cat(self._bad).nonzero()[:, 0].tolist()
        total = sum(len(part) for part in self._bad)
        counted, right, near, loss, brier = self._sums.tolist()
        mean = 1.0 / counted if counted else float("nan")
        return ClassificationMetrics(
            samples=total,
            accuracy=right / total,
            top_k=near / total,
            k=self.k,
            nll=loss * mean,
            brier=brier * mean,
            reliability=self._bins.compute(),
            confusion=self._confusion.compute().long().cpu(),
            nonfinite=tuple(bad),
        )


def classification_metrics(
    logits: Tensor, targets: Tensor, *, bins: int = 15, k: int = 5
) -> ClassificationMetrics:
    """All metrics of logits [N, K] against targets [N] at once."""
    if logits.ndim != 2 or logits.shape[0] == 0:
        raise ValueError(
            f"expected logits [N, K] of at least one sample, got shape {tuple(logits.shape)}."
        )
    meter = ClassificationMeter(logits.shape[1], bins=bins, k=k)
    meter.update(logits, targets)
    return meter.compute()
