"""Eigenvalues of a tangent kernel, and what they say of training.

λ_min, λ_max, κ = λ_max/λ_min           the slowest and the fastest direction of training
exp(−Σ p_i ln p_i),  p_i = λ_i/Σλ       the effective rank (Roy and Vetterli 2007)
(Σλ)²/Σλ²                               the participation ratio
Σλ/λ_max                                the stable rank of J

Where K stays as it is, gradient descent on (s/2)‖f − y‖² has f_t = y + (I − ηsK)ᵗ(f(0) − y).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernel import TangentKernel


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues, largest first, and numbers made of them."""

    eigenvalues: Tensor
    """[n], float64, on the CPU; rounding may make the smallest a little negative."""
    smallest: float
    largest: float
    condition: float  # λ_max/λ_min; infinite where λ_min is not above what rounding leaves of zero
    trace: float
    rank: int  # How many eigenvalues are above n·ε·λ_max, ε of the kernel's dtype
    effective_rank: float
    participation: float
    stable_rank: float

    def to_dict(self) -> dict[str, float]:
        """All numbers but the list of eigenvalues."""
        return {name: value for name, value in vars(self).items() if name != "eigenvalues"}


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


Kernel = TangentKernel | Tensor


def _pair(first: Kernel, second: Kernel) -> tuple[Tensor, Tensor]:
    a, b = (k.matrix if isinstance(k, TangentKernel) else k for k in (first, second))
    if a.shape != b.shape:
        raise ValueError(
            f"the kernels have the shapes {list(a.shape)} and {list(b.shape)}: compare kernels of "
            "the same samples and outputs."
        )
    return a.double(), b.double().to(a.device)


@torch.no_grad()
def kernel_drift(kernel: Kernel, start: Kernel) -> float:
    """‖K − K_0‖/‖K_0‖."""
    now, before = _pair(kernel, start)
    return float((now - before).norm() / before.norm())


@torch.no_grad()
def kernel_distance(kernel: Kernel, start: Kernel) -> float:
    """1 − cos∠(K, K_0): 0 where one is a multiple of the other."""
    now, before = _pair(kernel, start)
    return 1.0 - float((now * before).sum() / (now.norm() * before.norm()))


@torch.no_grad()
def kernel_alignment(first: Kernel, second: Kernel) -> float:
    """⟨HKH, HLH⟩/(‖HKH‖‖HLH‖) of two square kernels, H = I − 11ᵀ/n (Cortes et al. 2012).

    0 where one is constant.
    """
    a, b = _pair(first, second)
    if a.shape[0] != a.shape[1]:
        raise ValueError(f"alignment is of square kernels, got {list(a.shape)}.")
    a, b = _centered(a), _centered(b)
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 0 else 0.0


def _centered(kernel: Tensor) -> Tensor:
    rows = kernel - kernel.mean(0, keepdim=True)
    return rows - rows.mean(1, keepdim=True)


@torch.no_grad()
def label_alignment(kernel: Kernel, targets: Tensor) -> float:
    """The alignment of a kernel of N samples with YYᵀ.

    Args:
        kernel: [N, N]; of a kernel with several outputs the mean over them, tr K(x_i, x_j)/k.
        targets: classes, whole numbers [N], or values [N] or [N, K].
    """
    matrix = kernel.traced if isinstance(kernel, TangentKernel) else kernel
    if targets.ndim not in (1, 2) or len(targets) != len(matrix):
        raise ValueError(
            f"targets have the shape {list(targets.shape)} for a kernel of {len(matrix)} samples; "
            "expected classes [N] or values [N] or [N, K]."
        )
    if targets.is_floating_point():
        values = targets.double().reshape(len(targets), -1)
    else:
        if targets.ndim == 2:
            raise ValueError("targets [N, K] of whole numbers: give classes [N], or floats.")
        values = torch.nn.functional.one_hot(targets.unique(return_inverse=True)[1]).double()
    values = values.to(matrix.device)
    return kernel_alignment(matrix, values @ values.mT)
