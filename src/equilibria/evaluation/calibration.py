"""Calibration: are predictions of confidence p right in p of all cases?

    ECE = Σ_b (n_b/N)·|accuracy_b − confidence_b|

over bins (lo, hi] of the confidence max_k p_k (Guo et al. 2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checks import check_whole

__all__ = ["Reliability", "ReliabilityMeter"]


@dataclass(frozen=True, eq=False)
class Reliability:
    """What happened in each of the B bins of confidence; NaN where a bin is empty."""

    edges: Tensor
    """[B + 1], from 0 to 1."""
    count: Tensor
    """Predictions in each bin, [B]."""
    confidence: Tensor
    """Mean confidence in each bin, [B]."""
    accuracy: Tensor
    """Share of right predictions in each bin, [B]."""

    @property
    def ece(self) -> float:
        """The expected calibration error; NaN without predictions."""
        used = self.count > 0
        if not bool(used.any()):
            return float("nan")
        gap = (self.accuracy[used] - self.confidence[used]).abs()
        return float((self.count[used].double() / self.count.sum() * gap).sum())

    @property
    def mce(self) -> float:
        """The largest gap of a bin; NaN without predictions."""
        used = self.count > 0
        if not bool(used.any()):
            return float("nan")
        return float((self.accuracy[used] - self.confidence[used]).abs().max())

    def to_dict(self) -> dict[str, Any]:
        return {
            "edges": self.edges,
            "count": self.count,
            "confidence": self.confidence,
            "accuracy": self.accuracy,
        }


class ReliabilityMeter:
    """Adds up bins, batch by batch, on the device of the first batch."""

    def __init__(self, bins: int) -> None:
        self.bins = check_whole("bins", bins, 1)
        self._sums: Tensor | None = None

    def update(self, confidence: Tensor, correct: Tensor, counted: Tensor) -> None:
        """confidence [N] in 0 … 1, correct [N] bool; only where ``counted`` [N]."""
        # (lo, hi]: a confidence of exactly hi belongs below, and 1 to the last bin.
        place = (confidence.double() * self.bins).ceil().long().clamp(1, self.bins) - 1
        weight = counted.double()
        rows = torch.stack([weight, weight * confidence.double(), weight * correct.double()])
        rows = torch.where(counted, rows, 0.0)
        found = torch.zeros(3, self.bins, dtype=torch.float64, device=confidence.device)
        found.scatter_add_(1, place.expand(3, -1), rows)
        self._sums = found if self._sums is None else self._sums + found

    def compute(self) -> Reliability:
        sums = self._sums
        sums = torch.zeros(3, self.bins, dtype=torch.float64) if sums is None else sums.cpu()
        count, confidence, correct = sums
        edges = torch.linspace(0.0, 1.0, self.bins + 1, dtype=torch.float64)
        return Reliability(edges, count.long(), confidence / count, correct / count)
