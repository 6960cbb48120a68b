"""Laws of the shards: every sample once, equal numbers of batches, the order of (seed, epoch)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equilibria.data.sharding import Shards

COUNTS = st.integers(1, 60)
SIZES = st.integers(1, 9)
WORLDS = st.integers(1, 5)


def ranks(count: int, size: int, world: int, drop_last: bool) -> list[Shards]:
    return [Shards(count, size, rank, world, drop_last) for rank in range(world)]


def taken(shards: Shards, seed: int = 0, epoch: int = 0, shuffle: bool = True) -> list[list[int]]:
    order = shards.order(seed, epoch, shuffle=shuffle)
    return [order[a:b].tolist() for a, b in shards.bounds()]


@settings(max_examples=150)
@given(COUNTS, SIZES, WORLDS, st.integers(0, 3), st.integers(0, 3))
def test_every_sample_exactly_once(
    count: int, size: int, world: int, seed: int, epoch: int
) -> None:
    assume(count >= world and not (size == 1 and count % world))
    seen = [taken(shards, seed, epoch) for shards in ranks(count, size, world, False)]
    assert sorted(i for rank in seen for batch in rank for i in batch) == list(range(count))
    for rank in seen:
        assert len(rank) == -(-count // (size * world))
        assert all(1 <= len(batch) <= size for batch in rank)
        assert all(len(batch) == size for batch in rank[:-2])


@settings(max_examples=150)
@given(COUNTS, SIZES, WORLDS, st.integers(0, 3))
def test_drop_last_keeps_whole_batches_of_different_samples(
    count: int, size: int, world: int, epoch: int
) -> None:
    assume(count >= size * world)
    seen = [taken(shards, 0, epoch) for shards in ranks(count, size, world, True)]
    flat = [i for rank in seen for batch in rank for i in batch]
    assert len(flat) == len(set(flat)) == count // (size * world) * size * world
    assert all(len(batch) == size for rank in seen for batch in rank)
    assert {len(rank) for rank in seen} == {count // (size * world)}


@given(st.integers(1, 5), st.integers(1, 4), WORLDS, st.integers(0, 3))
def test_ranks_together_see_what_one_process_would(
    size: int, steps: int, world: int, epoch: int
) -> None:
    count = size * steps * world
    alone = taken(Shards(count, size * world), 7, epoch)
    shared = [taken(shards, 7, epoch) for shards in ranks(count, size, world, False)]
    for step in range(steps):
        together = [i for rank in shared for i in rank[step]]
        assert sorted(together) == sorted(alone[step])


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    shards = Shards(50, 7)
    first = shards.order(1, 2, shuffle=True)
    torch.manual_seed(9)
    torch.rand(3)
    assert torch.equal(shards.order(1, 2, shuffle=True), first)
    assert torch.equal(Shards(50, 13).order(1, 2, shuffle=True), first)
    assert not torch.equal(shards.order(1, 3, shuffle=True), first)
    assert not torch.equal(shards.order(2, 2, shuffle=True), first)
    assert not torch.equal(shards.order(2, 1, shuffle=True), first)
    assert shards.order(1, 2, shuffle=False).tolist() == list(range(50))


def test_every_place_is_as_likely() -> None:
    places = torch.stack([Shards(4, 2).order(0, k, shuffle=True) for k in range(2000)])
    share = (places == 0).double().mean(0)
    assert torch.all((share - 0.25).abs() < 0.05)


def test_a_rank_with_nothing_left_shares_out_its_last_batch() -> None:
    # 9 samples, two ranks, batches of 4: rank 0 has 5, rank 1 has 4.
    assert Shards(9, 4, 0, 2).bounds() == [(0, 4), (4, 5)]
    assert Shards(9, 4, 1, 2).bounds() == [(0, 2), (2, 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0), "batch_size=0"),
        ((10, 2.5), "batch_size=2.5"),
        ((10, True), "batch_size=True"),
        ((10, 2, 2, 2), "rank=2: expected 0 to 1"),
        ((10, 2, -1, 2), "rank=-1"),
        ((10, 2, 0, 0), "world=0"),
        ((10, 8, 0, 2, True), "10 samples fill no batch"),
        ((3, 2, 0, 4), "3 samples cannot be shared"),
        ((5, 1, 0, 2), "use drop_last=True"),
    ],
)
def test_what_cannot_be_shared(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shards(*arguments)
