"""MNIST as its authors publish it: idx files, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from .cards import DataCard, describe, resolve_split
from .encoded import Found
from .errors import DataError

__all__ = ["read_idx"]

_PREFIX = {"train": "train", "test": "t10k"}
_MOST_BYTES = 2**32


def read_idx(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """The split of the idx files in ``folder``; None where there are none."""
    if card is not None and card.name != "mnist":
        return None
    if not any(_file(folder, prefix, "images", 3) for prefix in _PREFIX.values()):
        return None
    split = resolve_split(asked, ("train", "test"), str(folder))
    images_file = _file(folder, _PREFIX[split], "images", 3)
    labels_file = _file(folder, _PREFIX[split], "labels", 1)
    if images_file is None or labels_file is None:
        missing = "images" if images_file is None else "labels"
        raise DataError(f"{folder} has no {missing} of the {split} split ({_PREFIX[split]}-…).")
    images, labels = _read(images_file, 3), _read(labels_file, 1)
    if len(images) != len(labels):
        raise DataError(f"{images_file}: {len(images)} images and {len(labels)} labels.")
    return Found(
        images=images.unsqueeze(1),
        targets=labels.long(),
        classes=describe("mnist").classes,
        split=split,
        files=(images_file, labels_file),
    )


def _file(folder: Path, prefix: str, kind: str, dims: int) -> Path | None:
    for dot in ("-", "."):
        for suffix in ("", ".gz"):
            path = folder / f"{prefix}-{kind}{dot}idx{dims}-ubyte{suffix}"
            if path.is_file():
                return path
    return None


def _read(path: Path, dims: int) -> Tensor:
    """uint8 of ``dims`` dimensions: 0, 0, 8 (ubyte), dims, then big-endian sizes, then values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dims)
            if len(head) < 4 + 4 * dims or head[:4] != bytes((0, 0, 8, dims)):
                raise DataError(f"{path} is not an idx file of {dims}-dimensional bytes.")
            shape = [int.from_bytes(head[4 + 4 * k : 8 + 4 * k], "big") for k in range(dims)]
            count = math.prod(shape)
            if count > _MOST_BYTES:
                raise DataError(f"{path}: says it holds {shape} values; refused.")
            body = file.read(count + 1)  # one more than there should be, and no more than that
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}). Fetch it again.") from error
    if len(body) != count or count == 0:
        raise DataError(f"{path}: {shape} values are promised, {len(body)} are there; cut off?")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(shape)
