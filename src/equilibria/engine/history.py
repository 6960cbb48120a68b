"""The last m vectors of each leaf, kept so that slots are contiguous and products are one call.

Leaves stay apart; each is seen as [B, N] in its own memory order (``Layout``). Where autograd or
torch.func watches, slots are separate tensors that are stacked for each product (no in-place
writes); elsewhere they are one buffer [m, B, N], written in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .transforms import functorch_active
from .tree import Layout, Leaves, accumulation_dtype

_BMM_WIDE_OUTPUT = torch.cuda.is_available() and "out_dtype" in (torch.bmm.__doc__ or "")


def must_be_functional(leaves: Sequence[Tensor]) -> bool:
    """Whether buffers may not be written in place: a graph is recorded, or torch.func runs."""
    return torch.is_grad_enabled() or functorch_active()


class History:
    """Slots 0 … m−1, each holding one vector a sample; a ring that the solver indexes."""

    def __init__(self, z: Leaves, memory: int) -> None:
        self.layouts = [Layout.of(x) for x in z]
        self.memory = memory
        self.functional = must_be_functional(z)
        self.used = 0
        self.slots: list[list[Tensor]] = [[] for _ in z]
        self.buffers: list[Tensor] = []
        if not self.functional:
            self.buffers = [
                torch.empty((memory, x.shape[0], x[0].numel()), dtype=x.dtype, device=x.device)
                for x in z
            ]

    def write(self, slot: int, leaves: Sequence[Tensor]) -> None:
        """Put one vector into a slot; slots fill in order."""
        flat = [lay.flat(x) for lay, x in zip(self.layouts, leaves, strict=True)]
        if self.functional:
            for held, x in zip(self.slots, flat, strict=True):
                held[slot : slot + 1] = [x]
        else:
            for buffer, x in zip(self.buffers, flat, strict=True):
                buffer[slot].copy_(x)
        self.used = max(self.used, slot + 1)

    def _matrices(self) -> list[Tensor]:
        """Each leaf's slots as [B, used, N]."""
        if self.functional:
            return [torch.stack(held, dim=1) for held in self.slots]
        return [buffer[: self.used].transpose(0, 1) for buffer in self.buffers]

    def dot(self, leaves: Sequence[Tensor]) -> Tensor:
        """⟨slot i, x⟩ of each sample, [B, used], in float32 or better."""
        total: Tensor | None = None
        for h, lay, x in zip(self._matrices(), self.layouts, leaves, strict=True):
            part = _wide_bmm(h, lay.flat(x).unsqueeze(-1)).squeeze(-1)
            total = part if total is None else total + part
        assert total is not None
        return total

    def combine(self, weights: Tensor) -> Leaves:
        """Σᵢ weights[:, i]·slot i, shaped as the state; weights [B, used]."""
        out = []
        for h, lay in zip(self._matrices(), self.layouts, strict=True):
            row = torch.bmm(weights.to(h.dtype).unsqueeze(1), h)
            out.append(lay.leaf(row.squeeze(1)))
        return out

    def clear(self) -> None:
        self.used = 0
        self.slots = [[] for _ in self.layouts]

    def take(self, index: Tensor) -> History:
        """The history of some samples only."""
        part = object.__new__(History)
        part.__dict__.update(self.__dict__)
        part.buffers = [b.index_select(1, index) for b in self.buffers]
        part.slots = [[x.index_select(0, index) for x in held] for held in self.slots]
        return part


def _wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of half-precision tensors with float32 sums *and* result."""
    wide = accumulation_dtype(a.dtype)
    if a.dtype == wide:
        return torch.bmm(a, b)
    if a.is_cuda and _BMM_WIDE_OUTPUT and not torch.is_grad_enabled():
        return torch.bmm(a, b, out_dtype=wide)
    return torch.bmm(a.to(wide), b.to(wide))
