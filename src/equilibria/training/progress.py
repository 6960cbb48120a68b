"""What the user sees while a run goes on: Lightning's bar on stderr, and a line for each epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import rich
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console

__all__ = ["TrainingBar", "epoch_line"]

_WIDE = 110  # columns that the bar, the time and the numbers need
_FORMS = {
    "loss": "loss {:.3f}",
    "accuracy": "acc {:.1%}",
    "solver_steps": "steps {:.1f}",
    "residual": "res {:.1e}",
    "converged": "conv {:.0%}",
    "failed": "failed {:.1%}",
}


class TrainingBar(RichProgressBar):
    """Loss, accuracy, solver steps, residual and share converged beside Lightning's bar.

    Where stderr is no terminal only the lines of the epochs are written; with ``quiet`` nothing is.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(refresh_rate=10, console_kwargs={"stderr": True})
        self.quiet = quiet
        self.latest: Mapping[str, float] = {}
        self.title = ""
        if quiet or not Console(stderr=True).is_terminal:
            self.disable()

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        return dict(part.split(" ") for part in _numbers(self.latest))

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        # In a narrow terminal rich would drop the count of batches to make room for the numbers.
        columns = super().configure_columns(trainer)
        narrow = Console(stderr=True).width < _WIDE
        return [columns[0], columns[2]] if narrow else columns[:-1]

    def _get_train_description(self, current_epoch: int) -> str:
        return self.title  # Lightning counts from the epoch of a resume, and from zero

    def say(self, text: str) -> None:
        """Write a line, above the bar where there is one."""
        if not self.quiet:
            console = self._console or Console(stderr=True)
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """The run is over: stop the bar, and give rich's own console back to stdout."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
            rich.reconfigure()


def _numbers(latest: Mapping[str, float]) -> list[str]:
    """["loss 0.412", "acc 87.5%", "steps 4.0", "res 3.1e-03", "conv 100%"]."""
    return [
        form.format(latest[name])
        for name, form in _FORMS.items()
        if math.isfinite(latest.get(name, math.nan)) and not (name == "failed" and not latest[name])
    ]


def epoch_line(row: Mapping[str, Any], epochs: int) -> str:
    """The line of a finished epoch."""
    trained = {**row, "loss": row["train_loss"], "accuracy": row["train_accuracy"]}
    parts = [f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}", " · ".join(_numbers(trained))]
    forms = {"val_loss": "loss {:.3f}", "val_accuracy": "acc {:.2%}", "val_miou": "mIoU {:.2%}"}
    held = [form.format(row[name]) for name, form in forms.items() if name in row]
    parts += ["validation " + " · ".join(held)] if held else []
    return "  ".join([*parts, f"{row['seconds']:.1f} s"])
