"""The folder of a run: its files, the checkpoint to resume from, where the numbers came from.

A checkpoint holds, besides Lightning's own entries, the entry ``equilibria``: the configuration,
and how far the run had come. Lightning's entry ``loops`` is left out: a resumed run is a new fit
over the epochs that are left, whose first one begins after the batches that were done.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import pickletools
import platform
import random
import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from equilibria import models
from equilibria._version import __version__
from equilibria.engine.files import SaveError, remove_parts, write_bytes, write_text

from .config import TrainConfig
from .lock import FolderLock, RunInUseError
from .run_data import RunData

ENTRY = "equilibria"
FORMAT = 3
_READ = (2, FORMAT)  # 2 also held the best epoch, which the history says
MOST_VALUES = 2**22
"""Tensors, numbers and texts of a checkpoint."""


class RunExistsError(FileExistsError):
    """``folder`` holds a run already, and nobody said what to do with it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def __str__(self) -> str:
        resume = ""
        if RunFolder(self.folder).checkpoint.exists():
            resume = f"Resume it (resume={str(self.folder)!r}), replace"
        return (
            f"{self.folder} already holds a run. {resume or 'Replace'} it (overwrite=True), or set "
            "another folder (out=...)."
        )


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
        saved = (self.checkpoint, self.weights, self.result, self.nonfinite)
        self._files = (self.config, self.history, *saved)
        self.lock = FolderLock(path / "run.lock")
        self._opened = False

    def epoch(self, number: int) -> Path:
        return self.epochs / f"epoch_{number:04d}.safetensors"

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder that holds a run or in which one is going on, unless that is wanted.

        What a run left that saved nothing to go on from is no run: it may be started again.
        Changes nothing but the lock, which is taken where the folder exists.
        """
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"{self.path} is a file; a run needs a folder.")
        if self.path.exists():
            with self._usable():
                self.lock.take()
        holds = any(file.exists() for file in (*self._files, self.logs))
        if self.lock.stale and not self._saved():
            holds = False
        if holds and not resume and not overwrite:
            raise RunExistsError(self.path)

    def open(self, *, resume: bool, overwrite: bool = False) -> None:
        """Make and lock the folder. Without ``resume`` remove the files of a run that was there,
        and only those; what a write that was killed left behind is always removed."""
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
        if not self.lock.held():  # another run may have come first
            self.check(resume=resume, overwrite=overwrite)
        self._opened = True
        kept = list(self.epochs.glob("epoch_[0-9][0-9][0-9][0-9].safetensors"))
        if overwrite and self.result.exists():  # of a run that ended: `equilibria train` wrote it
            kept.append(self.path / "report.html")
        if not resume:
            for file in (*self._files, *kept):
                file.unlink(missing_ok=True)
            for log in (self.logs, *self.path.glob("csv/version_[0-9]*")):  # CSVLogger's folders
                if log.is_dir() and not log.is_symlink():
                    shutil.rmtree(log)
        parts = self.epochs.glob(".epoch_[0-9][0-9][0-9][0-9].safetensors.*.part")
        for file in (*self._files, *(part.with_name(part.name[1:23]) for part in parts)):
            remove_parts(file)

    def close(self) -> None:
        """Release the lock; its file stays where a run began and left nothing to go on from."""
        began = self._opened or self.lock.stale
        self.lock.release(keep=began and not self._saved())

    def advice(self) -> str:
        """How to go on after an error."""
        if self.checkpoint.exists():
            return f"The checkpoint {self.checkpoint} is complete: resume from it."
        return "No checkpoint was written yet: start the run again."

    def _saved(self) -> bool:
        return any(file.exists() for file in (self.checkpoint, self.result, self.nonfinite))

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except RunInUseError:
            raise
        except OSError as error:
            what = f"cannot make the folder {self.path}, or write to it: {error.strerror}"
            raise OSError(error.errno, f"{what}; set another one as out.") from error

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
                state = model.state_dict().items()
                tensors = {k: v.detach().cpu().contiguous().clone() for k, v in state}
                metadata = {"library": __version__, "extra": json.dumps(extra)}
                write_bytes(path, safetensors.torch.save(tensors, metadata))
        except OSError as error:
            why = str(error.strerror or error)
            if not isinstance(error, SaveError):
                why = f"could not write {path}: {why}. Free some space"
            raise SaveError(error.errno, f"{why}. {self.advice()}") from error


def provenance(started: datetime, device: torch.device, seed: int) -> dict[str, Any]:
    """What made the numbers: the command, versions, the machine, the time."""
    import lightning

    # What was typed: the program by its name, without the folder it lies in.
    program, now = Path(sys.argv[0]).name, datetime.now(UTC)
    program = "equilibria" if program == "__main__.py" else program
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "command": shlex.join([program, *sys.argv[1:]]),
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


# What may change on resume: none of it changes what is computed, beyond rounding.
# fmt: off
_FREE = frozenset({
    "out", "data_root", "download", "workers", "log_every", "loggers", "on_corrupt", "keep_every",
    "accelerator", "devices", "nodes", "strategy", "compile", "cuda_graphs", "early_stop",
    "process_timeout",
})
# fmt: on


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that does not belong to this run."""


