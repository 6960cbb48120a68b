"""What a reader of files hands on, what can go wrong, and the folder of the cache."""

from __future__ import annotations

import hashlib
import json
import os
import stat
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
MOST_FILE_BYTES = 2**32
"""4 GiB: a larger file is not read into memory whole."""
MOST_IMAGE_BYTES = 2**29
"""The same for the file of one image: 67 megapixels of four channels and 16 bits."""
MOST_EXPANSION = 32
"""How many times its size a compressed file may expand to. Images are compressed already."""
_SMALL = 2**24  # what is no larger may expand as it likes


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


def read_file(path: Path, limit: str = "MOST_FILE_BYTES") -> bytes:
    """The bytes of a regular file: never of a pipe or a device, which may not end.

    Raises OSError, also for more bytes than the constant of this module that ``limit`` names.
    """
    check_regular(path)
    size, most = path.stat().st_size, int(globals()[limit])
    if size > most:
        raise OSError(too_many(f"it has {size:,} bytes", most, f"sources.{limit}"))
    return path.read_bytes()


def too_many(found: str, most: int, limit: str) -> str:
    """What is wrong with a file, and the constant of this package that says so."""
    return f"{found}, and more than {most:,} are refused; the limit is equilibria.data.{limit}"


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe, a device, a socket or a folder; a link is what it points to."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}, not a file")


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def check_expansion(path: Path, size: int) -> None:
    """Raise DataError where ``path`` would expand to ``size`` bytes, absurdly more than it has."""
    stored = path.stat().st_size
    if size > max(_SMALL, MOST_EXPANSION * stored):
        raise DataError(
            f"{path}: {stored:,} bytes expand to {size:,} or more, over {MOST_EXPANSION} times as "
            "many: refused, since this is rather an attack than images. If you trust the file, "
            "raise equilibria.data.sources.MOST_EXPANSION."
        )


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
    seen = [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
    text = json.dumps([[str(word) for word in words], seen])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
