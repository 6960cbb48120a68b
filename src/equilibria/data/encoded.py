"""Images as they lie on disk: named, readable one by one, not yet decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

__all__ = ["IMAGE_SUFFIXES", "Chosen", "Encoded", "Files", "Found"]

IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


class Encoded(Protocol):
    """A column of encoded images."""

    def __len__(self) -> int: ...

    def name(self, i: int) -> str:
        """What to call image ``i`` in a message: its file, or its file and row."""

    def read(self, i: int) -> bytes:
        """The bytes of image ``i``; raises OSError where they cannot be read."""


class Files:
    """One image a file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, i: int) -> str:
        """The path."""
        return str(self.paths[i])

    def read(self, i: int) -> bytes:
        """The file's content."""
        return self.paths[i].read_bytes()


class Chosen:
    """Some images of a column, in an order of their own."""

    def __init__(self, column: Encoded, index: Sequence[int]) -> None:
        self._column = column
        self._index = tuple(index)

    def __len__(self) -> int:
        return len(self._index)

    def name(self, i: int) -> str:
        """As the column calls it."""
        return self._column.name(self._index[i])

    def read(self, i: int) -> bytes:
        """As the column reads it."""
        return self._column.read(self._index[i])


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What a layout holds for one split, before anything is decoded."""

    images: Encoded | Tensor
    """Encoded images, or uint8 [N, C, H, W] where the layout stores plain pixels."""
    targets: Tensor | None
    """Labels, long [N]; None where masks say more."""
    classes: tuple[str, ...]
    split: str
    """The split that was read: "val" where "test" was asked for and there is no other."""
    files: tuple[Path, ...]
    """The files behind it; with their sizes and times they are the key of the decoded copy."""
    masks: Encoded | None = None
    mask_ids: Tensor | None = None
    """Long [256]: the class of each value in a mask, or IGNORE."""
    superclasses: Tensor | None = None
    superclass_names: tuple[str, ...] = ()

    def chosen(self, index: Tensor, split: str | None = None) -> Found:
        """The samples at ``index`` (long), under the name of another split if one is given."""

        def take(column: Encoded) -> Encoded:
            return Chosen(column, index.tolist())

        images = self.images
        return replace(
            self,
            images=images[index] if isinstance(images, Tensor) else take(images),
            targets=None if self.targets is None else self.targets[index],
            masks=None if self.masks is None else take(self.masks),
            superclasses=None if self.superclasses is None else self.superclasses[index],
            split=self.split if split is None else split,
        )