class CheckpointFile(TorchCheckpointIO):
    """Lightning's way to a file, whole or not at all; loads only tensors and plain values."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        # To memory first: torch's own writer hides the error of a failed write behind another.
        buffer = io.BytesIO()
        checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(True)  # read_checkpoint relies on them
        try:
            torch.save(checkpoint, buffer)
        finally:
            torch.serialization.set_crc32_options(checksums)
        write_bytes(path, buffer.getbuffer())

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path))


def find_checkpoint(given: str | Path) -> Path:
    """The checkpoint that ``resume`` names: a file, or a run folder that holds last.ckpt."""
    path = Path(given)
    found = path / "last.ckpt" if path.is_dir() else path
    if found.is_file():
        return found
    config = found.parent / "config.yaml"
    if path.is_dir() and config.is_file():
        raise CheckpointError(
            f"the run in {path} has no checkpoint yet: there is nothing to resume. If it has "
            f"ended, start it again without resume, with its configuration {config}."
        )
    raise CheckpointError(
        f"there is no checkpoint {found}. Give the file or the folder of a run; a run has one "
        "after its first epoch."
    )


def find_place(config: TrainConfig, checkpoint: Path | None) -> Path:
    """The folder of the run. One that is resumed stays where it lies, also after it was moved or
    from another current folder: what its config.yaml says of ``out`` is no wish for another."""
    if checkpoint is None:
        return config.folder
    own = None
    with contextlib.suppress(OSError, TypeError, ValueError):
        own = TrainConfig.from_yaml(checkpoint.parent / "config.yaml").out
    return checkpoint.parent if config.out in (None, own) else Path(config.out)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read one of our checkpoints, tensors on the CPU; anything else is an error, never run."""
    try:
        _check_archive(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
        _check_values(found)
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: it is damaged, cut short or of another kind "
            f"({why}). Resume from an older copy, or delete it and start the run again."
        ) from error
    entry = found.get(ENTRY) if isinstance(found, dict) else None
    if not isinstance(entry, Mapping) or "state_dict" not in found:
        raise CheckpointError(
            f"{path} is not a checkpoint of equilibria.training: it lacks the entry {ENTRY!r}. "
            "A file of weights alone, model.safetensors, cannot be resumed; models.load reads it."
        )
    if entry.get("format") not in _READ:
        raise CheckpointError(
            f"{path} has format {entry.get('format')!r}, and this version reads {_READ}. "
            f"Finish the run with equilibria {entry.get('version')}, which wrote it, or start a "
            "new one."
        )
    assert isinstance(found, dict)
    return found


