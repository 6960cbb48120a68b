"""A split of a data set: images, what they show, and how to normalize them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import DataError
from .lazy import LazyImages, as_index
from .splitting import held_out

__all__ = ["IGNORE", "ImageData", "Task"]

IGNORE = 255
"""The label of pixels that belong to no class; ``ignore_index`` of every segmentation set."""

Task = Literal["classification", "segmentation"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageData:
    """Images and targets of one split; ``normalize`` is (x/255 − mean)/std, channel by channel."""

    images: Tensor | LazyImages
    """uint8 [N, C, H, W]; big sets keep a lazy source, which is indexed in the same way."""
    targets: Tensor | LazyImages
    """Long [N], or [N, H, W] for segmentation, where ``ignore_index`` marks pixels of no class."""
    classes: tuple[str, ...]
    name: str
    split_name: str
    mean: tuple[float, ...]
    """Of each channel, for values from 0 to 1."""
    std: tuple[float, ...]
    task: Task = "classification"
    ignore_index: int | None = None
    superclasses: Tensor | None = None
    """Long [N]: the superclass of each sample, where the set has them."""
    superclass_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"{self.name} ({self.split_name})"
        shape = tuple(self.images.shape)
        if len(shape) != 4 or self.images.dtype != torch.uint8:
            raise DataError(
                f"{where}: images are {self.images.dtype} {shape}; expected uint8 [N, C, H, W]."
            )
        if shape[0] == 0:
            raise DataError(f"{where}: there are no images.")
        if self.task not in ("classification", "segmentation"):
            raise DataError(f"{where}: task={self.task!r}; expected classification, segmentation.")
        expected = shape[:1] if self.task == "classification" else (shape[0], *shape[2:])
        if tuple(self.targets.shape) != expected or self.targets.dtype != torch.int64:
            raise DataError(
                f"{where}: targets are {self.targets.dtype} {tuple(self.targets.shape)} for images "
                f"{shape}; {self.task} expects int64 {expected}."
            )
        if len(self.mean) != shape[1] or len(self.std) != shape[1]:
            raise DataError(
                f"{where}: {len(self.mean)} means and {len(self.std)} standard deviations for "
                f"{shape[1]} channel(s)."
            )
        if not all(math.isfinite(m) for m in self.mean) or not all(
            math.isfinite(s) and s > 0 for s in self.std
        ):
            raise DataError(f"{where}: mean={self.mean}, std={self.std}; std must be positive.")
        if isinstance(self.targets, Tensor):
            self._check_range(where, self.targets)
        if self.superclasses is not None and tuple(self.superclasses.shape) != shape[:1]:
            raise DataError(
                f"{where}: superclasses of shape {tuple(self.superclasses.shape)} for {shape[0]} "
                "samples; expected one a sample."
            )

    def _check_range(self, where: str, targets: Tensor) -> None:
        wrong = (targets < 0) | (targets >= len(self.classes))
        if self.ignore_index is not None:
            wrong &= targets != self.ignore_index
        if bool(wrong.any()):
            first = wrong.nonzero()[0]
            value = int(targets[tuple(first)])
            raise DataError(
                f"{where}: sample {int(first[0])} has label {value}, and there are "
                f"{len(self.classes)} classes: labels go from 0 to {len(self.classes) - 1}."
            )

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        kind = "lazy, " if isinstance(self.images, LazyImages) else ""
        size = "×".join(str(n) for n in self.images.shape[1:])
        return (
            f"ImageData({self.name}, {self.split_name}: {len(self):,} images {size}, "
            f"{len(self.classes)} classes, {kind}{self.task})"
        )

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def channels(self) -> int:
        """C of [N, C, H, W]."""
        return int(self.images.shape[1])

    @property
    def is_lazy(self) -> bool:
        """Whether images are decoded when they are asked for."""
        return isinstance(self.images, LazyImages)

    @property
    def superclass_of(self) -> Tensor | None:
        """Long [K]: the superclass of each class, −1 for a class with no sample here."""
        if self.superclasses is None or not isinstance(self.targets, Tensor):
            return None
        table = torch.full((len(self.classes),), -1, dtype=torch.long)
        table[self.targets.cpu()] = self.superclasses.cpu()
        return table

    def subset(self, index: Any) -> ImageData:
        """The samples at ``index``: a sequence, range, slice, LongTensor or mask."""
        chosen = as_index(index, len(self))
        above = self.superclasses
        return dataclasses.replace(
            self,
            images=_take(self.images, chosen),
            targets=_take(self.targets, chosen),
            superclasses=None if above is None else above[chosen.to(above.device)],
        )

    def split(self, fraction: float, seed: int = 0) -> tuple[ImageData, ImageData]:
        """(rest, held out): the second part has round(fraction · N) samples, of each class its
        share (segmentation: of the whole), chosen by (N, labels, seed) alone; both keep the order.
        """
        labels = self.targets if self.task == "classification" else None
        mask = held_out(labels if isinstance(labels, Tensor) else None, len(self), fraction, seed)
        return self.subset(~mask), self.subset(mask)

    def to(self, device: torch.device | str) -> ImageData:
        """The same on another device; what is lazy stays where it is and moves by the batch."""
        images, targets, above = self.images, self.targets, self.superclasses
        return dataclasses.replace(
            self,
            images=images if isinstance(images, LazyImages) else images.to(device),
            targets=targets if isinstance(targets, LazyImages) else targets.to(device),
            superclasses=None if above is None else above.to(device),
        )

    def normalize(self, batch: Tensor) -> Tensor:
        """(x/255 − mean)/std of a uint8 batch [B, C, H, W]; floats are taken to be x/255."""
        x = batch.float() / 255.0 if batch.dtype == torch.uint8 else batch
        shape = (1, -1, 1, 1) if batch.ndim == 4 else (-1, 1, 1)
        mean = torch.tensor(self.mean, dtype=x.dtype, device=x.device).view(shape)
        std = torch.tensor(self.std, dtype=x.dtype, device=x.device).view(shape)
        return (x - mean) / std

    def with_normalization(self, mean: Any, std: Any) -> ImageData:
        """The same data, normalized by other numbers (one a channel, for values from 0 to 1)."""
        return dataclasses.replace(
            self, mean=tuple(float(m) for m in mean), std=tuple(float(s) for s in std)
        )

    def with_normalization_of(self, extra: Mapping[str, Any]) -> ImageData:
        """The same data, normalized by ``extra["mean"]`` and ``extra["std"]`` of saved weights."""
        missing = [key for key in ("mean", "std") if not extra.get(key)]
        if missing:
            raise DataError(f"{' and '.join(missing)} not given; there are: {', '.join(extra)}.")
        return self.with_normalization(extra["mean"], extra["std"])

    def measure(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std) of every channel over all pixels, for values from 0 to 1, in float64."""
        first = torch.zeros(self.channels, dtype=torch.float64)
        second = torch.zeros(self.channels, dtype=torch.float64)
        batch_size = max(1, 2**23 // self.images[0].numel())  # 64 MiB in float64
        for start in range(0, len(self), batch_size):
            x = self.images[start : start + batch_size].to(torch.float64)
            first += x.sum(dim=(0, 2, 3)).cpu()
            second += x.square().sum(dim=(0, 2, 3)).cpu()
        count = len(self) * self.images.shape[2] * self.images.shape[3]
        mean = first / count
        std = (second / count - mean.square()).clamp(min=0).sqrt()
        return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def _take(rows: Tensor | LazyImages, chosen: Tensor) -> Tensor | LazyImages:
    if isinstance(rows, LazyImages):
        return rows.subset(chosen)
    return rows[chosen.to(rows.device)]
