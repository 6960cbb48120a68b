"""Convolutions that keep the pixels (stride 1, odd kernels), without autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padding(weight: Tensor) -> list[int]:
    return [k // 2 for k in weight.shape[2:]]


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, None, 1, padding(weight))


def convolve_add_relu(
    x: Tensor, weight: Tensor, z: Tensor | None, alpha: float, *, keep_nan: bool = False
) -> Tensor:
    """ReLU(αz + Wx), in one kernel where cuDNN has it; it may turn NaN into 0 if not kept."""
    fused = x.is_cuda and torch.backends.cudnn.enabled and torch.version.hip is None
    if fused and x.dtype != torch.float64 and not keep_nan:
        rest = (None, [1, 1], padding(weight), [1, 1], 1)
        out: Tensor
        if z is None or alpha == 0.0:
            out = torch.cudnn_convolution_relu(x, weight, *rest)
        else:
            out = torch.cudnn_convolution_add_relu(x, weight, z, alpha, *rest)
        return out
    found = convolve(x, weight)
    return found.relu_() if z is None else found.add_(z, alpha=alpha).relu_()
