"""Images that stay encoded until they are asked for, indexed as a tensor is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

__all__ = ["LazyImages", "as_index", "decoding_threads"]


def decoding_threads() -> int:
    """How many threads decode: the processors this process may use, 32 at most."""
    if hasattr(os, "sched_getaffinity"):
        return min(32, len(os.sched_getaffinity(0)))
    return min(32, os.cpu_count() or 1)


def as_index(index: Any, count: int) -> Tensor:
    """Positions in 0 … count − 1, long, from a slice, range, sequence, tensor or mask."""
    if isinstance(index, slice):
        return torch.arange(count)[index]
    found = torch.as_tensor(list(index) if isinstance(index, range) else index).detach().cpu()
    if found.numel() == 0:
        return torch.zeros(0, dtype=torch.long)
    if found.ndim != 1:
        raise IndexError(f"expected a one-dimensional index, got shape {tuple(found.shape)}.")
    if found.dtype == torch.bool:
        if len(found) != count:
            raise IndexError(f"a mask of {len(found)} entries cannot choose from {count} samples.")
        return found.nonzero().flatten()
    if found.is_floating_point() or found.is_complex():
        raise IndexError(f"expected integers as an index, got {found.dtype}.")
    found = found.long()
    low, high = int(found.min()), int(found.max())
    if low < -count or high >= count:
        raise IndexError(f"index {high if high >= count else low} is out of range for {count}.")
    return torch.where(found < 0, found + count, found)


class LazyImages:
    """A stack [N, …] whose rows are decoded when indexed, in threads.

    ``read(i)`` gives row i of the source as a tensor of ``row_shape``; ``index`` chooses and orders
    the rows. Indexing takes an integer, a slice, a sequence, a LongTensor or a mask, and gives a
    tensor on the CPU.
    """

    def __init__(
        self,
        read: Callable[[int], Tensor],
        index: Tensor,
        row_shape: Sequence[int],
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        self._read = read
        self._index = index
        self._row_shape = torch.Size(row_shape)
        self.dtype = dtype
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0

    @property
    def shape(self) -> torch.Size:
        """[N, …] as for a tensor."""
        return torch.Size((len(self._index), *self._row_shape))

    @property
    def ndim(self) -> int:
        """The number of dimensions, with N."""
        return 1 + len(self._row_shape)

    @property
    def device(self) -> torch.device:
        """Rows are decoded on the CPU."""
        return torch.device("cpu")

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0):
            return self._checked(int(self._index[int(index)]))
        rows = self._index[as_index(index, len(self))].tolist()
        out = torch.empty((len(rows), *self._row_shape), dtype=self.dtype)

        def fill(places: range) -> None:
            for k in places:
                out[k] = self._checked(rows[k])

        threads = decoding_threads()
        step = max(1, -(-len(rows) // (4 * threads)))
        for _ in self._threads().map(
            fill, [range(k, min(k + step, len(rows))) for k in range(0, len(rows), step)]
        ):
            pass
        return out

    def subset(self, index: Any) -> LazyImages:
        """The rows at ``index``, still encoded."""
        chosen = self._index[as_index(index, len(self))]
        return LazyImages(self._read, chosen, self._row_shape, self.dtype)

    def _checked(self, row: int) -> Tensor:
        found = self._read(row)
        if found.shape != self._row_shape:
            raise ValueError(
                f"row {row} has shape {tuple(found.shape)}, the others {tuple(self._row_shape)}."
            )
        return found

    def _threads(self) -> ThreadPoolExecutor:
        # Threads do not survive a fork: a child makes its own.
        if self._pool is None or self._pool_process != os.getpid():
            self._pool = ThreadPoolExecutor(decoding_threads(), thread_name_prefix="decode")
            self._pool_process = os.getpid()
        return self._pool

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_pool_process": 0}
