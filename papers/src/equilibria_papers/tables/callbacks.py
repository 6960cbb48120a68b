"""Beside a training: a limit of time, and copies of the weights on the way."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from equilibria.engine import write_bytes
from equilibria.training import Run


@dataclass(frozen=True)
class Stop:
    """When trainings end before their end, in this process or in a worker."""

    until: float | None = None
    """A time of ``time.time()``: other clocks need not agree between processes."""
    file: Path | None = None
    """Where it exists, a stop is asked for."""
    parent: int | None = None
    """The process that waits for this one: where it is gone, nobody does."""

    def late(self) -> bool:
        return self.until is not None and time.time() >= self.until

    def orphaned(self) -> bool:
        return self.parent not in (None, os.getpid(), os.getppid())

    def asked(self) -> bool:
        return self.late() or self.orphaned() or (self.file is not None and self.file.exists())


class StopWhenAsked(pl.Callback):
    """Stops a training as Ctrl-C does, after a step: everything is saved, and can go on.

    It asks the run. A signal would go to the main thread, whichever thread trains.
    """

    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self.stop = stop

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.stop.asked():
            _run(trainer).request.asked = True


def _run(trainer: pl.Trainer) -> Run:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Run):
            return callback
    raise RuntimeError(
        "StopWhenAsked and Snapshots belong to runs of equilibria.training.fit; this trainer is "
        "another's."
    )


def snapshot_epochs(epochs: int) -> tuple[int, ...]:
    """The start, one epoch, a quarter, half, the end (thesis, Figure 4.3)."""
    return (0, 1, max(1, epochs // 4), max(1, epochs // 2), epochs)


class Snapshots(pl.Callback):
    """Writes the weights to ``folder/weights_<epoch>.safetensors`` after chosen epochs."""

    def __init__(self, folder: Path, epochs: tuple[int, ...]) -> None:
        super().__init__()
        self.folder = folder
        self.epochs = frozenset(epochs)
        self.done = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A run resumed inside an epoch has nothing to write. At an epoch's end it writes again: a
        # stop in the validation came before on_train_epoch_end.
        here = _run(trainer).progress
        self.done = here.epoch
        if here.batch == 0:
            self._write(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.done += 1
        self._write(pl_module)

    def _write(self, module: pl.LightningModule) -> None:
        if self.done in self.epochs:
            self.write(module.model, self.done)

    def write(self, model: Any, epoch: int) -> None:
        """Keep the weights of ``model`` as those after ``epoch``."""
        import safetensors.torch

        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bytes(self.path(epoch), safetensors.torch.save(tensors))

    def path(self, epoch: int) -> Path:
        """Where the weights after ``epoch`` are."""
        return self.folder / f"weights_{epoch}.safetensors"
