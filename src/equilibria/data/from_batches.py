"""CIFAR as its authors publish it: pickled batches, or the binary version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cards import DataCard, describe, resolve_split
from .encoded import Found
from .errors import DataError
from .safe_pickle import read_pickle

__all__ = ["read_cifar_batches"]

_PIXELS = 3 * 32 * 32
_FILES = {
    ("cifar10", "train"): tuple(f"data_batch_{k}" for k in range(1, 6)),
    ("cifar10", "test"): ("test_batch",),
    ("cifar100", "train"): ("train",),
    ("cifar100", "test"): ("test",),
}


def read_cifar_batches(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """The split of CIFAR-10 or CIFAR-100 batches in ``folder``; None where there are none."""
    name = card.name if card is not None else _recognized(folder)
    if name not in ("cifar10", "cifar100"):
        return None
    stems = {s: _FILES[name, s] for s in ("train", "test")}
    binary = any((folder / f"{stem}.bin").is_file() for group in stems.values() for stem in group)
    suffix = ".bin" if binary else ""
    if not any((folder / f"{s}{suffix}").is_file() for group in stems.values() for s in group):
        return None
    split = resolve_split(asked, ("train", "test"), str(folder))
    files = [folder / f"{stem}{suffix}" for stem in stems[split]]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{folder} has no {', '.join(missing)}; the {split} split needs it.")
    read = _binary if binary else _pickled
    parts = [read(file, name) for file in files]
    images = torch.cat([part[0] for part in parts])
    targets = torch.cat([part[1] for part in parts])
    known = describe(name)
    coarse = [part[2] for part in parts if part[2] is not None]
    return Found(
        images=images,
        targets=targets,
        classes=known.classes,
        split=split,
        files=tuple(files),
        superclasses=torch.cat(coarse) if coarse else None,
        superclass_names=known.superclasses if coarse else (),
    )


def _recognized(folder: Path) -> str:
    """Which CIFAR a folder of the user's own holds, by its meta file."""
    for meta, name in (("batches.meta", "cifar10"), ("meta", "cifar100")):
        if (folder / meta).is_file():
            return name
    if (folder / "data_batch_1.bin").is_file():
        return "cifar10"
    return "cifar100" if (folder / "fine_label_names.txt").is_file() else ""


def _pickled(file: Path, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    batch = read_pickle(file)
    key = "labels" if name == "cifar10" else "fine_labels"
    missing = [k for k in ("data", key) if k not in batch]
    if missing:
        raise DataError(f"{file} has no {' and '.join(missing)}; it has: {', '.join(batch)}.")
    data: Any = batch["data"]
    if getattr(data, "ndim", 0) != 2 or data.shape[1] != _PIXELS or str(data.dtype) != "uint8":
        shape = getattr(data, "shape", type(data).__name__)
        raise DataError(f"{file}: data is {shape}; expected uint8 [N, {_PIXELS}].")
    labels = _labels(batch[key], len(data), file, key)
    coarse = batch.get("coarse_labels")
    above = None if coarse is None else _labels(coarse, len(data), file, "coarse_labels")
    return torch.from_numpy(data).view(-1, 3, 32, 32), labels, above


def _labels(values: Any, count: int, file: Path, key: str) -> Tensor:
    found = torch.as_tensor(values)
    if found.shape != (count,) or found.is_floating_point():
        raise DataError(f"{file}: {key} are {tuple(found.shape)} for {count} images.")
    return found.long()


def _binary(file: Path, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    labels = 1 if name == "cifar10" else 2  # CIFAR-100 stores coarse, then fine
    raw = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    record = labels + _PIXELS
    if len(raw) == 0 or len(raw) % record:
        raise DataError(
            f"{file}: {len(raw):,} bytes are no whole number of records of {record}; the file is "
            "cut off. Fetch it again."
        )
    rows = raw.view(-1, record)
    images = rows[:, labels:].reshape(-1, 3, 32, 32)
    above = rows[:, 0].long() if labels == 2 else None
    return images, rows[:, labels - 1].long(), above
