"""The Triton kernels of the Gaussian patch message as differentiable operations.

Eagerly they run in an autograd Function, which costs a launch and little else. Under torch.compile
they are operations registered with torch, which the compiler plans memory and fusion around. A
derivative of the derivative is that of the plain form: right to any order, fused to the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from equilibria.engine.spectral import pull_with_graph

from . import gaussian_triton as kernels
from .gaussian import plain_message, restored


def message(
    a: Tensor, c: Tensor, metric: Tensor, gamma: Tensor, channels: int, size: int
) -> Tensor:
    """merge(exp(−γsᵢ)·rᵢM), r = a − c; M in the kernel's order of columns, gamma [B] float32."""
    if torch.compiler.is_compiling():
        found: Tensor = _operation(a, c, metric, gamma, channels, size)
        return found
    found = _Message.apply(a, c, metric, gamma, channels, size)  # type: ignore[no-untyped-call]
    return found


class _Message(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, c: Tensor, metric: Tensor, gamma: Tensor, channels: int, size: int
    ) -> Tensor:
        ctx.save_for_backward(a, c, metric, gamma)
        ctx.cut = channels, size
        return kernels.forward(a, c, metric, gamma, channels, size, kernels.direct)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, needs, (g,) = ctx.saved_tensors, ctx.needs_input_grad[:4], gradients
        channels, size = ctx.cut
        if torch.is_grad_enabled():

            def plain(a: Tensor, c: Tensor, metric: Tensor, gamma: Tensor) -> Tensor:
                return plain_message(a, c, restored(metric, channels, size), gamma, channels, size)

            return (*pull_with_graph(plain, saved, needs, g), None, None)
        a, c, metric, gamma = saved
        found = kernels.backward(
            a, c, metric, gamma, g, channels, size, needs[2], needs[3], kernels.direct
        )
        return (*_spread(found, needs, saved[2].dtype), None, None)


def _spread(
    found: tuple[Tensor, Tensor, Tensor], needs: tuple[bool, ...], dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """Gradients of a, c, M and γ from those of r = a − c, M and γ."""
    dr, dm, dgamma = found
    return (
        dr,
        -dr if needs[1] else None,
        dm.to(dtype) if needs[2] else None,
        dgamma if needs[3] else None,
    )


@triton_op("equilibria::gaussian_patches", mutates_args=())
def _operation(
    a: Tensor, c: Tensor, metric: Tensor, gamma: Tensor, channels: int, size: int
) -> Tensor:
    return kernels.forward(a, c, metric, gamma, channels, size, wrap_triton)


@triton_op("equilibria::gaussian_patch_energies", mutates_args=())
def row_energies(c: Tensor, metric: Tensor, channels: int, size: int) -> Tensor:
    """⟨rᵢM, rᵢ⟩ of every row of c, [B, P] float32, for a compiler; M in the kernel's order."""
    return kernels.energies(c, metric, channels, size, wrap_triton)


@triton_op("equilibria::gaussian_patch_energies_backward", mutates_args=())
def _energies_pullback(
    c: Tensor, metric: Tensor, g: Tensor, channels: int, size: int, with_metric: bool
) -> tuple[Tensor, Tensor]:
    return kernels.energies_backward(c, metric, g, channels, size, with_metric, wrap_triton)


@triton_op("equilibria::gaussian_patches_backward", mutates_args=())
def _pullback(
    a: Tensor,
    c: Tensor,
    metric: Tensor,
    gamma: Tensor,
    g: Tensor,
    channels: int,
    size: int,
    with_metric: bool,
    with_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.backward(
        a, c, metric, gamma, g, channels, size, with_metric, with_gamma, wrap_triton
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.cut = inputs[4:6]


def _back(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad[:4]
    found = _pullback(*saved, g, *ctx.cut, needs[2], needs[3])
    return (*_spread(found, needs, saved[2].dtype), None, None)


_operation.register_autograd(_back, setup_context=_keep)


def _keep_energies(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.cut = inputs[2:4]


def _back_energies(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    (c, metric), needs = ctx.saved_tensors, ctx.needs_input_grad
    dc, dm = _energies_pullback(c, metric, g.contiguous(), *ctx.cut, needs[1])
    return dc, dm.to(metric.dtype) if needs[1] else None, None, None


row_energies.register_autograd(_back_energies, setup_context=_keep_energies)
