"""A split of a data set: images, what they show, and how to normalize them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .decoding import LazyImages
from .sampling import as_index, few, held_out
from .sources import DataError, Task


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
        if problem := self._problem():
            raise DataError(f"{self.name} ({self.split_name}): {problem}.")

    def _problem(self) -> str:
        shape, targets = tuple(self.images.shape), self.targets
        if len(shape) != 4 or self.images.dtype != torch.uint8:
            return f"images are {self.images.dtype} {shape}; expected uint8 [N, C, H, W]"
        if shape[0] == 0:
            return "there are no images"
        if self.task not in ("classification", "segmentation"):
            return f"task={self.task!r}; expected classification, segmentation"
        expected = shape[:1] if self.task == "classification" else (shape[0], *shape[2:])
        if tuple(targets.shape) != expected or targets.dtype != torch.int64:
            return (
                f"targets are {targets.dtype} {tuple(targets.shape)} for images {shape}; "
                f"{self.task} expects int64 {expected}"
            )
        means, stds = len(self.mean), len(self.std)
        if not means == stds == shape[1]:
            return f"{means} means and {stds} standard deviations for {shape[1]} channel(s)"
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            return f"mean={self.mean}, std={self.std}; std must be positive"
        if isinstance(targets, Tensor):
            wrong = (targets < 0) | (targets >= len(self.classes))
            if self.ignore_index is not None:
                wrong &= targets != self.ignore_index
            if bool(wrong.any()):
                first = wrong.nonzero()[0]
                return (
                    f"sample {int(first[0])} has label {int(targets[tuple(first)])}, and there are "
                    f"{len(self.classes)} classes: labels go from 0 to {len(self.classes) - 1}"
                )
        above = shape[:1] if self.superclasses is None else tuple(self.superclasses.shape)
        if above != shape[:1]:
            return f"superclasses of shape {above} for {shape[0]} samples; expected one per sample"
        return ""

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        size, lazy = "×".join(map(str, self.images.shape[1:])), "lazy, " if self.is_lazy else ""
        return (
            f"ImageData({self.name}, {self.split_name}: {len(self):,} images {size}, "
            f"{len(self.classes)} classes, {lazy}{self.task})"
        )

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def channels(self) -> int:
        return int(self.images.shape[1])

    @property
    def is_lazy(self) -> bool:
        return isinstance(self.images, LazyImages)

    @property
    def labels(self) -> Tensor | None:
        """Long [N]: the class of each sample; None for segmentation."""
        one = self.task == "classification" and isinstance(self.targets, Tensor)
        return self.targets if one else None  # type: ignore[return-value]

    @property
    def superclass_of(self) -> Tensor | None:
        """Long [K]: the superclass of each class, −1 for a class with no sample here."""
        if self.superclasses is None or not isinstance(self.targets, Tensor):
            return None
        table = torch.full((len(self.classes),), -1, dtype=torch.long)
        table[self.targets.cpu()] = self.superclasses.cpu()
        return table

    def _each(self, change: Any) -> ImageData:
        """``change`` of everything that has one row per sample."""
        above = None if self.superclasses is None else change(self.superclasses)
        return replace(
            self, images=change(self.images), targets=change(self.targets), superclasses=above
        )

    def subset(self, index: Any) -> ImageData:
        """The samples at ``index``: a sequence, range, slice, LongTensor or mask."""
        chosen = as_index(index, len(self))

        def take(rows: Any) -> Any:
            lazy = isinstance(rows, LazyImages)
            return rows.subset(chosen) if lazy else rows[chosen.to(rows.device)]

        return self._each(take)

    def split(self, fraction: float, seed: int = 0) -> tuple[ImageData, ImageData]:
        """(rest, held out): the second part has round(fraction · N) samples, of each class its
        share (segmentation: of the whole), chosen by (N, labels, seed) alone; both keep the order.
        A class of two or more is in both, and one of a single sample in the first.
        """
        mask = held_out(self.labels, len(self), fraction, seed)
        return self.subset(~mask), self.subset(mask)

    def few(self, samples: int, seed: int = 0) -> Tensor:
        """[N] bool: ``samples`` of them, of each class its share, chosen as by ``split``."""
        if not 1 <= samples <= len(self):
            raise ValueError(f"samples={samples}: {self.name} has {len(self)} images here.")
        return few(self.labels, len(self), samples, seed)

    def to(self, device: torch.device | str) -> ImageData:
        """The same on another device; what is lazy moves by the batch."""
        return self._each(lambda rows: rows if isinstance(rows, LazyImages) else rows.to(device))

    def normalize(self, batch: Tensor) -> Tensor:
        """(x/255 − mean)/std of a uint8 batch [B, C, H, W]; floats are taken to be x/255."""
        x = batch.float() / 255.0 if batch.dtype == torch.uint8 else batch
        mean, std = (x.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std

    def with_normalization(self, mean: Any, std: Any) -> ImageData:
        """The same data, normalized by other numbers (one a channel, for values from 0 to 1)."""
        return replace(self, mean=tuple(float(m) for m in mean), std=tuple(float(s) for s in std))

    def with_normalization_of(self, extra: Mapping[str, Any]) -> ImageData:
        """The same data, normalized by ``extra["mean"]`` and ``extra["std"]`` of saved weights."""
        missing = [key for key in ("mean", "std") if not extra.get(key)]
        if missing:
            raise DataError(f"{' and '.join(missing)} not given; there are: {', '.join(extra)}.")
        return self.with_normalization(extra["mean"], extra["std"])

    def measure(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std) of every channel over all pixels, for values from 0 to 1, in float64."""
        first = torch.zeros(self.channels, dtype=torch.float64)
        second = torch.zeros_like(first)
        batch_size = max(1, 2**23 // math.prod(self.images.shape[1:]))  # 64 MiB in float64
        for start in range(0, len(self), batch_size):
            x = self.images[start : start + batch_size].to(torch.float64)
            first += x.sum(dim=(0, 2, 3)).cpu()
            second += x.square().sum(dim=(0, 2, 3)).cpu()
        count = len(self) * self.images.shape[2] * self.images.shape[3]
        mean = first / count
        std = (second / count - mean.square()).clamp(min=0).sqrt()
        return tuple((mean / 255).tolist()), tuple((std / 255).tolist())
