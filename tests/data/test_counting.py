"""splitmix64 against the published stream; orders and seeds that depend on what they should."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.data.counting import host_seed, mix, shuffled

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
    assert reference_stream(1234567, 3) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.integers(0, 300), st.integers(-(2**40), 2**40))
def test_shuffled_sorts_by_the_stream(count: int, seed: int) -> None:
    state = reference_stream(seed & MASK, 1)[0]
    keys = reference_stream(state, count)
    signed = [k - 2**64 if k >> 63 else k for k in keys]
    assert shuffled(count, seed).tolist() == sorted(range(count), key=lambda i: signed[i])


def test_the_order_is_fixed_for_all_time() -> None:
    """Splits in published results rest on these numbers."""
    assert shuffled(10, 0).tolist() == [9, 0, 3, 1, 6, 4, 5, 7, 8, 2]


@given(
    st.lists(st.integers(0, 2**70), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 9)
)
def test_mix_depends_on_every_number(numbers: list[int], place: int, change: int) -> None:
    numbers = [n & MASK for n in numbers]
    other = list(numbers)
    other[place % len(numbers)] += change
    assert mix(*numbers) == mix(*numbers)
    assert mix(*numbers) != mix(*other)
    assert 0 <= mix(*numbers) < 2**63


def test_mix_depends_on_the_order() -> None:
    assert mix(1, 2) != mix(2, 1)
    assert mix(0) != mix(0, 0)


def test_host_seed_moves_on_and_repeats() -> None:
    a, b = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first, second = host_seed(a), host_seed(a)
    assert first != second
    assert [host_seed(b), host_seed(b)] == [first, second]
    torch.manual_seed(1)
    drawn = host_seed(None)
    torch.manual_seed(1)
    assert host_seed(None) == drawn
