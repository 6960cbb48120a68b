"""What the user sees while a run goes on: one line that moves, and one line for every epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from .extras import need

__all__ = ["RichDisplay", "SilentDisplay", "epoch_line"]

_REFRESH = 0.1  # seconds between two movements of the bar
_WIDE = 110  # columns that the bar, the time and the numbers in full words need


class SilentDisplay:
    """Shows nothing; the base of those that do."""

    def start(self, epochs: int, per_epoch: int, epoch: int, batch: int) -> None:
        """A run begins, or goes on after ``epoch`` epochs and ``batch`` batches of the next."""

    def step(self, epoch: int, batch: int) -> None:
        """A step was taken."""

    def numbers(self, latest: Mapping[str, float]) -> None:
        """New numbers were read from the device."""

    def validating(self) -> None:
        """Validation begins."""

    def epoch(self, row: Mapping[str, Any], epochs: int) -> None:
        """An epoch is complete."""

    def say(self, text: str) -> None:
        """Tell the user something."""

    def close(self) -> None:
        """The run is over."""


class RichDisplay(SilentDisplay):
    """A bar on stderr with loss, accuracy, solver steps, residual and share converged.

    Where stderr is no terminal only the lines of the epochs are written.
    """

    def __init__(self) -> None:
        need("rich")
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = Console(stderr=True, highlight=False)
        # In a narrow terminal rich would drop the count of batches to make room for the numbers.
        self._short = self._console.width < _WIDE
        wide = [] if self._short else [BarColumn(bar_width=20), TimeRemainingColumn()]
        self._bar = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            *wide,
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: Any = None
        self._moved = 0.0
        self._epochs = self._per_epoch = 0

    def start(self, epochs: int, per_epoch: int, epoch: int, batch: int) -> None:
        self._epochs, self._per_epoch = epochs, per_epoch
        self._bar.start()
        self._task = self._bar.add_task(
            self._title(epoch), total=per_epoch, completed=batch, numbers=""
        )

    def _title(self, epoch: int) -> str:
        return f"epoch {min(epoch + 1, self._epochs)}/{self._epochs}"

    def step(self, epoch: int, batch: int) -> None:
        now = time.perf_counter()
        if now - self._moved > _REFRESH or batch == self._per_epoch:
            self._moved = now
            self._bar.update(self._task, completed=batch, description=self._title(epoch))

    def numbers(self, latest: Mapping[str, float]) -> None:
        self._bar.update(self._task, numbers=_numbers(latest, short=self._short))

    def validating(self) -> None:
        self._bar.update(self._task, description="validating")

    def epoch(self, row: Mapping[str, Any], epochs: int) -> None:
        self._console.print(epoch_line(row, epochs), markup=False, soft_wrap=True)
        self._bar.reset(self._task, total=self._per_epoch, description=self._title(row["epoch"]))

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


_FORMS = {
    "loss": ("loss {:.3f}", "loss {:.3f}"),
    "accuracy": ("acc {:.1%}", "acc {:.0%}"),
    "solver_steps": ("{:.1f} steps", "{:.1f} steps"),
    "residual": ("residual {:.1e}", "res {:.0e}"),
    "converged": ("{:.0%} converged", "{:.0%} conv"),
    "failed": ("{:.1%} failed", "{:.0%} failed"),
}


def _numbers(latest: Mapping[str, float], *, short: bool = False) -> str:
    """loss 0.412 · acc 87.5% · 4.0 steps · residual 3.1e-03 · 100% converged."""
    parts = []
    for name, forms in _FORMS.items():
        form = forms[short]
        value = latest.get(name, math.nan)
        if math.isfinite(value) and not (name == "failed" and value == 0.0):
            parts.append(form.format(value))
    return " · ".join(parts)


def epoch_line(row: Mapping[str, Any], epochs: int) -> str:
    """The line of a finished epoch."""
    trained = {
        "loss": row["train_loss"],
        "accuracy": row["train_accuracy"],
        **{k: row[k] for k in ("solver_steps", "residual", "converged", "failed") if k in row},
    }
    parts = [f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}", _numbers(trained)]
    held = []
    for name, form in (
        ("val_loss", "loss {:.3f}"),
        ("val_accuracy", "acc {:.2%}"),
        ("val_miou", "mIoU {:.2%}"),
    ):
        if isinstance(row.get(name), float):
            held.append(form.format(row[name]))
    if held:
        parts.append("validation " + " · ".join(held))
    parts.append(f"{row['seconds']:.1f} s")
    return "  ".join(parts)
