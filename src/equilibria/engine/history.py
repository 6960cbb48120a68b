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


def must_be_functional() -> bool:
    """Whether buffers may not be written in place: a graph is recorded, or something traces."""
    return torch.is_grad_enabled() or functorch_active() or torch.compiler.is_compiling()


class History:
    """Slots 0 … m−1, each holding one vector a sample; a ring that the solver indexes."""

    def __init__(self, z: Leaves, memory: int) -> None:
        self.layouts = [Layout.of(x) for x in z]
        self.memory = memory
        self.functional = must_be_functional()
        self.used = 0
        self.slots: list[list[Tensor]] = [[] for _ in z]
        self.buffers: list[Tensor] = []
        if not self.functional:
            self.buffers = [
                torch.empty((memory, x.shape[0], x[0].numel()), dtype=x.dtype, device=x.device)
                for x in z
            ]
        self._forget_views()

    def _forget_views(self) -> None:
        # Views cost microseconds each to make; a solve uses the same few over and over.
        self._leaf_views: list[Leaves | None] = [None] * self.memory
        self._rows: list[Leaves | None] = [None] * self.memory
        self._matrix_views: tuple[list[Tensor], list[Tensor]] | None = None

    def slot(self, index: int) -> Leaves:
        """The slot's memory, shaped as the state, to be written with ``out=``."""
        views = self._leaf_views[index]
        if views is None:
            pairs = zip(self.layouts, self.buffers, strict=True)
            views = self._leaf_views[index] = [lay.leaf(buffer[index]) for lay, buffer in pairs]
        return views

    def filled(self, index: int) -> None:
        """Say that a slot has been written; slots fill in order."""
        if index >= self.used:
            self.used = index + 1
            self._matrix_views = None

    def write(self, index: int, leaves: Sequence[Tensor]) -> None:
        """Put one vector into a slot."""
        if self.functional:
            for held, lay, x in zip(self.slots, self.layouts, leaves, strict=True):
                held[index : index + 1] = [lay.flat(x)]
        else:
            for view, x in zip(self.slot(index), leaves, strict=True):
                if view is not x:
                    view.copy_(x)
        self.filled(index)

    def _matrices(self) -> tuple[list[Tensor], list[Tensor]]:
        """Each leaf's slots as [B, used, N], and transposed."""
        if self.functional:
            stacked = [torch.stack(held, dim=1) for held in self.slots]
            return stacked, [s.transpose(1, 2) for s in stacked]
        if self._matrix_views is None:
            filled = [buffer[: self.used] for buffer in self.buffers]
            self._matrix_views = (
                [b.transpose(0, 1) for b in filled],
                [b.permute(1, 2, 0) for b in filled],
            )
        return self._matrix_views

    def dot(self, leaves: Sequence[Tensor]) -> Tensor:
        """⟨slot i, x⟩ of each sample, [B, used], in float32 or better."""
        pairs = zip(self.layouts, leaves, strict=True)
        return self._dot([lay.flat(x).unsqueeze(1) for lay, x in pairs]).squeeze(1)

    def dot_slot(self, index: int) -> Tensor:
        """⟨slot i, slot index⟩ of each sample, [B, 1, used], in float32 or better."""
        if self.functional:
            return self._dot([held[index].unsqueeze(1) for held in self.slots])
        rows = self._rows[index]
        if rows is None:
            rows = self._rows[index] = [b[index].unsqueeze(1) for b in self.buffers]
        return self._dot(rows)

    def _dot(self, rows: Leaves) -> Tensor:
        # Row times matrix: as matrix times column the CPU's batched product is ten times slower.
        transposed = self._matrices()[1]
        total = _wide_bmm(rows[0], transposed[0])
        for row, matrix in zip(rows[1:], transposed[1:], strict=True):
            total = total + _wide_bmm(row, matrix)
        return total

    def combine(self, weights: Tensor) -> Leaves:
        """Σᵢ weights[:, i]·slot i, shaped as the state; weights [B, used] or [B, 1, used]."""
        row = weights if weights.dim() == 3 else weights.unsqueeze(1)
        return [
            lay.leaf(torch.bmm(row if row.dtype == h.dtype else row.to(h.dtype), h))
            for h, lay in zip(self._matrices()[0], self.layouts, strict=True)
        ]

    def clear(self) -> None:
        self.used = 0
        self.slots = [[] for _ in self.layouts]
        self._matrix_views = None

    def take(self, index: Tensor) -> History:
        """The history of some samples only."""
        part = object.__new__(History)
        part.__dict__.update(self.__dict__)
        part.buffers = [b.index_select(1, index) for b in self.buffers]
        part.slots = [[x.index_select(0, index) for x in held] for held in self.slots]
        part._forget_views()
        return part


def _wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of half-precision tensors with float32 sums *and* result."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    wide = accumulation_dtype(a.dtype)
    if a.is_cuda and _BMM_WIDE_OUTPUT and not torch.is_grad_enabled():
        return torch.bmm(a, b, out_dtype=wide)
    return torch.bmm(a.to(wide), b.to(wide))
