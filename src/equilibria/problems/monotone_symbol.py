"""Convolutions on a torus, frequency by frequency: K̂(θ) = Σ_a K_a e^{i⟨a, θ⟩}.

A stride-2 convolution N, and so NᵀN, commutes with shifts by two pixels only. Written on the four
phases of a map (``pixel_unshuffle``: c channels on H × W become 4c on H/2 × W/2), it is a plain
convolution again, and so is everything else: every symbol below is a matrix a frequency.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.problems.monotone_operator import gram_bound, widened

__all__ = [
    "kernel_norm_bound",
    "phase_kernel",
    "phase_kernel_down",
    "symbol",
]

# Samples per tap and axis: cos(π/10)² = 0.905, so the grid costs at most 10% of the bound.
_SAMPLES_PER_TAP = 5
_SQUARINGS = 4


def _waves(points: int, size: int, taps: int, origin: int, like: Tensor) -> Tensor:
    """e^{iθ(a − origin)} for the first ``points`` frequencies of ``size``, [points, taps]."""
    steps = torch.arange(taps, dtype=torch.float64) - origin
    angles = torch.outer(torch.arange(points, dtype=torch.float64), steps) * (2 * math.pi / size)
    waves = torch.complex(angles.cos(), angles.sin())
    kind = torch.complex128 if like.dtype == torch.float64 else torch.complex64
    return waves.to(device=like.device, dtype=kind)


def symbol(kernel: Tensor, origin: int, rows: int, cols: int) -> Tensor:
    """K̂ at the frequencies of rfft2 on a rows × cols torus, for any number of taps.

    kernel [o, c, t, t] whose tap ``origin`` stands over the output pixel →
    [rows, cols//2 + 1, o, c], complex.
    """
    taps = kernel.shape[-1]
    down = _waves(rows, rows, taps, origin, kernel)
    across = _waves(cols // 2 + 1, cols, taps, origin, kernel)
    half = torch.einsum("lb,ocab->laoc", across, kernel.to(down.dtype))
    return torch.einsum("ja,laoc->jloc", down, half)


def phase_kernel(kernel: Tensor) -> tuple[Tensor, int]:
    """K on the four phases: [o, c, 4p + 1, .] centered → [4o, 4c, 2p + 1, .], and its origin.

    Output pixel 2i + φ reads 2(i + τ) + ψ with the tap a = 2τ + ψ − φ + 2p.
    """
    taps = (kernel.shape[-1] + 1) // 2
    padded = F.pad(kernel, (1, 1, 1, 1))
    phases = [(i, j) for i in (0, 1) for j in (0, 1)]
    rows = []
    for f in phases:
        columns = []
        for g in phases:
            top, left = g[0] - f[0] + 1, g[1] - f[1] + 1
            columns.append(
                padded[..., top : top + 2 * taps - 1 : 2, left : left + 2 * taps - 1 : 2]
            )
        rows.append(torch.stack(columns, 2))
    return torch.stack(rows, 1).flatten(2, 3).flatten(0, 1), taps // 2


def phase_kernel_down(kernel: Tensor, shift: int) -> tuple[Tensor, int]:
    """A stride-2 N on the phases of its input: [o, c, k, k] → [o, 4c, ., .], and its origin.

    Output pixel j reads 2j − shift + a = 2(j + τ) + ψ.
    """
    k = kernel.shape[-1]
    origin = (shift + 1) // 2
    taps = (k - 1 - shift) // 2 + origin + 1
    first = shift + 1 - 2 * origin
    padded = F.pad(kernel, (1, 1, 1, 1))
    parts = []
    for i in (0, 1):
        for j in (0, 1):
            top, left = first + i, first + j
            parts.append(padded[..., top : top + 2 * taps - 1 : 2, left : left + 2 * taps - 1 : 2])
    return torch.stack(parts, 2).flatten(1, 2), origin


def kernel_norm_bound(kernel: Tensor) -> Tensor:
    """An upper bound (up to rounding) on sup_θ ‖K̂(θ)‖, one number on the device; no gradient.

    From a grid to the supremum by the rule of ``problems/norms.py``: divide by cos(πd/N) an axis.
    """
    with torch.no_grad():
        kernel = widened(kernel.detach())
        taps = kernel.shape[-1]
        points = max(1, _SAMPLES_PER_TAP * (taps - 1))
        shrink = math.cos(math.pi * (taps - 1) / 2 / points) ** 2
        found = gram_bound(symbol(kernel, 0, points, points), _SQUARINGS)
        return found.amax() / shrink
