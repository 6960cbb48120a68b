"""Orders and seeds, parts held out, shares of processes: laws and published numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equilibria.data.sampling import Shards, few, held_out, mix, shuffled

MASK = 2**64 - 1


def reference_stream(state: int, count: int) -> list[int]:
    """The generator as its authors write it, in plain integers."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        found.append(z ^ (z >> 31))
    return found


def test_the_reference_is_splitmix64() -> None:
    """The first numbers from seed 1234567, as published with the test vectors of the algorithm."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert reference_stream(1234567, 3) == published


@given(st.integers(0, 300), st.integers(-(2**40), 2**40))
def test_shuffled_sorts_by_the_stream(count: int, seed: int) -> None:
    state = reference_stream(seed & MASK, 1)[0]
    keys = reference_stream(state, count)
    signed = [k - 2**64 if k >> 63 else k for k in keys]
    assert shuffled(count, seed).tolist() == sorted(range(count), key=lambda i: signed[i])
    assert shuffled(10, 0).tolist() == [9, 0, 3, 1, 6, 4, 5, 7, 8, 2]  # published splits rest on it


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=4), st.integers(0, 3))
def test_mix_depends_on_every_number(numbers: list[int], place: int) -> None:
    other = list(numbers)
    other[place % len(numbers)] += 1
    assert len({mix(*numbers), mix(*other), mix(*numbers, 0)}) == 3
    assert 0 <= mix(*numbers) < 2**63
    assert mix(1, 2) != mix(2, 1)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda s: sum(s) >= 2),
    st.floats(0.05, 0.95),
    st.integers(0, 5),
)
def test_every_class_gives_its_share(sizes: list[int], fraction: float, seed: int) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    mask = held_out(labels, len(labels), fraction, seed)
    if max(sizes) < 2:
        assert 1 <= int(mask.sum()) < len(labels)
        return
    if min(sizes) > 20:
        assert int(mask.sum()) == round(fraction * len(labels))
    for k, size in enumerate(sizes):
        taken = int(mask[labels == k].sum())
        if size >= 2:
            low, high = math.floor(size * fraction), math.ceil(size * fraction)
            assert max(1, min(low, size - 1)) <= taken <= min(size - 1, max(high, 1))
        else:
            assert taken == 0


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.data(), st.integers(0, 99))
def test_a_few_are_as_many_as_asked_for(sizes: list[int], data: st.DataObject, seed: int) -> None:
    """Also where a share is less than one sample, or all but a few are taken."""
    labels = torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)])
    count = len(labels)
    samples = data.draw(st.integers(1, count))
    mask = few(labels, count, samples, seed)
    assert int(mask.sum()) == samples
    assert torch.equal(mask, few(labels, count, samples, seed))
    drawn = torch.bincount(labels[mask], minlength=len(sizes)).tolist()
    wanted = [size * samples / count for size in sizes]
    if all(1.0 <= share <= size - 1.0 for share, size in zip(wanted, sizes, strict=True)):
        assert all(abs(n - share) < 1.0 for n, share in zip(drawn, wanted, strict=True))
    if len(set(sizes)) == 1:
        assert max(drawn) - min(drawn) <= 1
    assert int(few(None, count, samples, seed).sum()) == samples


def test_without_labels_or_with_single_samples_the_whole_is_split() -> None:
    assert int(held_out(None, 10, 0.3, 0).sum()) == 3
    assert int(held_out(torch.arange(5), 5, 0.4, 0).sum()) == 2
    labels = torch.arange(4).repeat(50)
    assert not torch.equal(held_out(labels, 200, 0.25, 1), held_out(labels, 200, 0.25, 2))


@pytest.mark.parametrize(
    ("count", "fraction", "message"),
    [(10, f, "between 0 and 1") for f in (0.0, 1.0, -0.1, 2.0, float("nan"))]
    + [(1, 0.5, "1 sample")],
)
def test_what_cannot_be_split(count: int, fraction: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        held_out(None, count, fraction, 0)


COUNTS, SIZES, WORLDS = st.integers(1, 60), st.integers(1, 9), st.integers(1, 5)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0), "batch_size=0"),
        ((10, 2.5), "batch_size=2.5"),
        ((10, True), "batch_size=True"),
        ((10, 2, 2, 2), r"rank=2\) .* in \[0, 1\]"),
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
