"""A Lightning callback that measures the tangent kernel of the model along a run."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from pathlib import Path
from typing import Any, Literal

from torch import nn

from equilibria_papers.theory.extras import lightning_module

from .probe import KernelProbe

lightning_module()  # says what to install where it is missing

import lightning.pytorch as pl  # noqa: E402

__all__ = ["KernelMonitor"]


class KernelMonitor(pl.Callback):
    """Measure a ``KernelProbe`` at the start and every so many epochs or steps.

    ``rows`` holds what was found: λ_min, λ_max, condition, drift, the distance ‖θ − θ_0‖ and, with
    targets, the loss, ‖∇L‖²/(2L) and its bound by λ_min. Each number also goes to the trainer's
    loggers and to its ``callback_metrics`` as ``name/…``. The run itself is not changed: the model
    is measured in eval mode, on its own, and no random number is drawn.

    Args:
        probe: the batch, and what is computed on it.
        every: measure every so many ``unit``s.
        unit: "epoch" or "step" (of the optimizer).
        name: before the names of the logged numbers; two monitors of a run need two names.
        model: what to measure; None: ``module.model`` where there is one, or the module itself.
        file: a CSV file of the rows, written whole after each measurement.
    """

    def __init__(
        self,
        probe: KernelProbe,
        *,
        every: int = 1,
        unit: Literal["epoch", "step"] = "epoch",
        name: str = "ntk",
        model: nn.Module | None = None,
        file: str | Path | None = None,
    ) -> None:
        if unit not in ("epoch", "step"):
            raise ValueError(f"unit={unit!r}: expected 'epoch' or 'step'.")
        if type(every) is not int or every < 1:
            raise ValueError(f"every={every!r}: expected a positive integer.")
        self.probe, self.every, self.unit, self.name = probe, every, unit, name
        self.model = model
        self.file = None if file is None else Path(file)
        self.rows: list[dict[str, float]] = []
        self.step = self.epoch = 0
        self._seen = 0

    @property
    def state_key(self) -> str:
        return f"KernelMonitor{{{self.name}}}"

    def ball(self) -> dict[str, float]:
        """Uniform conditioning along the run: radius, and λ_min and λ_max over what was visited."""
        if not self.rows:
            raise ValueError("nothing was measured yet: give the monitor to a trainer first.")
        return {
            "radius": max(row["moved"] for row in self.rows),
            "lambda_min": min(row["lambda_min"] for row in self.rows),
            "lambda_max": max(row["lambda_max"] for row in self.rows),
        }

    # ------------------------------------------------------------------ Lightning's hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if "FSDP" in type(trainer.strategy).__name__:
            raise ValueError(
                "KernelMonitor needs all parameters in one place, and FSDP shards them; use "
                "strategy 'ddp' or 'auto'."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seen = trainer.global_step
        if not self.rows:
            self._measure(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        moved, self._seen = trainer.global_step > self._seen, trainer.global_step
        self.step += moved
        if self.unit == "step" and moved and self.step % self.every == 0:
            self._log(pl_module, self._measure(trainer, pl_module), on_step=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epoch += 1
        if self.unit == "epoch" and self.epoch % self.every == 0:
            self._log(pl_module, self._measure(trainer, pl_module), on_step=False)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": [dict(row) for row in self.rows],
            "step": self.step,
            "epoch": self.epoch,
            "probe": self.probe.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [dict(row) for row in state_dict["rows"]]
        self.step, self.epoch = state_dict["step"], state_dict["epoch"]
        self.probe.load_state_dict(state_dict["probe"])

    # ------------------------------------------------------------------ measuring

    def _measure(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, float]:
        """A row; on the first process only, as all hold the same weights."""
        if not trainer.is_global_zero:
            return {}
        inner = getattr(pl_module, "model", None)
        own = inner if isinstance(inner, nn.Module) else pl_module
        found = self.probe.measure(own if self.model is None else self.model)
        self.rows.append({"step": self.step, "epoch": self.epoch, **found})
        for logger in trainer.loggers:
            logger.log_metrics(self._named(found), step=self.step)
        if self.file is not None:
            _write(self.file, self.rows)
        return found

    def _named(self, found: dict[str, float]) -> dict[str, float]:
        return {f"{self.name}/{key}": value for key, value in found.items()}

    def _log(
        self, pl_module: pl.LightningModule, found: dict[str, float], *, on_step: bool
    ) -> None:
        """To callback_metrics; loggers have had it, at the step where it was measured."""
        if found:
            pl_module.log_dict(
                self._named(found),
                logger=False,
                on_step=on_step,
                on_epoch=not on_step,
                rank_zero_only=True,
            )


def _write(path: Path, rows: list[dict[str, float]]) -> None:
    """The whole file, or the one before it."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text.getvalue(), encoding="utf-8")
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
