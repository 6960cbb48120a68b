"""Where a run stands, and which of its epochs was the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Ranking", "Standing"]


@dataclass
class Standing:
    """How far a run has come: whole epochs, batches of the next one, steps in all."""

    epoch: int = 0
    batch: int = 0
    step: int = 0


@dataclass
class Ranking:
    """The best epoch by validation: mean IoU or accuracy, and at equal ones the smaller loss."""

    best: tuple[float, float] = (-math.inf, -math.inf)
    epoch: int = 0

    def improved_by(self, row: Mapping[str, Any]) -> bool:
        """Whether the epoch of ``row`` is better than all before; it is then the best."""
        if "val_loss" not in row:
            return False
        score = (row.get("val_miou", row["val_accuracy"]), -row["val_loss"])
        if not score > self.best:
            return False
        self.best, self.epoch = score, row["epoch"]
        return True

    def waited(self, row: Mapping[str, Any]) -> int:
        """Epochs since the best one."""
        return int(row["epoch"]) - self.epoch
