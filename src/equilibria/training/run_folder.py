"""The folder of a run: its files, who may write there, and where the numbers came from."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from equilibria import models
from equilibria._version import __version__
from equilibria.engine.files import SaveError, write_bytes, write_text

from .config import TrainConfig
from .run_data import RunData

__all__ = ["RunExistsError", "RunFolder", "provenance"]


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
        self.logs = path / "tensorboard"
        self.epochs = path / "epochs"
        self._files = (self.config, self.history, self.checkpoint, self.weights, self.result)

    def epoch(self, number: int) -> Path:
        """Where the weights of an epoch are kept."""
        return self.epochs / f"epoch_{number:04d}.safetensors"

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder that holds a run, unless that is what is wanted. Changes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"{self.path} is a file; a run needs a folder: set out=...")
        holds = any(file.exists() for file in (*self._files, self.nonfinite, self.logs))
        if holds and not resume and not overwrite:
            raise RunExistsError(
                f"{self.path} already holds a run. Resume it (resume={str(self.path)!r}), replace "
                "it (overwrite=True), or set another folder (out=...)."
            )

    def open(self, *, resume: bool) -> None:
        """Make the folder; without ``resume`` remove the files of a run that was there, and only
        those."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot make the folder {self.path}: {error.strerror}; set out=..."
            ) from error
        if not os.access(self.path, os.W_OK):
            raise PermissionError(f"{self.path} cannot be written to; set another folder (out=...)")
        if not resume:
            kept = self.epochs.glob("epoch_[0-9][0-9][0-9][0-9].safetensors")
            for file in (*self._files, self.nonfinite, *kept):
                file.unlink(missing_ok=True)
            if self.logs.is_dir() and not self.logs.is_symlink():
                shutil.rmtree(self.logs)

    def write_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The whole table anew: a resumed run has no row twice."""
        names = dict.fromkeys(name for row in rows for name in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.history, text.getvalue())

    def write_weights(
        self,
        path: Path,
        model: nn.Module,
        data: RunData,
        config: TrainConfig,
        metrics: Mapping[str, Any],
    ) -> None:
        """The weights, what the model is, and what one needs to use it."""
        train = data.train
        extra = {
            "classes": list(train.classes),
            "mean": list(train.mean),
            "std": list(train.std),
            "task": train.task,
            "ignore_index": train.ignore_index,
            "image_size": [int(n) for n in train.images.shape[2:]],
            "data": train.name,
            # None where the held-out images were given and not split off.
            "validation": None if data.kept is None else config.validation,
            "split_seed": None if data.kept is None else config.seed,
            "metrics": {k: v for k, v in metrics.items() if isinstance(v, (int, float))},
        }
        try:
            path.parent.mkdir(exist_ok=True)
            if isinstance(getattr(model, "config", None), models.ModelConfig):
                models.save(model, path, extra=extra)
            else:  # a module of the user's own: no configuration to build it from
                state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
                tensors = {name: value.clone() for name, value in state.items()}
                metadata = {"library": __version__, "extra": json.dumps(extra)}
                write_bytes(path, safetensors.torch.save(tensors, metadata))
        except OSError as error:
            raise SaveError(
                error.errno,
                f"could not write {path}: {error.strerror or error}. The checkpoint beside it is "
                f"complete: free some space and resume from {self.path}",
            ) from error


def provenance(started: datetime, device: torch.device, seed: int) -> dict[str, Any]:
    """What made the numbers: the command, versions, the machine, the time."""
    import lightning

    program, now = Path(sys.argv[0]), datetime.now(UTC)
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        # What was typed: the program by its name, without the folder it lies in.
        "command": shlex.join(
            ["equilibria" if program.name == "__main__.py" else program.name, *sys.argv[1:]]
        ),
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
