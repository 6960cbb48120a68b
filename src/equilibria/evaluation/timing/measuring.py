"""Seconds of a pass with and without marks, in turn; its peak memory; its waits for the device."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Memory", "Run", "Spread", "cuda_waits", "peak_memory", "quiet", "race", "seconds_of"]

Run = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements, in seconds."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: list[float]) -> Spread:
        if len(values) < 2:
            return Spread(values[0], values[0], values[0], len(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(middle, low, high, len(values))


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside: it would fall on whoever happens to run."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def seconds_of(run: Run, device: torch.device) -> float:
    """One run: by events in the stream on a GPU, by the wall clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    run()
    end.record(stream)
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e-3


def race(runs: dict[str, Run], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, all in turn in every round: what slows one round slows all."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    with quiet():
        for i in range(repeats):
            turn = i % len(names)
            for name in names[turn:] + names[:turn]:
                found[name].append(seconds_of(runs[name], device))
    return found


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a pass beyond what was held before it (weights, batch, optimizer)."""

    peak: int
    held: int
    method: str
    """How it was found: the GPU's allocator is exact, the trace on a CPU an estimate."""


_TRACE = "trace of live tensors (what an operator allocates inside itself is not seen)"


def peak_memory(run: Run, device: torch.device, held: int) -> Memory:
    """Of one pass; ``held`` is what is reported for a CPU, where no allocator can be asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return Memory(
            torch.cuda.max_memory_allocated(device) - before, before, "CUDA's caching allocator"
        )
    with quiet(), _Live() as live:
        run()
    return Memory(live.peak, held, _TRACE)


class _Live(TorchDispatchMode):
    """Sums the storages that operators returned while anything refers to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor) and not t.is_sparse
        }
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and not t.is_sparse:
                self._add(t, given)
        return out

    def _add(self, t: Tensor, given: set[int]) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in given or key in self._live:
            return  # a view, or written in place
        self._live[key] = (StorageWeakRef(storage), storage.nbytes())
        self._now += storage.nbytes()
        if self._now > self.peak:
            # Only a new peak needs the truth: what has died since is taken off first.
            self._sweep()
            self.peak = max(self.peak, self._now)

    def _sweep(self) -> None:
        for key in [k for k, (ref, _) in self._live.items() if ref.expired()]:
            self._now -= self._live.pop(key)[1]


def cuda_waits(run: Run, device: torch.device) -> int | None:
    """How often torch reports that the host waited for the GPU; None on other devices."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(kept)
    # Not torch's remark that the mode itself is a prototype.
    return sum("called a synchronizing" in str(w.message) for w in caught)
