"""What a reader of files hands on, what can go wrong, and the folder of the cache."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

Task = Literal["classification", "segmentation"]

IGNORE = 255
"""The label of pixels that belong to no class; ``ignore_index`` of every segmentation set."""
CACHE_VARIABLE = "EQUILIBRIA_DATA"


class DataError(ValueError):
    """Data that cannot be used as it is; the message names the file and the remedy."""


class DataNotFoundError(DataError, FileNotFoundError):
    """Data that is in none of the places tried; the message names them all."""


class PartMissingError(DataNotFoundError):
    """A split, or a part of one, that is missing where the rest of the data set is."""


class CorruptImageError(DataError):
    """An image that cannot be decoded; the message names it."""


class Encoded(Protocol):
    """An encoded image: a Path, or a row of a table; ``str`` names it in messages."""

    def read_bytes(self) -> bytes:
        """Its bytes; raises OSError where they cannot be read."""


@dataclass(frozen=True, eq=False)
class Found:
    """What a reader found for one split, before anything is decoded."""

    images: Sequence[Encoded] | Tensor
    """Encoded images, or uint8 [N, C, H, W] where the files store plain pixels."""
    targets: Tensor | None
    """Labels, long [N]; None where there are masks."""
    classes: tuple[str, ...]
    split: str
    """The split that was read: "val" where "test" was asked for and there is no other."""
    files: tuple[Path, ...]
    """With their sizes and times the key of the decoded copy."""
    masks: Sequence[Encoded] | None = None
    mask_ids: Tensor | None = None
    """Long [256]: the class of each value in a mask, IGNORE, or −1 for a value that is an error."""
    superclasses: Tensor | None = None
    superclass_names: tuple[str, ...] = ()

    def chosen(self, index: Tensor, split: str | None = None) -> Found:
        """The samples at ``index`` (long), under the name of another split if one is given."""
        places = index.tolist()

        def take(rows: Any) -> Any:
            return rows[index] if isinstance(rows, Tensor) else rows and [rows[i] for i in places]

        names = ("images", "targets", "masks", "superclasses")
        taken = {name: take(getattr(self, name)) for name in names}
        return replace(self, **taken, split=split or self.split)


def cache_dir() -> Path:
    """The folder for downloads and decoded copies: $EQUILIBRIA_DATA, or the system's cache."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    systems = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}
    variable, folder = systems.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    return Path(os.environ.get(variable) or Path.home() / folder) / "equilibria" / "data"


def fingerprint(*words: object, files: Sequence[Path]) -> str:
    """A key for what is made from ``files``: it changes with their names, sizes and times."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    seen = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    text = json.dumps([[str(word) for word in words], seen])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
