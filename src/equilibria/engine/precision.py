"""Autocast around a solve."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

__all__ = ["autocasts", "uncached"]


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
