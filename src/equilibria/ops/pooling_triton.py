"""Average pooling of channels-last maps and its adjoint, each over memory once, in Triton."""

# A kernel is Triton's language, not Python: its parameters are pointers and tiles without types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
_WARPS = 4


@triton.jit
def _pool_kernel(
    x, out, pixels, across, down, channels,
    KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < pixels)[:, None] & (columns < channels)[None, :]
    i, sample = (rows // across) % down, rows // (across * down)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for u in tl.static_range(KH):
        for v in tl.static_range(KW):
            row = (sample * down * KH + i * KH + u) * (across * KW) + (rows % across) * KW + v
            at = row[:, None] * channels + columns[None, :]
            total += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    at = rows[:, None] * channels + columns[None, :]
    tl.store(out + at, (total / (KH * KW)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _spread_kernel(
    g, out, pixels, across, down, channels,
    KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < pixels)[:, None] & (columns < channels)[None, :]
    i, sample = (rows // across) % down, rows // (across * down)
    here = rows[:, None] * channels + columns[None, :]
    share = tl.load(g + here, mask=mask, other=0.0).to(tl.float32) / (KH * KW)
    value = share.to(out.dtype.element_ty)
    for u in tl.static_range(KH):
        for v in tl.static_range(KW):
            row = (sample * down * KH + i * KH + u) * (across * KW) + (rows % across) * KW + v
            at = row[:, None] * channels + columns[None, :]
            tl.store(out + at, value, mask=mask)


def _grid(pixels: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The programs and the constants of a launch."""
    columns = min(128, int(triton.next_power_of_2(channels)))
    rows = max(1, _TILE // columns)
    grid = int(triton.cdiv(pixels, rows)), int(triton.cdiv(channels, columns))
    return grid, {"ROWS": rows, "COLUMNS": columns, "num_warps": _WARPS}


def _empty(like: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def pool(x: Tensor, kh: int, kw: int) -> Tensor:
    """[B, C, H, W] → [B, C, H/kh, W/kw], both channels-last."""
    b, c, h, w = x.shape
    out = _empty(x, (b, c, h // kh, w // kw))
    pixels = b * (h // kh) * (w // kw)
    grid, constants = _grid(pixels, c)
    _pool_kernel[grid](x, out, pixels, w // kw, h // kh, c, KH=kh, KW=kw, **constants)
    return out


def spread(g: Tensor, kh: int, kw: int) -> Tensor:
    """The adjoint, [B, C, H, W] → [B, C, H·kh, W·kw]: each entry over its block, divided."""
    b, c, h, w = g.shape
    out = _empty(g, (b, c, h * kh, w * kw))
    grid, constants = _grid(b * h * w, c)
    _spread_kernel[grid](g, out, b * h * w, w, h, c, KH=kh, KW=kw, **constants)
    return out
