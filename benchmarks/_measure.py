"""Measurements: interleaved timing, counted operations, host synchronizations, live memory."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[], object]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
"""Wall time; or the time of this thread on its core, which other programs do not stretch."""

# ---------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and least of repeated measurements."""

    median: float
    low: float
    high: float
    least: float
    count: int

    @staticmethod
    def of(values: list[float]) -> Spread:
        if len(values) < 2:
            return Spread(values[0], values[0], values[0], values[0], len(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(middle, low, high, min(values), len(values))

    def scaled(self, factor: float) -> Spread:
        median, low, high, least = (
            factor * x for x in (self.median, self.low, self.high, self.least)
        )
        return Spread(median, low, high, least, self.count)


def wait(device: torch.device) -> None:
    """Wait for the device, so that a host clock sees the work and not its launch."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def race(
    runs: Mapping[str, Run],
    device: torch.device,
    *,
    budget: float,
    least: int = 3,
    most: int = 40,
    warm: int = 1,
    clock: str = "wall",
) -> dict[str, list[float]]:
    """Seconds of each run, all timed in turn in one loop; entry i of every list is round i.

    The order rotates from round to round, so that none profits from its place. Rounds go on until
    ``budget`` seconds are spent, at least ``least`` and at most ``most``.
    """
    now = CLOCKS[clock]
    names = list(runs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(warm):
        for name in names:
            runs[name]()
    wait(device)
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        began = time.perf_counter()
        for i in range(most):
            turn = i % len(names)
            for name in names[turn:] + names[:turn]:
                run = runs[name]
                wait(device)
                start = now()
                run()
                wait(device)
                samples[name].append(now() - start)
            if i + 1 >= least and time.perf_counter() - began > budget:
                break
    finally:
        if collecting:
            gc.enable()
    return samples


def difference(a: list[float], b: list[float], per: int) -> Spread:
    """Spread of (aᵢ − bᵢ)/per over rounds, what a costs beyond b per step; least: of the leasts.

    On a busy machine the median holds other programs' time; the least is what the code needs.
    """
    paired = Spread.of([(x - y) / per for x, y in zip(a, b, strict=True)])
    return replace(paired, least=(min(a) - min(b)) / per)


# ---------------------------------------------------------------------------------- operations

_NO_WORK = {
    "_linalg_check_errors",
    "_local_scalar_dense",
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "set_",
}
"""Views, allocations and host reads: nothing is launched (or what is launched is a sync)."""

_WRITES_ONLY = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
"""In-place operations that do not read the tensor they write."""

_SYNCS = {"_local_scalar_dense", "_linalg_check_errors", "nonzero", "is_nonzero", "masked_select"}
"""Operations for which the host must wait for the device (on a GPU)."""

_HOST_READS = {"tolist", "numpy"}
"""Tensor methods that read values on the host; on the CPU they pass no operator."""


@dataclass
class Operations:
    """What a run did. ``traffic`` and ``peak`` count tensors of at least one state, in bytes."""

    kernels: int = 0
    syncs: int = 0
    traffic: float = 0.0
    peak: int = 0
    by_name: Counter[str] = field(default_factory=Counter)

    def minus(self, other: Operations, per: int) -> PerStep:
        return PerStep(
            (self.kernels - other.kernels) / per,
            (self.syncs - other.syncs) / per,
            (self.traffic - other.traffic) / per,
        )


@dataclass(frozen=True)
class PerStep:
    """Kernels, host waits and bytes of state traffic a step."""

    kernels: float
    syncs: float
    traffic: float


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf


def _distinct(t: Tensor) -> int:
    """Elements in memory behind a tensor: expanded dimensions count once."""
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if stride != 0:
            count *= size
    return count


class Counting(TorchDispatchMode):
    """Counts operators below autograd: those that launch work, those that wait, bytes, live memory.

    One operator counts as one kernel; a library call (a batched solve) may launch several, so on a
    GPU see the profiler's count too. Traffic: every tensor an operator reads or writes, if it has
    at least as many elements as a state; expanded dimensions count once. Live memory: the storages
    of tensors that operators returned, of at least a state's bytes, while anything refers to them;
    the peak is taken after each operator, and of a map that ``inside_map`` marks at its end only:
    its temporaries are not the solver's. What an operator allocates inside itself is not seen.
    """

    active: Counting | None = None

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.elements = state.numel()
        self.bytes = state.numel() * state.element_size()
        self.seen = Operations()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.inside_map = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        boolean_index = name == "index" and any(
            t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:])
        )
        if name in _SYNCS or boolean_index:
            self.seen.syncs += 1
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        view = any(not a.is_write for a in aliases)
        if not view:
            if not aliases:
                self._watch(out)
            if name not in _NO_WORK:
                self.seen.kernels += 1
                self.seen.by_name[name] += 1
                self._weigh(func, name, args, kwargs, out)
        return out

    def _weigh(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        read: list[Any] = []
        for value, spec in zip(args, func._schema.arguments, strict=False):
            writes = spec.alias_info is not None and spec.alias_info.is_write
            if not (writes and name in _WRITES_ONLY):
                read.append(value)
        read.extend(v for k, v in kwargs.items() if k != "out")
        for t in (*_tensors(read), *_tensors(out)):
            count = _distinct(t)
            if count >= self.elements:
                self.seen.traffic += count * t.element_size()

    def _watch(self, out: Any) -> None:
        for t in _tensors(out):
            storage = t.untyped_storage()
            if storage.nbytes() >= self.bytes:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if not self.inside_map:
            self.sample()

    def sample(self) -> None:
        """Note how much is alive now."""
        dead = [key for key, (ref, _) in self._live.items() if ref.expired()]
        for key in dead:
            del self._live[key]
        self.seen.peak = max(self.seen.peak, sum(size for _, size in self._live.values()))


@contextmanager
def _counting_reads(seen: Operations) -> Iterator[None]:
    """Count Tensor.tolist and Tensor.numpy, which pass no operator on the CPU."""
    kept = {name: getattr(Tensor, name) for name in _HOST_READS}
    own = {name for name in kept if name in vars(Tensor)}

    def counted(method: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            seen.syncs += 1
            return method(*args, **kwargs)

        return read

    for name, method in kept.items():
        setattr(Tensor, name, counted(method))
    try:
        yield
    finally:
        for name, method in kept.items():
            if name in own:
                setattr(Tensor, name, method)
            else:
                delattr(Tensor, name)  # the method lives in the base class


def count(run: Run, state: Tensor) -> Operations:
    """What ``run`` does, in units that do not depend on the machine."""
    counting = Counting(state)
    with counting, _counting_reads(counting.seen):
        Counting.active = counting
        try:
            kept = run()
        finally:
            Counting.active = None
    del kept
    return counting.seen


def inside_map(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The map, marked: what it makes and drops within a call is not the solver's memory."""

    def marked(*args: Any, **kwargs: Any) -> Tensor:
        counting = Counting.active
        if counting is None:
            return fn(*args, **kwargs)
        counting.inside_map = True
        out = fn(*args, **kwargs)
        counting.inside_map = False
        counting.sample()  # T(z) is alive together with all that the solver still holds
        return out

    return marked


# ---------------------------------------------------------------------------------------- CUDA


def cuda_peak(run: Run, device: torch.device) -> int:
    """Bytes that the allocator handed out at most during ``run``, beyond what was held before."""
    run()
    wait(device)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = run()
    wait(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before


def peak_memory(run: Run, device: torch.device) -> int:
    """``cuda_peak``, or on a CPU by the profiler's record of allocations."""
    if device.type == "cuda":
        return cuda_peak(run, device)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as found:
        run()
    events = sorted(found.events(), key=lambda e: float(e.time_range.end))
    return max(accumulate(int(e.self_cpu_memory_usage) for e in events))


def cuda_sync_warnings(run: Run) -> int:
    """Waits that torch itself reports (torch.cuda.set_sync_debug_mode)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in caught)


@dataclass(frozen=True)
class Profiled:
    """What the profiler saw of one run: kernels, copies to the host, waits."""

    kernels: int
    copies_to_host: int
    waits: int


def _profile(run: Run, device: torch.device) -> Profiled:
    from torch.profiler import ProfilerActivity, profile

    wait(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
    kernels = copies = waits = 0
    for event in recorded.events() or []:
        on_device = "CUDA" in str(event.device_type)
        if on_device and event.name.startswith("Memcpy DtoH"):
            copies += 1
        elif on_device and not event.name.startswith(("Memcpy", "Memset")):
            kernels += 1
        elif event.name in ("cudaStreamSynchronize", "cudaEventSynchronize"):
            waits += 1
    return Profiled(kernels, copies, waits)


def cuda_profile(run: Run, device: torch.device) -> Profiled:
    """The profiler's counts of one run, less what an empty profile shows."""
    run()
    _profile(run, device)  # the first profile of a process starts the tracer
    empty = _profile(lambda: None, device)
    full = _profile(run, device)
    return Profiled(
        full.kernels - empty.kernels,
        full.copies_to_host - empty.copies_to_host,
        full.waits - empty.waits,
    )
