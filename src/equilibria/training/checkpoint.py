"""Checkpoints: written whole, read without unpickling code, checked against the run they are for.

A checkpoint holds, besides Lightning's own entries (weights, optimizer, schedule, callbacks), the
entry ``equilibria``: the configuration, and how far the run had come. Lightning's entry ``loops``
is left out: a resumed run is a new fit over the epochs that are left, whose first one begins after
the batches that were done.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from equilibria.engine.files import write_bytes

from .config import TrainConfig

__all__ = ["ENTRY", "FORMAT", "CheckpointError", "CheckpointFile", "check_checkpoint"]
__all__ += ["find_checkpoint", "random_state", "read_checkpoint", "restore_random_state"]
__all__ += ["seed_all"]

ENTRY = "equilibria"
FORMAT = 2

# What may change on resume: none of it changes what is computed, beyond rounding.
_FREE = frozenset(
    {
        *("out", "data_root", "download", "workers", "log_every", "loggers", "on_corrupt"),
        *("keep_every", "accelerator", "devices", "nodes", "strategy", "compile", "cuda_graphs"),
        "early_stop",
    }
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that does not belong to this run."""


class CheckpointFile(TorchCheckpointIO):
    """Lightning's way to a file, through one beside it: a full disk leaves the old checkpoint.
    Loads only tensors and plain values, whatever is asked for."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        # To memory first: torch's own writer hides the error of a failed write behind another.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_bytes(path, buffer.getbuffer())

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path))


def find_checkpoint(given: str | Path) -> Path:
    """The checkpoint that ``resume`` names: a file, or a run folder that holds last.ckpt."""
    path = Path(given)
    found = path / "last.ckpt" if path.is_dir() else path
    if not found.is_file():
        raise CheckpointError(
            f"there is no checkpoint {found}. Give the file or the folder of a run; a run has one "
            "after its first epoch."
        )
    return found


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read one of our checkpoints, tensors on the CPU; anything else is an error, never run."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: it is damaged, cut short or of another kind "
            f"({why})."
        ) from error
    entry = found.get(ENTRY) if isinstance(found, dict) else None
    if not isinstance(entry, Mapping) or "state_dict" not in found:
        raise CheckpointError(
            f"{path} is not a checkpoint of equilibria.training: it lacks the entry {ENTRY!r}. "
            "Weights alone (model.safetensors) are loaded with models.load."
        )
    if entry.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {entry.get('format')!r}, and this version reads format {FORMAT}. "
            f"Finish the run with equilibria {entry.get('version')}, which wrote it, or start a "
            "new one."
        )
    assert isinstance(found, dict)
    return found


def check_checkpoint(
    path: Path, checkpoint: Mapping[str, Any], config: TrainConfig, model: nn.Module
) -> None:
    """Raise unless the checkpoint is one of this configuration and this model."""
    saved = TrainConfig(**checkpoint[ENTRY]["config"])
    differ = {k: v for k, v in config.differences(saved).items() if k not in _FREE}
    if config.schedule in ("constant", "step"):
        differ.pop("epochs", None)  # these schedules do not look at the end of the run
    if config.warmup_share == saved.warmup_share:
        differ.pop("warmup", None)
    if differ:
        rows = [f"  {name}: now {now!r}, then {then!r}" for name, (now, then) in differ.items()]
        raise CheckpointError(
            f"{path} belongs to a run with other options:\n"
            + "\n".join(rows)
            + "\nResume with the configuration saved beside it (config.yaml), or start a new run."
        )
    then, now = checkpoint[ENTRY].get("revision", 0), config.model_revision
    if then != now:
        raise CheckpointError(
            f"{path} was begun with other defaults of {config.model} (revision {then}, now {now}; "
            "the changelog says what changed): going on would train two networks in one. Start a "
            "new run."
        )
    stored = {
        name.removeprefix("model."): str(tuple(value.shape))
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("model.") and hasattr(value, "shape")
    }
    built = {name: str(tuple(value.shape)) for name, value in model.state_dict().items()}
    rows = [
        f"  {name}: {stored.get(name, 'nothing')} in the checkpoint, "
        f"{built.get(name, 'nothing')} in the model"
        for name in sorted({*stored, *built})
        if stored.get(name) != built.get(name)
    ]
    if rows:
        more = [f"  and {len(rows) - 5} more"] if len(rows) > 5 else []
        raise CheckpointError(
            f"{path} holds the weights of another model:\n"
            + "\n".join(rows[:5] + more)
            + f"\nThe model here is {type(model).__name__} with {len(built)} tensors."
        )


def seed_all(seed: int) -> None:
    """Seed torch (every device), Python and, where it is loaded, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """Where all generators stand, in tensors and numbers that ``weights_only`` can load."""
    version, words, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back to where ``random_state`` found them."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if torch.cuda.is_available():
        for device, cuda in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda, device)
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
