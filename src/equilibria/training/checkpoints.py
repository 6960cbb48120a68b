"""Checkpoints: written whole, read without unpickling code, checked against the run they are for.

A checkpoint holds, besides Lightning's own entries (weights, optimizer, schedule, callbacks), the
entry ``equilibria``: the configuration, where the run stood, and what the weights are called.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from .config import TrainConfig
from .storing import write_bytes

__all__ = [
    "CheckpointError",
    "WholeFiles",
    "check_checkpoint",
    "find_checkpoint",
    "read_checkpoint",
]

ENTRY = "equilibria"
FORMAT = 1

# What may change on resume: none of it changes what is computed, beyond rounding.
_FREE = frozenset(
    {
        *("out", "data_root", "download", "workers", "log_every", "on_corrupt", "keep_every"),
        *("accelerator", "devices", "nodes", "strategy", "compile", "cuda_graphs", "early_stop"),
    }
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that does not belong to this run."""


class WholeFiles(TorchCheckpointIO):
    """Saves through a file beside, so that a full disk leaves the old checkpoint; loads only
    tensors and plain values, whatever is asked for."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        # To memory first: torch's own writer hides the error of a failed write behind another.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, buffer.getbuffer())

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
            f"{path} has format {entry.get('format')!r}; this version "
            f"reads format {FORMAT}. It was written by equilibria {entry.get('version')}."
        )
    assert isinstance(found, dict)
    return found


def check_checkpoint(
    path: Path, checkpoint: Mapping[str, Any], config: TrainConfig, model: nn.Module
) -> None:
    """Raise unless the checkpoint is one of this configuration and this model."""
    saved = TrainConfig(**checkpoint[ENTRY]["config"])
    differ = {k: v for k, v in config.differences(saved).items() if k not in _FREE}
    if "epochs" in differ and config.schedule in ("constant", "step"):
        del differ["epochs"]  # these schedules do not look at the end of the run
    if "warmup" in differ and config.warmup_share == saved.warmup_share:
        del differ["warmup"]
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
    prefix = "model."
    stored = {
        name.removeprefix(prefix): tuple(value.shape)
        for name, value in checkpoint["state_dict"].items()
        if name.startswith(prefix) and isinstance(value, Tensor)
    }
    built = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if stored != built:
        raise CheckpointError(
            f"{path} holds the weights of another model:\n"
            + "\n".join(_mismatches(stored, built))
            + f"\nThe model here is {type(model).__name__} with {len(built)} tensors."
        )


def _mismatches(
    stored: Mapping[str, tuple[int, ...]], built: Mapping[str, tuple[int, ...]], most: int = 5
) -> list[str]:
    rows = []
    for name in sorted({*stored, *built}):
        if name not in built:
            rows.append(f"  {name}: in the checkpoint only")
        elif name not in stored:
            rows.append(f"  {name}: in the model only")
        elif stored[name] != built[name]:
            rows.append(f"  {name}: {stored[name]} in the checkpoint, {built[name]} in the model")
    more = len(rows) - most
    return rows[:most] + ([f"  and {more} more"] if more > 0 else [])