def _check_archive(path: Path) -> None:
    """Raise unless every record is whole, by the checksum (CRC-32) that torch.save stores with it,
    and none is larger than the file: what is not compressed cannot expand. torch.load checks
    neither."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
        size, most = sum(record.file_size for record in records), path.stat().st_size
        if packed or size > most:
            raise ValueError(
                f"its records are compressed or overlap, {size:,} bytes in a file of {most:,}; "
                "torch.save writes no such file, and no option reads one"
            )
        wrong = archive.testzip()
        if wrong is not None:
            raise ValueError(f"the checksum of {wrong} does not match")
        for name in archive.namelist():
            if name.endswith("/data.pkl"):
                _check_names(archive.read(name))


# torch.load calls these with a number and allocates as much; torch.save writes none of them for
# tensors and plain values.
_SIZED = re.compile(r"(__builtin__|builtins)\.bytearray|torch\..*(Tensor|(Untyped|Typed)Storage)")


def _check_names(pickled: bytes) -> None:
    for opcode, name, _ in pickletools.genops(pickled):
        named = str(name).replace(" ", ".")
        if opcode.name == "STACK_GLOBAL" or (opcode.name == "GLOBAL" and _SIZED.fullmatch(named)):
            raise ValueError(f"it names {named}, of which it could ask for any size")


def _check_values(found: Any) -> None:
    """Raise for a tensor of more values than are stored, of which a copy could take any size, and
    for lists in lists that are one list many times."""
    waiting, count = [found], 0
    while waiting:
        value, count = waiting.pop(), count + 1
        if isinstance(value, torch.Tensor):
            strided = value.layout == torch.strided and value.device.type == "cpu"
            if not strided or value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(f"it holds a tensor {tuple(value.shape)} of fewer stored values")
        elif isinstance(value, (Mapping, list, tuple)):
            waiting += value.values() if isinstance(value, Mapping) else value
        if count + len(waiting) > MOST_VALUES:
            raise ValueError(
                f"it holds more than {MOST_VALUES:,} values; the limit is "
                "equilibria.training.run_folder.MOST_VALUES"
            )


def check_checkpoint(
    path: Path, checkpoint: Mapping[str, Any], config: TrainConfig, model: nn.Module, data: RunData
) -> None:
    saved = TrainConfig(**checkpoint[ENTRY]["config"])
    differ = {k: v for k, v in config.differences(saved).items() if k not in _FREE}
    shares = config.half_steps or config.warmup_share
    if config.schedule in ("constant", "step") and not shares:
        differ.pop("epochs", None)  # nothing looks at the end of the run
    if config.warmup_share == saved.warmup_share:
        differ.pop("warmup", None)
    if differ:
        rows = [f"  {name}: now {now!r}, then {then!r}" for name, (now, then) in differ.items()]
        raise CheckpointError(
            f"{path} belongs to a run with other options:\n"
            + "\n".join(rows)
            + "\nResume with the configuration saved beside it (config.yaml), or start a new run."
        )
    now = len(data.train)
    then = checkpoint[ENTRY].get("images", now)  # earlier checkpoints do not say
    if then != now:
        raise CheckpointError(
            f"{path} belongs to a run on other data: it trained on {then:,} images, and there are "
            f"{now:,} now. Give the data as they were, or start a new run."
        )
    then, now = checkpoint[ENTRY].get("revision", 0), config.model_revision
    if then != now:
        raise CheckpointError(
            f"{path} was begun with other defaults of {config.model} (revision {then}, now {now}; "
            "the changelog says what changed): going on would train two networks in one. Start a "
            "new run."
        )
    state = checkpoint["state_dict"].items()
    stored = {(k.removeprefix("model."), tuple(v.shape)) for k, v in state if k[:6] == "model."}
    built = {(name, tuple(value.shape)) for name, value in model.state_dict().items()}
    sides = (("checkpoint", stored - built), ("model", built - stored))
    rows = sorted(
        f"  {name} {shape}: in the {side} only" for side, found in sides for name, shape in found
    )
    if rows:
        more = [f"  and {len(rows) - 6} more"] if len(rows) > 6 else []
        raise CheckpointError(
            f"{path} holds the weights of another model than {type(model).__name__}:\n"
            + "\n".join(rows[:6] + more)
        )


def seed_all(seed: int) -> None:
    """Seed torch (every device), Python and, where it is loaded, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """Where all generators stand, in tensors and numbers that ``weights_only`` can load."""
    state = _collect_rng_states(include_cuda=torch.cuda.is_initialized())
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back to where ``random_state`` found them."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = {name: value for name, value in state.items() if name != "torch.cuda"}
    _set_rng_states({**known, "torch.cuda": state.get("torch.cuda", [])[:devices]})
