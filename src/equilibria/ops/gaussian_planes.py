"""Patches of a channels-last map by pixel unshuffling, which a CPU copies in long runs.

A map [B, C, H, W] unshuffled by p is [B, C·p², H/p, W/p] with the channels in the order
(channel, dy, dx): c_s·p² of them side by side are a row of ``split_rows``, and where channels lie
last in memory the rows are a view. They come in the order (a, b, g) instead of (g, a, b), which a
message, one patch at a time, does not see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.transforms import functorch_active

__all__ = ["can_unshuffle", "merge_planes", "plane_rows"]


def can_unshuffle(r: Tensor) -> bool:
    """Whether the rows of r [B, C, H, W] are had faster so: channels-last on a CPU."""
    return r.device.type == "cpu" and r.shape[1] > 1 and r.stride(1) == 1 and not functorch_active()


def plane_rows(r: Tensor, channels: int, size: int) -> Tensor:
    """[B, C, H, W] → [B, P, c_s·p²], patches in the order (a, b, g)."""
    planes = F.pixel_unshuffle(r, size)
    return planes.permute(0, 2, 3, 1).reshape(r.shape[0], -1, channels * size * size)


def merge_planes(rows: Tensor, shape: Sequence[int], size: int) -> Tensor:
    """The inverse of ``plane_rows``, channels-last."""
    b, c, h, w = shape
    planes = rows.reshape(b, h // size, w // size, c * size * size).permute(0, 3, 1, 2)
    return F.pixel_shuffle(planes, size)
