"""How far two kernels are apart, and how a kernel fits the labels.

    drift        ‖K_t − K_0‖/‖K_0‖
    distance     1 − ⟨K_t, K_0⟩/(‖K_t‖‖K_0‖)            blind to the scale
    alignment    ⟨HKH, HLH⟩/(‖HKH‖‖HLH‖),  H = I − 11ᵀ/n, L = YYᵀ for labels Y (one-hot)

Norms and products are Frobenius'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel import TangentKernel

__all__ = ["kernel_alignment", "kernel_distance", "kernel_drift", "label_alignment"]

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
def kernel_alignment(first: Kernel, second: Kernel, *, centered: bool = True) -> float:
    """⟨HKH, HLH⟩/(‖HKH‖‖HLH‖) of two square kernels; 0 where one is constant.

    ``centered=False`` leaves H out (Cristianini et al. 2001; with H, Cortes et al. 2012).
    """
    a, b = _pair(first, second)
    if a.shape[0] != a.shape[1]:
        raise ValueError(f"alignment is of square kernels, got {list(a.shape)}.")
    if centered:
        a, b = _centered(a), _centered(b)
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 0 else 0.0


def _centered(kernel: Tensor) -> Tensor:
    rows = kernel - kernel.mean(0, keepdim=True)
    return rows - rows.mean(1, keepdim=True)


@torch.no_grad()
def label_alignment(kernel: Kernel, targets: Tensor, *, centered: bool = True) -> float:
    """The alignment of a kernel of N samples with YYᵀ.

    Args:
        kernel: [N, N]; of a kernel with several outputs the mean over them, tr K(x_i, x_j)/k.
        targets: classes, whole numbers [N], or values [N] or [N, K].
        centered: as in ``kernel_alignment``.
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
        found = targets.unique(return_inverse=True)[1]
        values = torch.nn.functional.one_hot(found).double()
    values = values.to(matrix.device)
    return kernel_alignment(matrix, values @ values.mT, centered=centered)
