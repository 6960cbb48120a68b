"""What every layer asks of its input, said in one way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .precision import autocasts

__all__ = ["channels_last", "check_input"]


def check_input(layer: nn.Module, x: object, channels: int, *, convolutional: bool) -> None:
    """Raise unless x is a floating tensor [B, channels] or [B, channels, H, W] as the weights are.

    The dtype may differ under autocast.
    """
    name = type(layer).__name__
    expected = f"[B, {channels}{', H, W' if convolutional else ''}]"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor {expected}, got {type(x).__name__}.")
    if x.ndim != (4 if convolutional else 2) or x.shape[1] != channels:
        raise ValueError(f"{name} takes x {expected}, got shape {tuple(x.shape)}.")
    if x.numel() == 0:
        what = "batch size zero" if x.shape[0] == 0 else "no pixels"
        raise ValueError(f"{name} got x {tuple(x.shape)} with {what}: there is nothing to solve.")
    if not x.is_floating_point():
        raise TypeError(f"{name} takes a floating-point x, got {x.dtype}; use x.float().")
    weight = next(layer.parameters())
    if x.dtype != weight.dtype and not autocasts(x):
        raise TypeError(
            f"{name} has weights of {weight.dtype} and got x of {x.dtype}: use "
            f"x.to({weight.dtype}), layer.to({x.dtype}), or torch.autocast."
        )
    if x.device != weight.device:
        raise ValueError(
            f"{name} lives on {weight.device} and got x on {x.device}: move one of them."
        )


def channels_last(x: Tensor) -> bool:
    """Whether x lies channels-last in memory, and not in the plain order too."""
    if x.ndim != 4 or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)
