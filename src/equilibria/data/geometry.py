"""Crop, flip, cutout and resized crop of a batch, each sample by itself; masks move along."""

from __future__ import annotations

import math
from typing import Literal, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from equilibria.engine.options import check_number, options

from .image_data import IGNORE
from .transform import Transform

__all__ = ["Crop", "Cutout", "Flip", "ResizedCrop", "is_mask", "warp"]


@options
class Crop(Transform):
    """Pad by ``padding`` on every side, then cut out the old size at a random place.

    x'[i, j] = x[i + a − padding, j + b − padding] with a, b uniform in 0 … 2·padding. Outside the
    picture: its mirror image ("reflect", the edge not repeated), or zeros, where masks have IGNORE.
    """

    padding: int = 4
    mode: Literal["reflect", "zero"] = "reflect"

    def __post_init__(self) -> None:
        check_number(self, "padding", low=1, integer=True)
        if self.mode not in ("reflect", "zero"):
            raise ValueError(f"Crop(mode={self.mode!r}): expected 'reflect' or 'zero'.")

    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Shift every sample by its own (a, b)."""
        n, _, h, w = x.shape
        if self.mode == "reflect" and self.padding >= min(h, w):
            raise ValueError(
                f"Crop(padding={self.padding}) cannot mirror more than an image of {h} × {w} has; "
                "take less padding, or mode='zero'."
            )
        shift = torch.randint(
            0, 2 * self.padding + 1, (2, n, 1), device=x.device, generator=generator
        )
        rows = torch.arange(h, device=x.device) + shift[0] - self.padding
        columns = torch.arange(w, device=x.device) + shift[1] - self.padding
        outside = None
        if self.mode == "zero":
            past = ((rows < 0) | (rows >= h)).unsqueeze(2)
            outside = past | ((columns < 0) | (columns >= w)).unsqueeze(1)
            rows, columns = rows.clamp(0, h - 1), columns.clamp(0, w - 1)
        else:
            rows, columns = _mirrored(rows, h), _mirrored(columns, w)
        sample = torch.arange(n, device=x.device).view(-1, 1, 1)
        moved = x[sample, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
        if outside is not None:
            moved = moved.masked_fill(outside.unsqueeze(1), 0.0)
        if is_mask(y):
            y = y[sample, rows.unsqueeze(2), columns.unsqueeze(1)]
            y = y if outside is None else y.masked_fill(outside, IGNORE)
        return moved, y


@options
class Flip(Transform):
    """Mirror left and right with probability ``p``."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_number(self, "p", low=0, high=1)

    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Mirror some of the samples."""
        chosen = torch.rand(len(x), 1, 1, device=x.device, generator=generator) < self.p
        if is_mask(y):
            y = torch.where(chosen, y.flip(-1), y)
        return torch.where(chosen.unsqueeze(3), x.flip(-1), x), y


@options
class Cutout(Transform):
    """Fill a square of ``size`` pixels with its middle anywhere (DeVries and Taylor 2017).

    ``fill`` is a value from 0 to 1; None is the mean color of each image. Masks stay: what is
    hidden is still to be told.
    """

    size: int = 8
    fill: float | None = None

    def __post_init__(self) -> None:
        check_number(self, "size", low=1, integer=True)
        check_number(self, "fill", low=0, high=1, optional=True)

    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hide a square of every sample."""
        n, _, h, w = x.shape
        top = torch.randint(0, h, (n, 1), device=x.device, generator=generator) - self.size // 2
        left = torch.randint(0, w, (n, 1), device=x.device, generator=generator) - self.size // 2
        i, j = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
        rows = (i >= top) & (i < top + self.size)
        columns = (j >= left) & (j < left + self.size)
        hidden = (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)
        if self.fill is not None:
            return x.masked_fill(hidden, self.fill), y
        return torch.where(hidden, x.mean(dim=(2, 3), keepdim=True), x), y


@options
class ResizedCrop(Transform):
    """Cut out a random part and resize it to the whole: of ``scale`` of the area, ``ratio`` w : h.

    The area is uniform in ``scale``, log(w/h) uniform in log ``ratio``, the place uniform; a part
    that is wider or higher than the image is cut down to it.
    """

    scale: tuple[float, float] = (0.35, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, high in (("scale", 1.0), ("ratio", math.inf)):
            value = getattr(self, name)
            if not (len(value) == 2 and 0 < value[0] <= value[1] <= high):
                raise ValueError(
                    f"ResizedCrop({name}={value!r}): expected (low, high), positive"
                    f"{' and at most 1' if high == 1 else ''}."
                )

    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Zoom every sample into a part of its own."""
        n, _, h, w = x.shape
        area, shape, u, v = torch.rand(4, n, device=x.device, generator=generator)
        low, high = (math.log(r) for r in self.ratio)
        area = self.scale[0] + (self.scale[1] - self.scale[0]) * area
        # w : h in pixels; of the unit square it is the ratio times h/w of the image.
        root = torch.exp(0.5 * (low + (high - low) * shape)) * math.sqrt(h / w)
        width = (area.sqrt() * root).clamp(max=1.0)
        height = (area.sqrt() / root).clamp(max=1.0)
        zero = torch.zeros_like(width)
        theta = torch.stack(
            [
                torch.stack([width, zero, (2 * u - 1) * (1 - width)], dim=1),
                torch.stack([zero, height, (2 * v - 1) * (1 - height)], dim=1),
            ],
            dim=1,
        )
        return warp(x, y, theta, border=True)


def warp(
    x: Tensor, y: Tensor | None, theta: Tensor, *, border: bool
) -> tuple[Tensor, Tensor | None]:
    """x'(p) = x(θ [p; 1]) with p in [−1, 1]², θ [B, 2, 3]; bilinear, and nearest for masks.

    Outside: the edge's value with ``border``, else zeros, and IGNORE in masks.
    """
    size = [len(x), 1, x.shape[2], x.shape[3]]
    grid = functional.affine_grid(theta.to(x.dtype), size, align_corners=False)
    mode = "border" if border else "zeros"
    moved = functional.grid_sample(x, grid, padding_mode=mode, align_corners=False)
    if is_mask(y):
        # One more than the class, so that zero is the outside; exact in float32.
        classes = (y + 1).unsqueeze(1).float()
        found = functional.grid_sample(
            classes, grid.float(), mode="nearest", padding_mode=mode, align_corners=False
        )
        found = found.squeeze(1).round().long() - 1
        y = torch.where(found < 0, IGNORE, found)
    return moved, y


def is_mask(y: Tensor | None) -> TypeGuard[Tensor]:
    """Whether targets are masks [B, H, W]."""
    return y is not None and y.ndim == 3


def _mirrored(index: Tensor, size: int) -> Tensor:
    return (size - 1) - ((size - 1) - index.abs()).abs()
