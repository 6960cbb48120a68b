"""3 × 3 convolutions on a CPU in a quarter of the multiplications (Winograd; Lavin and Gray 2016).

    y = Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A        for every 4 × 4 tile of y, d the 6 × 6 pixels under it

F(4 × 4, 3 × 3): 36 products a tile instead of 144, as 36 matrix products over channels. It makes
the inference of a GEQ network 1.10 times faster (docs/performance-cpu.md). Rounding is ten times
that of the direct sum: about 2e-6 of ‖y‖ in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.spectral import pull_with_graph
from equilibria.engine.transforms import for_any_mode, transforms_active

_G = (
    (1 / 4, 0.0, 0.0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0.0, 0.0, 1.0),
)
_NARROWEST = 64  # with fewer channels the transforms cost more than the products save
_LEAST_TILES = 32  # with fewer tiles in the batch the 36 products are too small
_BYTES = 4 * 2**20  # working set of the transforms: what a core's caches hold


def can_use_winograd(x: Tensor, weight: Tensor) -> bool:
    """Whether the fast form serves ``conv2d(x, weight, padding=1)``, and is faster.

    x [B, C, H, W] in float32 on a CPU and channels-last, H and W multiples of 4, weight 3 × 3.
    Not under torch.func, forward-mode AD, torch.compile or autocast.
    """
    # First: a compiler would take a test of the sizes below for a limit on them.
    if torch.compiler.is_compiling() or transforms_active():
        return False
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    if x.ndim != 4 or tuple(weight.shape[2:]) != (3, 3) or min(weight.shape[:2]) < _NARROWEST:
        return False
    b, _, h, w = x.shape
    if h % 4 or w % 4 or b * h * w < 16 * _LEAST_TILES or x.stride(1) != 1:
        return False
    return not torch.is_autocast_enabled("cpu")


@for_any_mode()
def transformed_weight(weight: Tensor, *, adjoint: bool) -> Tensor:
    """G g Gᵀ of every kernel, [36, in, out]; of the adjoint convolution if asked."""
    g = torch.tensor(_G, dtype=torch.float64)
    kernel = weight.detach().flip(2, 3).transpose(0, 1) if adjoint else weight.detach()
    both = torch.kron(g, g).to(weight.dtype)
    moved = both @ kernel.permute(3, 2, 1, 0).reshape(9, -1)  # columns of the tile first
    return moved.view(36, kernel.shape[1], kernel.shape[0])


def winograd(x: Tensor, weight: Tensor, forward: Tensor, backward: Tensor, adjoint: bool) -> Tensor:
    """conv2d(x, weight, padding=1), or conv_transpose2d if ``adjoint``; differentiable.

    ``forward`` and ``backward`` are the transformed weights of this map and of its adjoint.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        # Views are torch functions, where implicit gradients put stand-ins for x and W, and nodes
        # of the graph, which tell backward whether anyone asks for them.
        given = x.view_as(x), weight.view_as(weight)
        found: Tensor = _Winograd.apply(*given, forward, backward, adjoint)  # type: ignore[no-untyped-call]
        return found
    return _convolve(x, forward)


class _Winograd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, forward: Tensor, backward: Tensor, adjoint: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, backward)
        ctx.adjoint = adjoint
        return _convolve(x, forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, backward = ctx.saved_tensors
        needs, (g,) = _asked(ctx), gradients
        if torch.is_grad_enabled():
            plain = functools.partial(F.conv_transpose2d if ctx.adjoint else F.conv2d, padding=1)
            return (*pull_with_graph(plain, (x, weight), needs, g), None, None, None)
        dx = dw = None
        if needs[0]:
            last = g.contiguous(memory_format=torch.channels_last)
            dx = _convolve(last, backward)
        if needs[1]:
            dw = torch.ops.aten.convolution_backward(
                g, x, weight, None, [1, 1], [1, 1], [1, 1], ctx.adjoint, [0, 0], 1,
                [False, True, False],
            )[1]  # fmt: skip
        return dx, dw, None, None, None


def _asked(ctx: Any) -> list[bool]:
    """Whether x and W are wanted in this backward pass: a product with Jᵀ alone wants no W.

    ``ctx.needs_input_grad`` says whether they ever are.
    """
    nodes = [node for node, _ in ctx.next_functions[:2]]
    return [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]


def _convolve(x: Tensor, u: Tensor) -> Tensor:
    """The convolution of x [B, C, H, W] with u [36, C, O], some samples at a time."""
    b, c, h, w = x.shape
    o, tall, wide = u.shape[2], h // 4, w // 4
    n = min(b, max(1, _BYTES // (9 * h * w * max(c, o))))
    y = x.new_empty(b, h, w, o)
    source, target = x.permute(0, 2, 3, 1), y.view(b, tall, 4, wide, 4, o).permute(2, 4, 0, 1, 3, 5)
    for start in range(0, b, n):
        part = source[start : start + n]
        k = part.shape[0]
        if start == 0 or k < n:
            padded = x.new_zeros(k, h + 2, w + 2, c)
            rows = [padded[:, i : i + h - 3 : 4] for i in range(6)]
            half = x.new_empty(6, k, tall, w + 2, c)
            columns = [half[:, :, :, j : j + w - 3 : 4] for j in range(6)]
            v = x.new_empty(6, 6, k, tall, wide, c)  # (column, row) of the tile first
            m = x.new_empty(36, k * tall * wide, o)
            q = x.new_empty(4, 6, k, tall, wide, o)
        padded[:, 1:-1, 1:-1].copy_(part)
        _inward(rows, half.unbind(0))
        _inward(columns, v.unbind(0))
        torch.bmm(v.view(36, -1, c), u, out=m)
        _outward(m.view(6, 6, k, tall, wide, o).unbind(0), q.unbind(0))
        _outward(q.unbind(1), target[:, :, start : start + k].unbind(0))
    return y.permute(0, 3, 1, 2)


def _inward(d: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """out = Bᵀd along one axis of the tiles, six slices to six."""
    torch.sub(d[4], d[2], alpha=5, out=out[0]).add_(d[0], alpha=4)
    torch.sub(d[5], d[3], alpha=5, out=out[5]).add_(d[1], alpha=4)
    even, odd = torch.sub(d[4], d[2], alpha=4), torch.sub(d[3], d[1], alpha=4)
    torch.add(even, odd, out=out[1])
    torch.sub(even, odd, out=out[2])
    torch.sub(d[4], d[2], out=even)
    torch.sub(d[3], d[1], out=odd)
    torch.add(even, odd, alpha=2, out=out[3])
    torch.sub(even, odd, alpha=2, out=out[4])


def _outward(m: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """out = Aᵀm along one axis of the tiles, six slices to four."""
    near, far = m[1] + m[2], m[3] + m[4]
    torch.add(m[0], near, out=out[0]).add_(far)
    torch.add(near, far, alpha=4, out=out[2])
    torch.sub(m[1], m[2], out=near)
    torch.sub(m[3], m[4], out=far)
    torch.add(near, far, alpha=2, out=out[1])
    torch.add(near, far, alpha=8, out=out[3]).add_(m[5])
