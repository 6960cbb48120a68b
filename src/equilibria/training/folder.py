"""The folder of a run: its files, who may write there, and where the numbers came from."""

from __future__ import annotations

import csv
import io
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from equilibria._version import __version__

from .config import TrainConfig
from .storing import write_json, write_text

__all__ = ["RunExistsError", "RunFolder", "provenance"]

_FILES = (
    *("config.yaml", "history.csv", "last.ckpt", "model.safetensors", "result.json"),
    "nonfinite.json",
)
_LOGS = "tensorboard"
_EPOCHS = "epochs"


class RunExistsError(FileExistsError):
    """The folder holds a run already, and nobody said what to do with it."""


class RunFolder:
    """Paths and files of a run under ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.history = path / "history.csv"
        self.checkpoint = path / "last.ckpt"
        self.weights = path / "model.safetensors"
        self.result = path / "result.json"
        self.nonfinite = path / "nonfinite.json"
        self.logs = path / _LOGS
        self.epochs = path / _EPOCHS

    def epoch(self, number: int) -> Path:
        """Where the weights of an epoch are kept; its folder is made."""
        self.epochs.mkdir(exist_ok=True)
        return self.epochs / f"epoch_{number:04d}.safetensors"

    def holds_run(self) -> bool:
        """Whether a run has been here."""
        return any((self.path / name).exists() for name in (*_FILES, _LOGS))

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder that holds a run, unless that is what is wanted. Changes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"{self.path} is a file; a run needs a folder: set out=...")
        if self.holds_run() and not resume and not overwrite:
            raise RunExistsError(
                f"{self.path} already holds a run. Resume it (resume={str(self.path)!r}), replace "
                "it (overwrite=True), or set another folder (out=...)."
            )

    def open(self, *, resume: bool) -> None:
        """Make the folder; without ``resume`` remove the files of a run that was there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot make the folder {self.path}: {error.strerror}; set out=..."
            ) from error
        if not os.access(self.path, os.W_OK):
            raise PermissionError(f"{self.path} cannot be written to; set another folder (out=...)")
        if not resume:
            self.clear()

    def clear(self) -> None:
        """Remove the files of a run, and only those."""
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        if self.logs.is_dir() and not self.logs.is_symlink():
            shutil.rmtree(self.logs)
        for kept in self.epochs.glob("epoch_[0-9][0-9][0-9][0-9].safetensors"):
            kept.unlink()

    def write_config(self, config: TrainConfig) -> None:
        write_text(self.config, config.to_yaml())

    def write_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The whole table anew: a resumed run has no row twice."""
        names: dict[str, None] = {}
        for row in rows:
            names |= dict.fromkeys(row)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.history, text.getvalue())

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_json(self.result, result)


def _command() -> str:
    """What was typed: the program by its name, without the folder it lies in."""
    program = Path(sys.argv[0])
    name = "equilibria" if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def provenance(started: datetime, device: torch.device, seed: int) -> dict[str, Any]:
    """What made the numbers: the command, versions, the machine, the time."""
    import lightning

    now = datetime.now(UTC)
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "command": _command(),
        "version": __version__,
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "seed": seed,
        "started": started.isoformat(timespec="seconds"),
        "finished": now.isoformat(timespec="seconds"),
        "seconds": round((now - started).total_seconds(), 3),
    }
