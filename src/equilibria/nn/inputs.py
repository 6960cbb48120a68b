"""What every layer asks of its input, said in one way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints.quarantine import has_batch, host_may_read, lend
from equilibria.engine.tree import map_tensors

from .precision import autocasts

__all__ = ["channels_last", "check_input", "contained", "marked"]


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


def contained(x: Any) -> tuple[Any, Tensor | None]:
    """x without samples that hold NaN or infinity, and which [B] they are; None: there are none.

    A weight that is applied to x before the solve would get the gradient 0·NaN of such a sample.
    So it sees a copy of a healthy sample instead, and what the solve is given is ``marked``.
    Without gradients nothing is done, and what is no batch of numbers is left to ``check_input``.
    """
    if not torch.is_grad_enabled() or not isinstance(x, Tensor) or not x.is_floating_point():
        return x, None
    if x.ndim == 0 or x.numel() == 0:
        return x, None
    wide = x.detach()
    size = (
        wide if x.ndim == 1 else torch.linalg.vector_norm(wide, torch.inf, tuple(range(1, x.ndim)))
    )
    bad = ~torch.isfinite(size)
    if host_may_read(bad) and not bool(bad.any()):
        return x, None
    return lend(x, bad), bad


def marked(tree: Any, bad: Tensor | None) -> Any:
    """A tree of tensors with NaN for the samples of ``bad``, and no gradient from them."""
    if bad is None:
        return tree

    def mark(t: Tensor) -> Tensor:
        if not has_batch(t, bad) or not t.is_floating_point():
            return t
        return torch.where(bad.view(-1, *[1] * (t.ndim - 1)), torch.nan, t)

    return map_tensors(mark, tree)


def channels_last(x: Tensor) -> bool:
    """Whether x lies channels-last in memory, and not in the plain order too."""
    if x.ndim != 4 or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)
