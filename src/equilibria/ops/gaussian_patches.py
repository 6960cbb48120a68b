"""The Gaussian message of a feature map, patch by patch: fused on a GPU, plain elsewhere.

    gaussian_patch_message(a, c, M, γ) = merge(exp(−γsᵢ)·rᵢM),  r = a − c cut into rows rᵢ

(GEQ full, Algorithm 1.) The fused form reads a and c once and writes the message. Both are
differentiable to any order in a, c, M and γ.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.spectral import pull_with_graph
from equilibria.engine.transforms import functorch_active, transforms_active

from .gaussian import (
    gaussian_energies,
    is_channels_last,
    merge_rows,
    permuted,
    restored,
    split_rows,
)

Cut = tuple[int, int]
"""(c_s, p): the channels of a patch and the length of its sides."""

_WIDEST, _WIDEST_COMPILED = 128, 64
"""Longer rows do not fit the registers; in float32 a compiler's own kernels are faster beyond the
second (results/gaussian_op.json)."""

# Registered with torch when the package is imported: torch.compile cannot follow it later.
TRITON = bool(torch.version.cuda or torch.version.hip) and find_spec("triton") is not None
if TRITON:
    from .gaussian_fused import message as _message
    from .gaussian_fused import row_energies as _row_energies


def can_unshuffle(r: Tensor) -> bool:
    """Whether ``plane_rows`` of r [B, C, H, W] is faster: channels-last on a CPU."""
    return r.device.type == "cpu" and is_channels_last(r) and not functorch_active()


def plane_rows(r: Tensor, channels: int, size: int) -> Tensor:
    """``split_rows`` with patches in the order (a, b, g) instead of (g, a, b), by unshuffling.

    A CPU copies a channels-last map so in long runs. A message, one patch at a time, does not see
    the order.
    """
    planes = F.pixel_unshuffle(r, size)
    return planes.permute(0, 2, 3, 1).reshape(r.shape[0], -1, channels * size * size)


def merge_planes(rows: Tensor, shape: Sequence[int], size: int) -> Tensor:
    """The inverse of ``plane_rows``, channels-last."""
    b, c, h, w = shape
    planes = rows.reshape(b, h // size, w // size, c * size * size).permute(0, 3, 1, 2)
    return F.pixel_shuffle(planes, size)


def can_fuse(a: Tensor, c: Tensor, metric: Tensor | None, channels: int, size: int) -> bool:
    """Whether the fused form serves: a GPU, one dtype of 16 or 32 bits, short rows, no torch.func.

    Maps that are not channels-last are left to the plain form, which reads them in better order.
    """
    widest = _WIDEST_COMPILED if torch.compiler.is_compiling() else _WIDEST
    if not TRITON or a.device.type != "cuda" or metric is None or channels * size * size > widest:
        return False
    if a.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if not a.dtype == c.dtype == metric.dtype or not is_channels_last(a):
        return False
    # Offsets are 32-bit integers.
    return a.numel() < 2**31 and not transforms_active() and not functorch_active()


def fused_message(
    a: Tensor, c: Tensor, metric: Tensor, gamma: Tensor, channels: int, size: int
) -> Tensor:
    """The message by the Triton kernel. a, c [B, C, H, W], metric [k, k], gamma [B] or scalar."""
    rate = gamma.to(torch.float32).expand(a.shape[0]).contiguous()
    found: Tensor = _message(a, c, permuted(metric, channels, size), rate, channels, size)
    return found


def patch_energies(c: Tensor, metric: Tensor | None, channels: int, size: int) -> Tensor:
    """⟨rᵢM, rᵢ⟩ of every patch of c, [B, P] in float32 or better, in no order that is promised.

    Differentiable to any order in c and M; for the backward pass c and M alone are kept.
    """
    if torch.compiler.is_compiling() or transforms_active():
        if metric is not None and can_fuse(c, c, metric, channels, size):
            fused: Tensor = _row_energies(c, permuted(metric, channels, size), channels, size)
            return fused
        return gaussian_energies(split_rows(c, channels, size), metric)
    found: Tensor = _Energies.apply(c, metric, channels, size)  # type: ignore[no-untyped-call]
    return found


class _Energies(torch.autograd.Function):
    """(c, M) ↦ s; the gradients are dc = 2gᵢ·cᵢM and dM = Σᵢ gᵢ·cᵢᵀcᵢ."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, metric: Tensor | None, channels: int, size: int) -> Tensor:
        ctx.save_for_backward(c, metric)
        ctx.cut = channels, size
        ctx.fused = metric is not None and can_fuse(c, c, metric, channels, size)
        # The kernels, too, take the rows in the order of the planes.
        ctx.planes = ctx.fused or can_unshuffle(c)
        if ctx.fused:
            from . import gaussian_triton as kernels

            assert metric is not None
            given = permuted(metric, channels, size)
            return kernels.energies(c, given, channels, size, kernels.direct)
        return _energies(c, metric, ctx.cut, ctx.planes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (c, metric), (g,), needs = ctx.saved_tensors, gradients, ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            plain = functools.partial(_energies, cut=ctx.cut, planes=ctx.planes)
            return (*pull_with_graph(plain, (c, metric), needs, g), None, None)
        if ctx.fused:
            from . import gaussian_triton as kernels

            channels, size = ctx.cut
            given = c, permuted(metric, channels, size), g.contiguous(), channels, size
            dc, dm = kernels.energies_backward(*given, needs[1], kernels.direct)
            back = restored(dm, channels, size).to(metric.dtype) if needs[1] else None
            return dc, back, None, None
        return (*_plain_pull(c, metric, g, ctx.cut, ctx.planes, needs[1]), None, None)


def _energies(c: Tensor, metric: Tensor | None, cut: Cut, planes: bool) -> Tensor:
    return gaussian_energies(plane_rows(c, *cut) if planes else split_rows(c, *cut), metric)


def _plain_pull(
    c: Tensor, metric: Tensor | None, g: Tensor, cut: Cut, planes: bool, with_metric: bool
) -> tuple[Tensor, Tensor | None]:
    """(dc, dM or None) of Σᵢ gᵢsᵢ."""
    up = g.unsqueeze(-1)
    rows = plane_rows(c, *cut) if planes else split_rows(c, *cut)
    # A sample without a gradient may hold NaN, and 0·NaN is no 0.
    rows = torch.where(up == 0, 0.0, rows)
    v = rows if metric is None else rows @ metric.to(rows.dtype)
    back = (2.0 * up * v).to(c.dtype)
    if planes:
        dc = merge_planes(back, c.shape, cut[1])
    else:
        dc = merge_rows(back, c.shape, *cut, channels_last=is_channels_last(c))
    if metric is None or not with_metric:
        return dc, None
    wide = rows.to(g.dtype)
    return dc, torch.einsum("bpi,bpj->ij", wide, up * wide).to(metric.dtype)
