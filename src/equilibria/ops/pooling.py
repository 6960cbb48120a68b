"""Average pooling of whole blocks, out[i, j] = mean of the kh × kw block (i, j) of x.

torch's own kernel reaches a tenth of the memory's bandwidth on channels-last maps, and its backward
pass a thirtieth: it was a quarter of a training step of the six-branch network. On a GPU these are
one pass each; elsewhere, and under torch.compile, it is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.transforms import transforms_active

from .gaussian_patches import TRITON

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def average_pool(x: Tensor, kh: int, kw: int) -> Tensor:
    """x [B, C, H, W] → [B, C, H/kh, W/kw]; kh and kw divide H and W."""
    if x.shape[-2] % kh or x.shape[-1] % kw:
        raise ValueError(
            f"average_pool: blocks of {kh} × {kw} do not divide a map of {x.shape[-2]} × "
            f"{x.shape[-1]} pixels."
        )
    if kh == kw == 1:
        return x
    if _can_fuse(x):
        found: Tensor = _Blocks.apply(x, kh, kw, False)  # type: ignore[no-untyped-call]
        return found
    return F.avg_pool2d(x, (kh, kw))


def _can_fuse(x: Tensor) -> bool:
    if not TRITON or not x.is_cuda or x.dtype not in _TYPES or torch.compiler.is_compiling():
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not transforms_active()


class _Blocks(torch.autograd.Function):
    """Means of blocks, or the adjoint of that: each is the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kh: int, kw: int, adjoint: bool) -> Tensor:
        from .pooling_triton import pool, spread

        ctx.other = kh, kw, not adjoint
        last = x.contiguous(memory_format=torch.channels_last)
        return spread(last, kh, kw) if adjoint else pool(last, kh, kw)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: Tensor = _Blocks.apply(gradients[0], *ctx.other)  # type: ignore[no-untyped-call]
        return found, None, None, None
