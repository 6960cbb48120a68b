"""Batches on the device: gathered, augmented and normalized there, in an order one can repeat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .augmentation import Transform
from .decoding import LazyImages
from .image_data import ImageData
from .sampling import Shards, mix

Pair = tuple[Tensor, Tensor]
Bounds = list[tuple[int, tuple[int, int]]]
Rows = Iterator[tuple[int, Tensor, Tensor]]


class Batches:
    """Iterate over (x, y): x normalized, [B, C, H, W], y labels or masks, both on ``device``.

    The order and the augmentation of epoch k depend on (seed, k) alone: call ``set_epoch(k)``
    before each epoch, and a run that resumes at epoch k sees what it would have seen. Without the
    call, every epoch is the same.

    Args:
        dataset: the data; ``dataset.to(device)`` beforehand shares one copy among several Batches.
        batch_size: samples a batch, and a process.
        shuffle: a new order every epoch.
        seed: of order and augmentation.
        device: where batches are wanted.
        augment: a Transform, or a function ``(x, generator) -> x`` of floats from 0 to 1 (with
            masks: ``(x, y, generator) -> (x, y)``).
        drop_last: leave out samples that do not fill a batch on every rank.
        dtype, channels_last: of x.
        rank, world: this process among how many; they share the samples of an epoch.
        resident: move the whole set to the device; None: if it takes less than half of the free
            memory. Otherwise, and for lazy sets, a thread makes batches ready while the device
            works.
        prefetch: how many batches are made ready ahead.
    """

    def __init__(
        self,
        dataset: ImageData,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        augment: Transform | Callable[..., Any] | None = None,
        drop_last: bool = False,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        rank: int = 0,
        world: int = 1,
        resident: bool | None = None,
        prefetch: int = 3,
    ) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype}: normalized images need a floating dtype.")
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch}: expected at least 1.")
        if augment is not None and not callable(augment):
            raise TypeError(f"augment is a {type(augment).__name__}; expected a Transform.")
        self.device = torch.device(device)
        self.shards = Shards(len(dataset), batch_size, rank, world, drop_last)
        self.shuffle, self.seed, self.augment = shuffle, seed, augment
        self.dtype, self.prefetch = dtype, prefetch
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.epoch = self._start = 0
        self.resident = self._fits(dataset) if resident is None else resident
        if self.resident and dataset.is_lazy:
            raise ValueError("resident=True: a lazy set is not in memory; load it with lazy=False.")
        self.dataset = dataset.to(self.device) if self.resident else dataset
        self._mean = torch.tensor(dataset.mean, device=self.device).view(1, -1, 1, 1)
        self._std = torch.tensor(dataset.std, device=self.device).view(1, -1, 1, 1)

    @property
    def batch_size(self) -> int:
        return self.shards.batch_size

    def __len__(self) -> int:
        return self.shards.batches

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Make the next iteration that of ``epoch``, from its batch ``start`` on."""
        if epoch < 0 or not 0 <= start <= len(self):
            raise ValueError(
                f"set_epoch({epoch}, start={start}): start goes from 0 to {len(self)}."
            )
        self.epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[Pair]:
        epoch, start = self.epoch, self._start
        self._start = 0
        order = self.shards.order(self.seed, epoch, shuffle=self.shuffle)
        bounds = list(enumerate(self.shards.bounds()))[start:]
        rows = self._resident(order, bounds) if self.resident else self._ahead(order, bounds)
        return self._finished(rows, epoch)

    def _resident(self, order: Tensor, bounds: Bounds) -> Rows:
        order = order.to(self.device)  # once an epoch: batches are slices of it
        for number, (first, last) in bounds:
            index = order[first:last]
            yield number, self.dataset.images[index], self.dataset.targets[index]

    def _ahead(self, order: Tensor, bounds: Bounds) -> Rows:
        pin = self.device.type == "cuda"

        def ready(first: int, last: int) -> list[Tensor]:
            sources = (self.dataset.images, self.dataset.targets)
            rows = [source[order[first:last].to(source.device)] for source in sources]
            return [part.pin_memory() for part in rows] if pin else rows

        pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        waiting: deque[tuple[int, Future[list[Tensor]]]] = deque()
        rest = iter(bounds)
        try:
            while True:
                while len(waiting) < self.prefetch and (entry := next(rest, None)) is not None:
                    waiting.append((entry[0], pool.submit(ready, *entry[1])))
                if not waiting:
                    return
                number, future = waiting.popleft()
                x, y = (rows.to(self.device, non_blocking=pin) for rows in future.result())
                yield number, x, y
        finally:  # also when the loop over the batches is left early
            pool.shutdown(wait=True, cancel_futures=True)

    def _finished(self, rows: Rows, epoch: int) -> Iterator[Pair]:
        """x/255, augmented by the numbers of (seed, epoch, batch, rank), normalized."""
        generator = torch.Generator(self.device)
        for number, x, y in rows:
            generator.manual_seed(mix(self.seed, epoch, number, self.shards.rank))
            yield self._one(x, y, generator)

    @torch.no_grad()
    def _one(self, x: Tensor, y: Tensor, generator: torch.Generator) -> Pair:
        x = x.float() / 255.0
        both = isinstance(self.augment, Transform) or self.dataset.task == "segmentation"
        if self.augment is not None and both:
            x, y = self.augment(x, y, generator)
        elif self.augment is not None:
            x = self.augment(x, generator)
        x = (x - self._mean) / self._std
        return x.to(self.dtype).contiguous(memory_format=self.format), y

    def _fits(self, dataset: ImageData) -> bool:
        images, targets = dataset.images, dataset.targets
        if isinstance(images, LazyImages) or isinstance(targets, LazyImages):
            return False
        named = torch.empty(0, device=self.device).device  # "cuda" names the current one
        if self.device.type == "cpu" or images.device == named:
            return True
        size = sum(t.numel() * t.element_size() for t in (images, targets))
        if self.device.type == "cuda":
            return size < 0.5 * torch.cuda.mem_get_info(self.device)[0]
        return size < 2**31
