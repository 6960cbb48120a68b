"""What is held out: how many, of which classes, the same every time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.data.splitting import held_out


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
    for k, size in enumerate(sizes):
        taken = int(mask[labels == k].sum())
        if size >= 2:
            low, high = math.floor(size * fraction), math.ceil(size * fraction)
            assert max(1, min(low, size - 1)) <= taken <= min(size - 1, max(high, 1))
        else:
            assert taken == 0


@given(st.integers(10, 60), st.integers(2, 5), st.floats(0.2, 0.8))
def test_the_total_is_rounded(per_class: int, classes: int, fraction: float) -> None:
    labels = torch.arange(classes).repeat(per_class)
    mask = held_out(labels, len(labels), fraction, 0)
    assert int(mask.sum()) == round(fraction * len(labels))


def test_seeds_differ_and_repeat() -> None:
    labels = torch.arange(4).repeat(50)
    one, again, other = (held_out(labels, 200, 0.25, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_without_labels_the_whole_is_split() -> None:
    assert int(held_out(None, 10, 0.3, 0).sum()) == 3


def test_single_samples_of_a_class_can_still_be_split() -> None:
    assert int(held_out(torch.arange(5), 5, 0.4, 0).sum()) == 2


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_fractions_outside_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        held_out(None, 10, fraction, 0)


def test_one_sample_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="1 sample"):
        held_out(None, 1, 0.5, 0)
