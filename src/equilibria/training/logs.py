"""Scalars for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .extras import need

__all__ = ["ScalarLog"]


class ScalarLog:
    """Writes numbers under ``folder``; after a resume, what came later than ``step`` is dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        board: Any = need("tensorboard")
        self._writer = board.SummaryWriter(str(folder), purge_step=step or None)

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """``group/name`` = value at ``step``; what is not a finite number is left out."""
        for name, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
