"""Small passes of a fixed-step solve, each over memory once, in Triton.

    residual_norms(f, z):        ‖f − z‖ and ‖f‖ of every sample
    masked_sum(z, g, d, y, κ):   g + κd + y where z > 0, else 0
    blank(z, failed):            zeros for the samples that failed, nothing read of the others

The tensors of one call lie in memory alike and densely, so that they are read as vectors.
"""

# A kernel is Triton's language, not Python: its parameters are pointers and tiles without types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["blank", "masked_sum", "residual_norms"]

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _norms_kernel(f, z, out, size, stride, splits, BLOCK: tl.constexpr, MOVED: tl.constexpr):
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # In float64, where squares of very small or large numbers are at home.
    moved = tl.zeros((BLOCK,), dtype=tl.float64)
    scale = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(part * BLOCK, size, splits * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < size
        here = tl.load(f + sample * stride + at, mask=mask, other=0.0).to(tl.float64)
        if MOVED:
            there = tl.load(z + sample * stride + at, mask=mask, other=0.0).to(tl.float64)
            moved += (here - there) * (here - there)
        scale += here * here
    place = out + (sample * splits + part) * 2
    tl.store(place, tl.sum(moved, 0))
    tl.store(place + 1, tl.sum(scale, 0))


@triton.jit
def _masked_sum_kernel(z, g, d, y, out, kappa, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    live = tl.load(z + at, mask=mask, other=0.0).to(tl.float32) > 0.0
    total = tl.load(g + at, mask=mask & live, other=0.0).to(tl.float32)
    total += kappa * tl.load(d + at, mask=mask & live, other=0.0).to(tl.float32)
    total += tl.load(y + at, mask=mask & live, other=0.0).to(tl.float32)
    tl.store(out + at, tl.where(live, total, 0.0).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _blank_kernel(z, failed, size, stride, BLOCK: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    if tl.load(failed + sample) != 0:
        for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            zero = tl.zeros((BLOCK,), dtype=z.dtype.element_ty)
            tl.store(z + sample * stride + at, zero, mask=at < size)


def residual_norms(f: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
    """(‖f − z‖, ‖f‖), each [B] float32; None is z = 0."""
    batch, size = f.shape[0], f[0].numel()
    splits = max(1, min(triton.cdiv(size, _BLOCK), triton.cdiv(1024, batch)))
    parts = f.new_empty((batch, splits, 2), dtype=torch.float64)
    _norms_kernel[(batch, splits)](
        f, f if z is None else z, parts, size, f.stride(0), splits,
        BLOCK=_BLOCK, MOVED=z is not None, num_warps=_WARPS,
    )  # fmt: skip
    norms = parts.sum(1).sqrt().float()
    return norms[:, 1 if z is None else 0], norms[:, 1]


def masked_sum(z: Tensor, g: Tensor, d: Tensor, y: Tensor, kappa: float) -> Tensor:
    """g + κd + y where z > 0, else 0; the shape and layout of z."""
    out = torch.empty_like(z)
    count = z.numel()
    _masked_sum_kernel[(triton.cdiv(count, _BLOCK),)](
        z, g, d, y, out, kappa, count, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return out


def blank(z: Tensor, failed: Tensor) -> Tensor:
    """Zeros in place for the samples of ``failed`` [B] bool."""
    size = z[0].numel()
    grid = (z.shape[0], min(4, triton.cdiv(size, _BLOCK)))
    flags = failed.to(torch.int8)
    _blank_kernel[grid](z, flags, size, z.stride(0), BLOCK=_BLOCK, num_warps=_WARPS)
    return z
