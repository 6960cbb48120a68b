"""What every layer asks of its options and of its input, and the precision that it solves in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints.graph import has_batch, host_may_read, lend
from equilibria.engine.transforms import autocasts, transforms_active
from equilibria.engine.tree import map_tensors, per_sample
from equilibria.problems import Prior


def check_sizes(owner: str, sizes: Mapping[str, object], least: int = 1) -> None:
    """Raise unless every size is an integer of at least ``least``."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{owner}({name}={value!r}): expected an integer of at least {least}.")


def check_kernel(owner: str, kernel_size: int) -> None:
    """Raise unless the kernel's taps lie symmetrically around a pixel."""
    check_sizes(owner, {"kernel_size": kernel_size})
    if kernel_size % 2 == 0:
        raise ValueError(
            f"{owner}(kernel_size={kernel_size}): 'same' padding needs an odd kernel size."
        )


def check_groups(owner: str, name: str, channels: int, groups: int) -> None:
    """Group norm cuts channels into equal groups."""
    if channels % groups:
        raise ValueError(
            f"{owner}: groups={groups} of the group norms must divide {name}={channels}, and "
            f"{channels} % {groups} = {channels % groups}."
        )


def check_prior(owner: str, prior: object) -> None:
    if not isinstance(prior, Prior):
        raise TypeError(f"{owner}(prior={prior!r}): expected a prior such as NonNegative().")
    if prior.has_tensors or not prior.separable:
        raise TypeError(
            f"{owner}(prior={type(prior).__name__}(...)): expected an elementwise prior whose "
            "parameters are numbers; write other problems down with EquilibriumLayer."
        )


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


def check_halving(owner: str, x: Tensor, times: int) -> None:
    """Raise unless the maps x [B, C, H, W] can be halved so often."""
    height, width = x.shape[2:]
    unit = 1 << times
    if height % unit or width % unit:
        raise ValueError(
            f"{owner} halves its maps {times} times: H and W must be multiples of {unit}, got x of "
            f"{height} × {width} pixels. Pad or crop the input."
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
    rest = tuple(range(1, x.ndim))
    size = torch.linalg.vector_norm(x.detach(), torch.inf, rest) if rest else x.detach()
    bad = ~torch.isfinite(size)
    if host_may_read(bad) and not bool(bad.any()):
        return x, None
    if torch.compiler.is_compiling() or transforms_active():
        return lend(x, bad), bad
    return _Lent.apply(x, bad), bad  # type: ignore[no-untyped-call]


class _Lent(torch.autograd.Function):
    """``lend`` in one pass. What is made of bad samples is marked, so no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: Tensor) -> Tensor:
        first = torch.argmax((~bad).to(torch.int8)).view(1)
        row = x.index_select(0, first).nan_to_num(0.0, 0.0, 0.0)
        # Into the layout of x: the row, read first, has lost it, and convolutions would copy.
        lent = torch.empty_like(x)
        return torch.where(per_sample(bad, x), row, x, out=lent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def marked(tree: Any, bad: Tensor | None) -> Any:
    """A tree of tensors with NaN for the samples of ``bad``, and no gradient from them."""
    if bad is None:
        return tree

    def mark(t: Tensor) -> Tensor:
        if not has_batch(t, bad) or not t.is_floating_point():
            return t
        return torch.where(per_sample(bad, t), torch.nan, t)

    return map_tensors(mark, tree)


def zeros_as(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the device of x, channels-last where x lies so and not in the plain order too."""
    last = torch.channels_last
    if x.ndim != 4 or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return x.new_zeros(shape, dtype=dtype)
    b, c, h, w = shape
    return x.new_zeros((b, h, w, c), dtype=dtype).permute(0, 3, 1, 2)


def solving_dtype(like: Tensor) -> torch.dtype:
    """The dtype for the state of a map on ``like``: autocast's in place of float32.

    A map that rounds to bfloat16 inside has no fixed point to the tolerance of float32.
    """
    if like.dtype == torch.float32 and autocasts(like):
        return torch.get_autocast_dtype(like.device.type)
    return like.dtype


def lowered(weight: Any) -> Tensor:
    """The weight in autocast's precision, to be cast once a solve, not at each evaluation."""
    given: Tensor = weight  # an attribute of a module may be anything, for a type checker
    wanted = solving_dtype(given)
    return given if given.dtype == wanted else given.to(wanted)
