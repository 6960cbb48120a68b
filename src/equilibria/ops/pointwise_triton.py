"""Small passes of a fixed-step solve, each over memory once, in Triton.

    residual_norms(f, z):        ‖f − z‖ and ‖f‖ of parts of every sample
    judge(z, first, last, …):    what these norms say of every sample; zeros for those that failed
    masked_sum(z, g, d, y, κ):   g + κd + y where z > 0, else 0
    mean_rate(energies, …):      γ = scale / max(mean, floor) of every sample

The tensors of one call lie in memory alike and densely, so that they are read as vectors.
"""

# A kernel is Triton's language, not Python: its parameters are pointers and tiles without types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from equilibria.engine.result import Result

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
    tl.store(place, tl.sqrt(tl.sum(moved if MOVED else scale, 0)))
    tl.store(place + 1, tl.sqrt(tl.sum(scale, 0)))


@triton.jit
def _joined(parts, sample, count, which, PARTS: tl.constexpr):
    """The norm of a sample from the norms of its parts, in float32."""
    at = tl.arange(0, PARTS)
    norms = tl.load(parts + (sample * count + at) * 2 + which, mask=at < count, other=0.0)
    return tl.sqrt(tl.sum(norms.to(tl.float64) * norms, 0)).to(tl.float32)


@triton.jit
def _judge_kernel(
    z, first, last, failed, residuals, relatives, codes, taken,
    limit, steps, size, stride, before, after,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, TINY: tl.constexpr,
    FIXED: tl.constexpr, DIVERGED: tl.constexpr, NONFINITE: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    residual = _joined(last, sample, after, 0, PARTS)
    scale = _joined(last, sample, after, 1, PARTS)
    start = _joined(first, sample, before, 0, PARTS) + _joined(first, sample, before, 1, PARTS)
    finite = (residual + scale < float("inf")) & (start < float("inf"))
    diverged = finite & (residual > limit * start)
    bad = diverged | (finite == 0)
    if tl.program_id(1) == 0:
        tl.store(failed + sample, bad.to(tl.int8))
        tl.store(residuals + sample, residual)
        tl.store(relatives + sample, residual / tl.where(scale < TINY, TINY, scale))
        code = tl.where(finite, tl.where(diverged, DIVERGED, FIXED), NONFINITE)
        tl.store(codes + sample, code.to(tl.int8))
        tl.store(taken + sample, steps)
    if bad:
        for begin in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            at = begin + tl.arange(0, BLOCK)
            zero = tl.zeros((BLOCK,), dtype=z.dtype.element_ty)
            tl.store(z + sample * stride + at, zero, mask=at < size)


@triton.jit
def _mean_rate_kernel(energies, out, scale, floor, count, BLOCK: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    over = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = tl.load(energies + sample * count + at, mask=at < count, other=0.0)
        total += here
        over += (here >= 3.4028234663852886e38).to(tl.int32)
    energy = tl.sum(total, 0) / count
    spilled = (tl.sum(over, 0) > 0) | (energy == float("inf"))
    rate = scale / tl.where((energy > floor) & (spilled == 0), energy, floor)
    tl.store(out + sample, tl.where(spilled, float("nan"), rate))


@triton.jit
def _masked_sum_kernel(z, g, d, y, out, kappa, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    live = tl.load(z + at, mask=mask, other=0.0).to(tl.float32) > 0.0
    total = tl.load(g + at, mask=mask & live, other=0.0).to(tl.float32)
    total += kappa * tl.load(d + at, mask=mask & live, other=0.0).to(tl.float32)
    total += tl.load(y + at, mask=mask & live, other=0.0).to(tl.float32)
    tl.store(out + at, tl.where(live, total, 0.0).to(out.dtype.element_ty), mask=mask)


def residual_norms(f: Tensor, z: Tensor | None) -> Tensor:
    """(‖f − z‖, ‖f‖) of the parts of every sample, [B, parts, 2] float64; None is z = 0."""
    batch, size = f.shape[0], f[0].numel()
    splits = max(1, min(triton.cdiv(size, _BLOCK), triton.cdiv(1024, batch)))
    parts = f.new_empty((batch, splits, 2), dtype=torch.float64)
    _norms_kernel[(batch, splits)](
        f, f if z is None else z, parts, size, f.stride(0), splits,
        BLOCK=_BLOCK, MOVED=z is not None, num_warps=_WARPS,
    )  # fmt: skip
    return parts


def judge(z: Tensor, first: Tensor, last: Tensor, limit: float, steps: int) -> tuple[Tensor, ...]:
    """(failed, residual, relative, code, steps), [B]; zeros in z for the samples that failed."""
    batch, size = z.shape[0], z[0].numel()
    kinds = (torch.int8, torch.float32, torch.float32, torch.int8, torch.int32)
    failed, *others = (z.new_empty(batch, dtype=kind) for kind in kinds)
    _judge_kernel[(batch, min(4, triton.cdiv(size, _BLOCK)))](
        z, first, last, failed, *others,
        limit, steps, size, z.stride(0), first.shape[1], last.shape[1],
        PARTS=triton.next_power_of_2(max(first.shape[1], last.shape[1])), BLOCK=_BLOCK,
        num_warps=_WARPS, FIXED=int(Result.fixed_steps), DIVERGED=int(Result.diverged),
        NONFINITE=int(Result.nonfinite), TINY=torch.finfo(torch.float32).tiny,
    )  # fmt: skip
    return failed.view(torch.bool), *others


def mean_rate(energies: Tensor, scale: float, floor: float) -> Tensor:
    """scale / max(mean, floor) of energies [B, P] float32, [B]; NaN if they overflow."""
    out = energies.new_empty(energies.shape[0])
    _mean_rate_kernel[(len(out),)](energies, out, scale, floor, energies.shape[1], BLOCK=1024)
    return out


def masked_sum(z: Tensor, g: Tensor, d: Tensor, y: Tensor, kappa: float) -> Tensor:
    """g + κd + y where z > 0, else 0; the shape and layout of z."""
    out = torch.empty_like(z)
    count = z.numel()
    _masked_sum_kernel[(triton.cdiv(count, _BLOCK),)](
        z, g, d, y, out, kappa, count, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return out
