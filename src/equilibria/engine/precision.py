"""Autocast around a solve, and whether float32 products are rounded to TF32."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["autocasts", "convolutions_take_tf32", "products_take_tf32", "uncached"]


def autocasts(t: Tensor) -> bool:
    """Whether autocast is on for the device of t."""
    return not t.is_meta and torch.is_autocast_enabled(t.device.type)


def uncached(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast as it is, without its cache of cast weights.

    The cache would hand the evaluation that is differentiated (and whatever the caller computes
    after the solve) a cast made during the solve, without a graph to the weight.
    """
    if torch.compiler.is_compiling() or not autocasts(like):
        return contextlib.nullcontext()
    if not torch.is_autocast_cache_enabled():
        return contextlib.nullcontext()
    device = like.device.type
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)


# torch has two ways to set this. The older names raise where the newer ones were used.


def convolutions_take_tf32() -> bool:
    """Whether cuDNN may round float32 to TF32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        newer: Any = torch.backends.cudnn
        return bool(newer.conv.fp32_precision == "tf32")


def products_take_tf32() -> bool:
    """Whether float32 products of matrices on a GPU may round to TF32."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        newer: Any = torch.backends.cuda.matmul
        return bool(newer.fp32_precision == "tf32")
