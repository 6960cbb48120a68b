"""The Gaussian message over rows, and over maps cut into rows: v = rM, s = ⟨r, v⟩, exp(−γs)·v.

The inner operation of GEQ's Algorithm 1 (GEQ full, Eq 16) written with M = W_hW_hᵀ, so that no
hidden tensor of width c_hid is ever made: the plain PyTorch forms, differentiable to any order,
without data-dependent control flow.

Exponentials and energies are in float32 or better. For huge γs the weight exp(−γs) underflows to 0
and so do the message and all its derivatives: 0 is never multiplied into an overflowed factor. All
that is asked is that rM is finite in its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.transforms import functorch_active, may_keep, may_reuse, version
from equilibria.engine.tree import accumulation_dtype


def _per_row(gamma: float | Tensor) -> float | Tensor:
    """γ of shape [B] as [B, 1], to stand beside energies [B, P]; scalars unchanged."""
    return gamma.unsqueeze(-1) if isinstance(gamma, Tensor) and gamma.ndim == 1 else gamma


def _apply_metric(rows: Tensor, metric: Tensor | None) -> Tensor:
    return rows if metric is None else rows @ metric


def _row_inner(a: Tensor, b: Tensor) -> Tensor:
    """⟨aᵢ, bᵢ⟩ over the last dimension, in float32 or better. [B, P, k] → [B, P]."""
    dtype = accumulation_dtype(a.dtype)
    return (a.to(dtype) * b.to(dtype)).sum(-1)


def _energies(rows: Tensor, v: Tensor, metric: Tensor | None) -> Tensor:
    # M is positive semidefinite, so a negative sum is rounding, and a large γ would turn it into
    # a weight above 1. An overflowed sum becomes finite: then 0·s is 0 in the derivative in γ.
    s = _row_inner(rows, v)
    if metric is not None and v.dtype in (torch.float16, torch.bfloat16):
        # s ≥ ‖v‖²/‖M‖. Where M is singular the rounding of v in half precision can leave s far
        # below, and 2γe‖v‖² of the derivative, at most ‖M‖ in truth, overflows for a large γ. The
        # trace is no less than the norm, and the 2 keeps healthy rows as they are. It is a constant
        # of the derivative: of an overflowed row even 0 times that is NaN for the M of all rows.
        trace = metric.detach().diagonal().to(s.dtype).sum().clamp_min(torch.finfo(s.dtype).tiny)
        s = torch.maximum(s, _row_inner(v, v) / (2.0 * trace))
    return s.clamp(0.0, torch.finfo(s.dtype).max)


def gaussian_energies(rows: Tensor, metric: Tensor | None = None) -> Tensor:
    """sᵢ = rᵢMrᵢᵀ = ‖rᵢW_h‖². rows [B, P, k], metric [k, k] or None (identity) → [B, P]."""
    return _energies(rows, _apply_metric(rows, metric), metric)


def gaussian_weights(energies: Tensor, gamma: float | Tensor) -> Tensor:
    """eᵢ = exp(−γsᵢ). energies [B, P], gamma [B] or a scalar → [B, P]."""
    t = _per_row(gamma) * energies
    # Beyond the cut exp(−t) is exactly 0. The clamp ends the graph there with a mask, so that no
    # derivative of any order multiplies that 0 by an overflowed γ.
    cut = 750.0 if t.dtype == torch.float64 else 110.0
    return torch.exp(-t.clamp_max(cut))


def gaussian_message(
    rows: Tensor, metric: Tensor | None, gamma: float | Tensor
) -> tuple[Tensor, Tensor]:
    """(exp(−γsᵢ)·rᵢM, sᵢ) with sᵢ = rᵢMrᵢᵀ (GEQ full, Eq 16 and Algorithm 1).

    Args:
        rows: r, [B, P, k].
        metric: M = W_hW_hᵀ, [k, k], symmetric positive semidefinite; None is the identity.
        gamma: γ > 0, [B] or a scalar.

    Returns:
        The message [B, P, k] in the dtype of rM, and the energies s [B, P] (without γ) in
        float32 or better.
    """
    v = _apply_metric(rows, metric)
    s = _energies(rows, v, metric)
    e = gaussian_weights(s, gamma).unsqueeze(-1)
    return (e * v).to(v.dtype), s


def gaussian_message_jvp(
    rows: Tensor, tangent: Tensor, metric: Tensor | None, gamma: float | Tensor
) -> Tensor:
    """d(e·rM)[t] = e·(tM − 2γ⟨t, rM⟩ rM): the derivative of the message at rows along tangent.

    rows and tangent [B, P, k] → [B, P, k]. In the metric's own coordinates h = rW_h this is the
    block e^{−s}(I − 2γhhᵀ) of docs/facts.md, fact 1.
    """
    v = _apply_metric(rows, metric)
    e = gaussian_weights(_energies(rows, v, metric), gamma)
    # The weight first: 0·⟨t, v⟩ is 0, while γ⟨t, v⟩v alone may overflow.
    slope = (2.0 * e * _per_row(gamma)) * _row_inner(tangent, v)
    tm = _apply_metric(tangent, metric)
    return (e.unsqueeze(-1) * tm - slope.unsqueeze(-1) * v).to(tm.dtype)


def is_channels_last(t: Tensor) -> bool:
    """Whether the channels of t [B, C, H, W] lie side by side; False where that is not known."""
    if torch.compiler.is_compiling() and functorch_active():
        return False  # a compiler that traces torch.func knows no strides
    return t.shape[1] > 1 and t.stride(1) == 1


def split_rows(r: Tensor, channels: int, size: int) -> Tensor:
    """[B, C, H, W] → [B, P, c_s·p²], columns in the order (channel, dy, dx)."""
    b, c, h, w = r.shape
    blocks = r.reshape(b, c // channels, channels, h // size, size, w // size, size)
    return blocks.permute(0, 1, 3, 5, 2, 4, 6).reshape(b, -1, channels * size * size)


def merge_rows(
    rows: Tensor, shape: Sequence[int], channels: int, size: int, *, channels_last: bool
) -> Tensor:
    """The inverse, [B, P, c_s·p²] → ``shape`` [B, C, H, W], lying in memory as asked: one copy."""
    b, c, h, w = shape
    blocks = rows.reshape(b, c // channels, h // size, w // size, channels, size, size)
    if channels_last:
        pixels = blocks.permute(0, 2, 5, 3, 6, 1, 4).reshape(b, h, w, c)
        return pixels.contiguous().permute(0, 3, 1, 2)
    return blocks.permute(0, 1, 4, 2, 5, 3, 6).reshape(b, c, h, w).contiguous()


def plain_message(
    a: Tensor, c: Tensor, metric: Tensor, gamma: Tensor, channels: int, size: int
) -> Tensor:
    """The message in plain PyTorch: the twin, and the oracle, of the fused form."""
    r = a - c
    message, _ = gaussian_message(split_rows(r, channels, size), metric, gamma)
    return merge_rows(message, r.shape, channels, size, channels_last=is_channels_last(r))


def permuted(metric: Tensor, channels: int, size: int) -> Tensor:
    """M with rows and columns from the order (channel, dy, dx) to (dy, dx, channel)."""
    if not may_reuse():
        return _permuted(metric, channels, size)
    # Kept with M, of which the energies, the message and later solves ask for the same.
    kept: dict[Any, Tensor] = metric.__dict__.setdefault("_permuted", {})
    key = channels, size, version(metric)
    if key in kept:
        return kept[key]
    made = _permuted(metric, channels, size)
    return kept.setdefault(key, made) if may_keep(metric) else made


def _permuted(metric: Tensor, k: int, p: int) -> Tensor:
    m = metric.view(k, p, p, k, p, p).permute(1, 2, 0, 4, 5, 3)
    return m.reshape(k * p * p, k * p * p).contiguous()


def restored(metric: Tensor, channels: int, size: int) -> Tensor:
    """The inverse of ``permuted``: from the order (dy, dx, channel) to (channel, dy, dx)."""
    k, p = channels, size
    return metric.view(p, p, k, p, p, k).permute(2, 0, 1, 5, 3, 4).reshape(metric.shape)
