"""Waiting requests answered together: a bounded queue, and one thread that takes what is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


class Busy(RuntimeError):
    """The queue is full; ``seconds`` says when to come back."""

    def __init__(self, seconds: int) -> None:
        super().__init__("the queue is full")
        self.seconds = seconds


class Batcher(Generic[In, Out]):
    """Gives single items to ``answer(items)``, up to ``most`` that wait at a time.

    While one batch is computed, in a thread of its own, others gather; nothing waits for a batch to
    fill. More than ``queue`` waiting items are refused. A batch that fails fails for its own items,
    and the next one is tried.
    """

    def __init__(self, answer: Callable[[list[In]], Sequence[Out]], most: int, queue: int) -> None:
        self._answer, self._most, self._limit = answer, most, queue
        self._waiting: list[tuple[In, asyncio.Future[Out]]] = []
        self._arrived, self._closing = asyncio.Event(), False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answer")
        self._seconds = 0.1  # of a batch, on average
        self.sizes: Callable[[int], object] = lambda size: None
        """Told the size of each batch."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, items: Sequence[In]) -> list[Out]:
        """The answers, in order; Busy if they do not fit the queue, and then none is taken."""
        if self._closing or len(self._waiting) + len(items) > self._limit:
            batches = 1 + len(self._waiting) // self._most
            raise Busy(max(1, round(batches * self._seconds)))
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Out]] = [loop.create_future() for _ in items]
        self._waiting += zip(items, futures, strict=True)
        self._arrived.set()
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:  # who asked may have left: then nobody computes it
                future.cancel()

    async def run(self) -> None:
        """Answer until ``close``, and then what still waits."""
        loop = asyncio.get_running_loop()
        while not (self._closing and not self._waiting):
            await self._arrived.wait()
            self._waiting = [(item, future) for item, future in self._waiting if not future.done()]
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            if not self._waiting and not self._closing:
                self._arrived.clear()
            if not batch:
                continue
            self.sizes(len(batch))
            began = loop.time()
            try:
                items = [item for item, _ in batch]
                answers = await loop.run_in_executor(self._thread, self._answer, items)
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
            except Exception as error:  # noqa: BLE001  # told to who asked; the server stays up
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            self._seconds += 0.2 * (loop.time() - began - self._seconds)
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        """Take no more; ``run`` ends when the queue is empty."""
        self._closing = True
        self._arrived.set()
