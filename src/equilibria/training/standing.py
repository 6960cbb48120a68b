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


@dataclass(frozen=True)
class Ranking:
    """The best epoch by validation: mean IoU or accuracy, and at equal ones the smaller loss."""

    best: tuple[float, float] = (-math.inf, -math.inf)
    epoch: int = 0

    def better(self, row: Mapping[str, Any]) -> bool:
        """Whether the epoch of ``row`` is better than all before."""
        return "val_loss" in row and self.after(row).best > self.best

    def after(self, row: Mapping[str, Any]) -> Ranking:
        """The ranking whose best epoch is that of ``row``."""
        score = (row.get("val_miou", row["val_accuracy"]), -row["val_loss"])
        return Ranking(score, row["epoch"])

    def waited(self, row: Mapping[str, Any]) -> int:
        """Epochs since the best one."""
        return int(row["epoch"]) - self.epoch
