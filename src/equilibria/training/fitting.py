"""``fit``: from a configuration to a trained model in a folder."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
from torch import nn

from equilibria.data import ImageData

from .config import TrainConfig
from .extras import need
from .progress import RichDisplay, SilentDisplay
from .randomness import keep_random_state
from .running import Run, TrainResult, process_rank

__all__ = ["TrainResult", "fit"]


def fit(
    config: TrainConfig,
    *,
    resume: str | Path | None = None,
    data: tuple[ImageData, ImageData | None] | None = None,
    progress: bool = True,
    model: nn.Module | None = None,
    overwrite: bool = False,
    callbacks: Sequence[pl.Callback] = (),
) -> TrainResult:
    """Train a model as the configuration says, and write the run to its folder.

    Args:
        config: what to train, on what, how, where to.
        resume: a checkpoint or the folder of a run, to go on from there. On one CPU the resumed run
            repeats the uninterrupted one bit for bit, from the end of an epoch and from Ctrl-C.
        data: (training, validation) instead of what ``config.data`` names; the second may be None.
        progress: whether to show a bar and the lines of the epochs on stderr.
        model: a network instead of the one that ``config.model`` names.
        overwrite: whether a run that is in the folder may be replaced.
        callbacks: of Lightning, beside our own.

    Raises:
        NonFiniteLoss: the loss became NaN; the report is in nonfinite.json.
        Interrupted: Ctrl-C; the run was saved, the message says how to go on.
        CheckpointError: ``resume`` is no checkpoint, or one of another run.
        RunExistsError: the folder holds a run, and neither resume nor overwrite was given.
        SaveError: a file could not be written, say on a full disk; the older one is intact.
    """
    if not isinstance(config, TrainConfig):
        raise TypeError(
            f"fit takes a TrainConfig, got {type(config).__name__}; TrainConfig.from_yaml(path) "
            "reads a file."
        )
    need("safetensors")  # now, not when the weights are to be saved
    display = RichDisplay() if progress and process_rank() == 0 else SilentDisplay()
    try:
        with keep_random_state(), _quiet():
            return Run(config, resume, data, model, display, overwrite, tuple(callbacks)).go()
    finally:
        display.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's remarks on what it found and what one could buy; warnings stay."""
    loggers = [logging.getLogger(n) for n in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Lightning looks for workers of a DataLoader; our batches are made on the device.
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            # Lightning's use of a part of torch that has a new name.
            warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
