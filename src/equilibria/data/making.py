"""From what was found to tensors: decoded at once or by the batch, copies used and kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .decoded import copy_path, read_copy, write_copy
from .decoding import OnCorrupt, Rows, decode_all, readable, report_skipped
from .encoded import Encoded, Found
from .errors import CorruptImageError, DataError
from .image_data import Task
from .lazy import LazyImages
from .pixels import decode_image, decode_mask, image_shape, reshape_pixels
from .places import fingerprint

__all__ = ["MEMORY_LIMIT", "Decoder"]

MEMORY_LIMIT = 4 * 2**30
"""Decoded bytes up to which a split is kept in memory; above, images are decoded by the batch."""

_FORMAT = 1  # of decoded copies: a new number makes the old ones unused
_MASK_BYTES = 8  # masks are long


@dataclass(frozen=True)
class MaskRows:
    """Row i of a column of masks as classes, long [H, W]."""

    rows: Rows
    ids: Tensor

    def __call__(self, i: int) -> Tensor:
        """The classes of mask ``i``; a value that stands for none is an error."""
        return classes_of(self.rows(i).unsqueeze(0), self.ids, lambda _: self.rows.column.name(i))[
            0
        ]


@dataclass(frozen=True)
class Decoder:
    """How to make the tensors of a split."""

    found: Found
    task: Task
    name: str
    channels: int
    size: int | None
    progress: bool

    def run(
        self, on_corrupt: OnCorrupt, lazy: bool | None, cache: bool
    ) -> tuple[Tensor | LazyImages, Tensor | LazyImages, Found]:
        """Images, targets, and what was found without the samples that were skipped."""
        images = self.found.images
        if isinstance(images, Tensor):
            return self._reshaped(images), self._labels(self.found), self.found
        shape = self._row_shape(images, on_corrupt)
        pixels = shape[1] * shape[2]
        size = len(images) * pixels * (shape[0] + (_MASK_BYTES if self.found.masks else 0))
        if lazy or (lazy is None and size > MEMORY_LIMIT):
            return self._lazily(images, shape, on_corrupt)
        return self._at_once(images, shape, on_corrupt, cache)

    @property
    def _where(self) -> str:
        return f"{self.name} ({self.found.split})"

    @property
    def _bar(self) -> str | None:
        return f"decoding {self._where}" if self.progress else None

    def _columns(self, images: Encoded, shape: tuple[int, int, int]) -> list[Rows]:
        square = self.task == "classification"
        image = partial(decode_image, channels=self.channels, size=self.size, square=square)
        columns = [Rows(images, image, shape)]
        if self.found.masks is not None:
            mask = partial(decode_mask, size=self.size)
            columns.append(Rows(self.found.masks, mask, shape[1:]))
        return columns

    def _row_shape(self, images: Encoded, on_corrupt: OnCorrupt) -> tuple[int, int, int]:
        """[C, H, W] of every image, by the first that can be read."""
        square = self.task == "classification"
        if square and self.size is not None:
            return self.channels, self.size, self.size
        look = Rows(images, partial(_shape_row, size=self.size, square=square))
        for i in range(len(images)):
            try:
                height, width = look(i).tolist()
                return self.channels, int(height), int(width)
            except CorruptImageError:
                if on_corrupt == "raise":
                    raise
        raise CorruptImageError(f"{self._where}: none of the {len(images)} images can be read.")

    def _at_once(
        self, images: Encoded, shape: tuple[int, int, int], on_corrupt: OnCorrupt, cache: bool
    ) -> tuple[Tensor, Tensor, Found]:
        count = len(images)
        columns = self._columns(images, shape)
        labels = ("images", "masks")[: len(columns)]
        path = None
        if cache and all(file.exists() for file in self.found.files):
            words = (_FORMAT, self.found.split, count, self.channels, self.size, self.task)
            key = fingerprint(*words, files=self.found.files)
            path = copy_path(self.name, self.found.split, key)
            full = {k: (count, *(c.shape or ())) for k, c in zip(labels, columns, strict=True)}
            copy = read_copy(path, full)
            if copy is not None:
                return self._checked(copy["images"], copy.get("masks"), self.found)
        stop = on_corrupt == "raise"
        tensors, failures = decode_all(columns, stop=stop, bar=self._bar)
        found = self.found
        if failures:
            if stop:
                raise CorruptImageError(failures[min(failures)])
            kept = report_skipped(failures, count, self._where).nonzero().flatten()
            tensors, found = [t[kept] for t in tensors], found.chosen(kept)
        elif path is not None:
            write_copy(path, dict(zip(labels, tensors, strict=True)))
        return self._checked(tensors[0], tensors[1] if len(tensors) > 1 else None, found)

    def _lazily(
        self, images: Encoded, shape: tuple[int, int, int], on_corrupt: OnCorrupt
    ) -> tuple[LazyImages, Tensor | LazyImages, Found]:
        columns, found = self._columns(images, shape), self.found
        index = torch.arange(len(images))
        if on_corrupt == "skip":  # the count has to be known before the first batch
            failures = readable(columns, bar=self._bar)
            if failures:
                kept = report_skipped(failures, len(images), self._where)
                index = index[kept]
                found = found.chosen(index)
        rows = LazyImages(columns[0], index, shape)
        if found.masks is None or found.mask_ids is None:
            return rows, self._labels(found), found
        masks = LazyImages(MaskRows(columns[1], found.mask_ids), index, shape[1:], torch.int64)
        return rows, masks, found

    def _checked(
        self, images: Tensor, masks: Tensor | None, found: Found
    ) -> tuple[Tensor, Tensor, Found]:
        if masks is None or found.masks is None or found.mask_ids is None:
            return images, self._labels(found), found
        return images, classes_of(masks, found.mask_ids, found.masks.name), found

    def _labels(self, found: Found) -> Tensor:
        if found.targets is None:
            raise DataError(f"{self._where}: there are no labels.")
        return found.targets

    def _reshaped(self, images: Tensor) -> Tensor:
        size = self.size
        if images.shape[1] == self.channels and size in (None, images.shape[2]):
            return images
        return torch.stack([reshape_pixels(image, self.channels, size) for image in images])


def classes_of(masks: Tensor, ids: Tensor, name: object) -> Tensor:
    """Long [N, H, W]: ``ids`` of every value of uint8 masks; −1 in ``ids`` is refused, by name."""
    found = ids[masks.long()]
    wrong = found < 0
    if bool(wrong.any()):
        first = wrong.nonzero()[0]
        value, who = int(masks[tuple(first)]), name(int(first[0])) if callable(name) else name
        raise DataError(f"{who}: the mask has the value {value}, which stands for no class.")
    return found


def _shape_row(data: bytes, size: int | None, square: bool) -> Tensor:
    return torch.tensor(image_shape(data, size, square=square))
