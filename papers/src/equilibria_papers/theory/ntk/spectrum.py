"""Eigenvalues of a tangent kernel, and what they say of training.

λ_min, λ_max, κ = λ_max/λ_min           the slowest and the fastest direction of training
exp(−Σ p_i ln p_i),  p_i = λ_i/Σλ       the effective rank (Roy and Vetterli 2007)
(Σλ)²/Σλ²                               the participation ratio
Σλ/λ_max                                the stable rank of J
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernel import TangentKernel

__all__ = ["Spectrum", "as_matrix", "spectrum"]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues, largest first, and numbers made of them."""

    eigenvalues: Tensor
    """[n], float64, on the CPU; rounding may make the smallest a little negative."""
    smallest: float
    largest: float
    condition: float
    """λ_max/λ_min; infinite where λ_min is not above what rounding leaves of zero."""
    trace: float
    rank: int
    """How many eigenvalues are above n·ε·λ_max, ε of the kernel's dtype."""
    effective_rank: float
    participation: float
    stable_rank: float

    def to_dict(self) -> dict[str, float]:
        """All numbers but the list of eigenvalues."""
        return {
            "smallest": self.smallest,
            "largest": self.largest,
            "condition": self.condition,
            "trace": self.trace,
            "rank": self.rank,
            "effective_rank": self.effective_rank,
            "participation": self.participation,
            "stable_rank": self.stable_rank,
        }


def as_matrix(kernel: TangentKernel | Tensor, what: str = "kernel") -> Tensor:
    """The square matrix of a kernel, checked to be finite and symmetric."""
    matrix: object = kernel.matrix if isinstance(kernel, TangentKernel) else kernel
    if not isinstance(matrix, Tensor) or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        got = list(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(
            f"{what}: expected a TangentKernel of samples with themselves or a square matrix, "
            f"got {got}."
        )
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{what} holds NaN or infinity: a gradient of the model is not finite.")
    apart = float((matrix - matrix.mT).abs().max())
    scale = float(matrix.abs().max())
    if apart > 1e-3 * scale:
        raise ValueError(f"{what} is not symmetric: entries differ by {apart:.3g} of {scale:.3g}.")
    return matrix


@torch.no_grad()
def spectrum(kernel: TangentKernel | Tensor) -> Spectrum:
    """The eigenvalues of a kernel [n, n], in float64."""
    matrix = as_matrix(kernel)
    wide = matrix.double()
    values = torch.linalg.eigvalsh((wide + wide.mT) / 2).flip(0).cpu()
    n, top, low = len(values), float(values[0]), float(values[-1])
    noise = n * torch.finfo(matrix.dtype).eps * max(top, 0.0)
    positive = values.clamp_min(0.0)
    total = float(positive.sum())
    shares = positive / total if total > 0 else positive
    entropy = -float(torch.xlogy(shares, shares).sum())
    squares = float(positive.square().sum())
    return Spectrum(
        eigenvalues=values,
        smallest=low,
        largest=top,
        condition=top / low if low > noise else math.inf,
        trace=float(values.sum()),
        rank=int((values > noise).sum()),
        effective_rank=math.exp(entropy) if total > 0 else 0.0,
        participation=total**2 / squares if squares > 0 else 0.0,
        stable_rank=total / top if top > 0 else 0.0,
    )
