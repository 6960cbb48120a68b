"""What a reader of files hands on: encoded images by row, labels, classes; and what can go wrong.

The cache folder and the safe way to write into it are here too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

Task = Literal["classification", "segmentation"]

IGNORE = 255
"""The label of pixels that belong to no class; ``ignore_index`` of every segmentation set."""
CACHE_VARIABLE = "EQUILIBRIA_DATA"
IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


class DataError(ValueError):
    """Data that cannot be used as it is; the message names the file and the remedy."""


class DataNotFoundError(DataError, FileNotFoundError):
    """Data that is in none of the places tried; the message names them all."""


class PartMissingError(DataNotFoundError):
    """A split, or a part of one, that is not there where the rest of the data set is."""


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
    """The files behind it; with their sizes and times they are the key of the decoded copy."""
    masks: Sequence[Encoded] | None = None
    mask_ids: Tensor | None = None
    """Long [256]: the class of each value in a mask, or IGNORE."""
    superclasses: Tensor | None = None
    superclass_names: tuple[str, ...] = ()

    def chosen(self, index: Tensor, split: str | None = None) -> Found:
        """The samples at ``index`` (long), under the name of another split if one is given."""

        places = index.tolist()

        def take(rows: Any) -> Any:
            return rows[index] if isinstance(rows, Tensor) else rows and [rows[i] for i in places]

        return replace(
            self,
            images=take(self.images),
            targets=take(self.targets),
            masks=take(self.masks),
            superclasses=take(self.superclasses),
            split=self.split if split is None else split,
        )


def cache_dir() -> Path:
    """The folder for downloads and decoded copies: $EQUILIBRIA_DATA, or the system's cache."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "equilibria" / "data"


def fingerprint(*words: object, files: Sequence[Path]) -> str:
    """A key for what is made from ``files``: it changes with their names, sizes and times."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    seen = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    text = json.dumps([[str(word) for word in words], seen])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of ``path`` at the end, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's: its files are for their owner alone, and a cache may be shared.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
