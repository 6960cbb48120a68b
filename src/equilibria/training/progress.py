"""Progress of a run: counted, shown by Lightning's bar, a line per epoch; its end by Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar

from equilibria.engine.optional import needs

_PAUSE = 0.1  # seconds between two movements of the bar
_WIDE = 132  # columns that the bar, the time and the numbers need
_FORMS = {
    "loss": "loss {:.3f}",
    "accuracy": "acc {:.1%}",
    "solver_steps": "steps {:.1f}",
    "residual": "res {:.1e}",
    "converged": "conv {:.0%}",
    "failed": "failed {:.1%}",
    "samples_per_second": "img/s {:.0f}",
}


@dataclass
class Progress:
    """How far a run has come: whole epochs, batches of the next one, steps in all."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    rate: float = math.nan
    """The learning rate of the latest step."""


class TrainingBar(RichProgressBar):
    """Loss, accuracy, solver steps, residual, share converged, images/s and the time that is left
    of the run beside Lightning's bar; in a narrow terminal without loss and share.

    Where stderr is no terminal only the lines of the epochs are written.
    """

    def __init__(self, progress: Progress, epochs: int) -> None:
        with needs("rich", "a progress bar"):
            from rich.console import Console
        super().__init__(refresh_rate=10, console_kwargs={"stderr": True})
        self._lines = Console(stderr=True)
        self.latest: Mapping[str, float] = {}
        # Epochs are named by it: Lightning counts from that of a resume, and from 0.
        self._run, self._epochs = progress, epochs
        self._moved = 0.0
        self._began, self._done, self._left = 0.0, 0, 0.0
        if not self._lines.is_terminal:
            self.disable()

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        latest = dict(self.latest)
        if self._narrow():
            latest = {k: v for k, v in latest.items() if k not in ("loss", "converged")}
        found: dict[str, Any] = dict(part.split(" ") for part in _numbers(latest))
        return {**found, "left": str(timedelta(seconds=round(self._left)))} if found else {}

    def _narrow(self) -> bool:
        return self._lines.width < _WIDE

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *step: Any
    ) -> None:
        now, total = time.perf_counter(), int(self.total_train_batches)
        last, epochs = step[-1] + 1 == total, self._epochs - self._run.epoch - 1
        self._began = self._began or now  # the first step also warms up
        rest = total - step[-1] - 1 + max(epochs, 0) * total
        self._left = (now - self._began) / max(self._done, 1) * rest
        self._done += 1
        if last or now - self._moved > _PAUSE:  # a movement takes as long as a small step
            self._moved = now
            super().on_train_batch_end(trainer, pl_module, *step)

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        # In a narrow terminal rich would drop the count of batches to make room for the numbers.
        columns = super().configure_columns(trainer)
        return [columns[0], columns[2]] if self._narrow() else columns[:-1]

    def _get_train_description(self, current_epoch: int) -> str:
        return f"epoch {min(self._run.epoch + 1, self._epochs)}/{self._epochs}"

    def say(self, text: str) -> None:
        """Write a line, above the bar where there is one."""
        console = self._console or self._lines
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """The run is over: stop the bar, and give rich's own console back to stdout."""
        if self.progress is not None:
            from rich import reconfigure

            self.progress.stop()
            self.progress = None
            reconfigure()


def _numbers(latest: Mapping[str, float]) -> list[str]:
    return [
        form.format(latest[name])
        for name, form in _FORMS.items()
        if math.isfinite(latest.get(name, math.nan)) and not (name == "failed" and not latest[name])
    ]


def epoch_line(row: Mapping[str, Any], epochs: int) -> str:
    trained = {**row, "loss": row["train_loss"], "accuracy": row["train_accuracy"]}
    parts = [f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}", " · ".join(_numbers(trained))]
    forms = {"val_loss": "loss {:.3f}", "val_accuracy": "acc {:.2%}", "val_miou": "mIoU {:.2%}"}
    held = [form.format(row[name]) for name, form in forms.items() if name in row]
    parts += ["validation " + " · ".join(held)] if held else []
    return "  ".join([*parts, f"{row['seconds']:.1f} s"])


class Interrupted(KeyboardInterrupt):
    """The run was interrupted; ``checkpoint`` is what it can be resumed from, if anything.

    ``exact`` says whether resuming repeats the uninterrupted run bit for bit (on the CPU): it does
    unless this interruption, or an earlier one of the run, cut a step in two. ``folder`` is the run
    to go on with; None: nothing is left to do, or nothing was saved.
    """

    def __init__(
        self,
        message: str,
        checkpoint: Path | None,
        *,
        exact: bool = True,
        folder: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.checkpoint, self.exact, self.folder = message, checkpoint, exact, folder

    def __str__(self) -> str:
        if self.folder is None:
            return self.message
        config, folder = str(self.folder / "config.yaml"), str(self.folder)
        call = f"fit(TrainConfig.from_yaml({config!r}), resume={folder!r})"
        return f"{self.message} Go on with {call}."


class StopRequest:
    """Whether somebody asked to stop: Ctrl-C, SIGTERM, or a callback that sets ``asked``.

    Inside a ``with`` block the first Ctrl-C and every SIGTERM set ``asked``, and the second Ctrl-C
    interrupts at once. Outside the main thread, where Python gives no signals, it changes nothing.
    """

    def __init__(self, say: Callable[[], Any] = lambda: None) -> None:
        self.asked = False
        self.held = False
        """Whether the second Ctrl-C waits: what is being changed belongs together."""
        self._say = say
        self._pressed = False  # not asked: a callback may have set that before the first Ctrl-C
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        self.listen()
        return self

    def listen(self) -> None:
        """Take the signals (again). Lightning's own handler of SIGTERM leaves its loops in the
        middle of a validation, and that epoch would have no result."""
        for number in self._before:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not set by Python; there is no way to put that one back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            if self._pressed and not self.held:
                raise KeyboardInterrupt
            self._pressed = True
        if not self.asked:
            self.asked = True
            self._say()
