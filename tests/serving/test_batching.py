"""Waiting items are answered together, in order, and no more of them than the queue holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.serving import Batcher, Busy


@asynccontextmanager
async def running(
    answer: Callable[[list[int]], list[int]], most: int, queue: int
) -> AsyncIterator[Batcher[int, int]]:
    batcher = Batcher[int, int](answer, most, queue)
    worker = asyncio.create_task(batcher.run())
    yield batcher
    batcher.close()
    await worker


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 7))
def test_each_item_gets_its_own_answer(requests: list[int], most: int) -> None:
    sizes: list[int] = []

    async def main() -> list[list[int]]:
        async with running(lambda items: [3 * i for i in items], most, 1000) as batcher:
            batcher.sizes = sizes.append
            asked = [batcher.ask([100 * k + i for i in range(n)]) for k, n in enumerate(requests)]
            return await asyncio.gather(*asked)

    found = asyncio.run(main())
    assert found == [[3 * (100 * k + i) for i in range(n)] for k, n in enumerate(requests)]
    assert max(sizes) <= most
    assert sum(sizes) == sum(requests)


def test_a_full_queue_refuses_at_once_and_what_waits_is_answered_at_the_end() -> None:
    go = threading.Event()

    def slow(items: list[int]) -> list[int]:
        go.wait()
        return items

    async def main() -> None:
        async with running(slow, 2, 3) as batcher:
            computing = asyncio.Event()
            batcher.sizes = lambda size: computing.set()
            first = asyncio.create_task(batcher.ask([1, 2]))
            await computing.wait()
            waiting = asyncio.create_task(batcher.ask([3, 4, 5]))
            await asyncio.sleep(0)
            assert len(batcher) == 3
            try:
                with pytest.raises(Busy) as refused:
                    await asyncio.wait_for(batcher.ask([6]), 30)
            finally:
                go.set()
        assert refused.value.seconds >= 1
        assert await first == [1, 2]
        assert await waiting == [3, 4, 5]

    asyncio.run(main())


def test_a_batch_that_fails_is_its_own_matter() -> None:
    def answer(items: list[int]) -> list[int]:
        if 0 in items:
            raise ZeroDivisionError
        return items

    async def main() -> None:
        async with running(answer, 1, 9) as batcher:
            with pytest.raises(ZeroDivisionError):
                await batcher.ask([0])
            assert await batcher.ask([1]) == [1]
            left = asyncio.create_task(batcher.ask([2]))
            await asyncio.sleep(0)
            left.cancel()  # a client that hangs up
            assert await batcher.ask([3]) == [3]

    asyncio.run(main())
