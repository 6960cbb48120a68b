"""r [B, C, H, W] ⇄ rows [B, P, c_s·p²]: groups of c_s channels × p × p pixels (GEQ full, Eq 16)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria.engine.options import check_number, options
from equilibria.ops.gaussian import merge_rows, split_rows


@options
class Patches:
    """Cut a feature map into patches of ``channels`` channels × ``size`` × ``size`` pixels.

    Patch (g, a, b) of a map [B, C, H, W] is r[:, g·c_s:(g+1)·c_s, a·p:(a+1)·p, b·p:(b+1)·p], row
    g·(H/p)·(W/p) + a·(W/p) + b. Inside a row, and in the rows of W_h, the order is (channel, i, j),
    the last fastest. Nothing is ever cropped: a size that does not divide is an error.

    Args:
        channels: c_s, must divide C.
        size: p, must divide H and W.
    """

    channels: int
    size: int

    def __post_init__(self) -> None:
        check_number(self, "channels", low=1, integer=True)
        check_number(self, "size", low=1, integer=True)

    @property
    def width(self) -> int:
        """Length c_s·p² of a row."""
        return self.channels * self.size * self.size

    def check(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless ``shape`` ([B, C, H, W] or [C, H, W]) can be cut without rest."""
        if len(shape) not in (3, 4):
            raise ValueError(
                f"Patches cut a feature map [B, C, H, W] or [C, H, W], got shape {tuple(shape)}; "
                "for vectors leave patches=None (one patch is the whole row)."
            )
        c, h, w = shape[-3:]
        for what, got, option, step in (
            ("channels", c, "channels", self.channels),
            ("height", h, "size", self.size),
            ("width", w, "size", self.size),
        ):
            if got % step or got == 0:
                raise ValueError(
                    f"Patches({option}={step}) does not divide the {what} of the feature map: "
                    f"{what} is {got}, {got} % {step} = {got % step} (shape {tuple(shape)})."
                )

    def count(self, shape: Sequence[int]) -> int:
        """Number of patches P = (C/c_s)(H/p)(W/p) of a map of that shape."""
        self.check(shape)
        c, h, w = shape[-3:]
        return (c // self.channels) * (h // self.size) * (w // self.size)

    def split(self, r: Tensor) -> Tensor:
        """Rows of a feature map, in any memory format. [B, C, H, W] → [B, P, c_s·p²]."""
        if r.ndim != 4:
            raise ValueError(f"Patches.split takes [B, C, H, W], got shape {tuple(r.shape)}.")
        self.check(r.shape)
        return split_rows(r, self.channels, self.size)

    def merge(
        self,
        rows: Tensor,
        shape: Sequence[int],
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """Exact inverse of ``split``. rows [B, P, c_s·p²], shape [B, C, H, W] → [B, C, H, W]."""
        if memory_format not in (torch.contiguous_format, torch.channels_last):
            raise ValueError(
                f"Patches.merge(memory_format={memory_format}): expected torch.contiguous_format "
                "or torch.channels_last."
            )
        expected = (shape[0], self.count(shape), self.width)
        if tuple(rows.shape) != expected:
            raise ValueError(
                f"Patches.merge: a map of shape {tuple(shape)} has rows of shape {expected}, "
                f"got {tuple(rows.shape)}."
            )
        last = memory_format == torch.channels_last
        return merge_rows(rows, shape, self.channels, self.size, channels_last=last)
