"""Lazy rows are indexed as a tensor is, in threads, and fail with a name."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.data.lazy import LazyImages, as_index

WHOLE = torch.arange(20 * 2 * 3, dtype=torch.uint8).view(20, 1, 2, 3)


def row(i: int) -> torch.Tensor:
    return WHOLE[i]


def lazy() -> LazyImages:
    return LazyImages(row, torch.arange(20), (1, 2, 3))


@given(st.lists(st.integers(-20, 19), max_size=30))
def test_indexing_by_a_long_tensor(index: list[int]) -> None:
    chosen = torch.tensor(index, dtype=torch.long)
    assert torch.equal(lazy()[chosen], WHOLE[chosen])
    assert torch.equal(lazy()[index], WHOLE[chosen])


@given(st.slices(20))
def test_indexing_by_a_slice(index: slice) -> None:
    if index.step is not None and index.step < 0:
        return  # torch has none of these either
    assert torch.equal(lazy()[index], WHOLE[index])


def test_looks_like_a_tensor() -> None:
    images = lazy()
    assert images.shape == WHOLE.shape
    assert images.ndim == 4
    assert images.dtype == torch.uint8
    assert images.device.type == "cpu"
    assert len(images) == 20
    assert torch.equal(images[3], WHOLE[3])
    assert torch.equal(images[torch.tensor(-1)], WHOLE[-1])
    mask = torch.arange(20) % 3 == 0
    assert torch.equal(images[mask], WHOLE[mask])


def test_subsets_of_subsets() -> None:
    images = lazy().subset(torch.tensor([5, 3, 9, 9])).subset(range(1, 4))
    assert torch.equal(images[:], WHOLE[[3, 9, 9]])


def test_nothing_is_read_before_it_is_asked_for() -> None:
    seen: list[int] = []
    lock = threading.Lock()

    def read(i: int) -> torch.Tensor:
        with lock:
            seen.append(i)
        return WHOLE[i]

    images = LazyImages(read, torch.arange(20), (1, 2, 3)).subset(slice(4, 12))
    assert seen == []
    images[torch.tensor([0, 2])]
    assert sorted(seen) == [4, 6]


@pytest.mark.parametrize("index", [[20], [-21], torch.tensor([0.5]), torch.zeros(2, 2).long()])
def test_wrong_indices(index: object) -> None:
    with pytest.raises(IndexError):
        lazy()[index]


def test_a_mask_of_another_length() -> None:
    with pytest.raises(IndexError, match="mask of 3"):
        as_index(torch.tensor([True, False, True]), 4)


def test_an_error_in_a_thread_comes_out() -> None:
    def read(i: int) -> torch.Tensor:
        if i == 7:
            raise ValueError("picture seven")
        return WHOLE[i]

    with pytest.raises(ValueError, match="picture seven"):
        LazyImages(read, torch.arange(20), (1, 2, 3))[:]


def test_a_row_of_another_shape_is_an_error() -> None:
    images = LazyImages(
        lambda i: torch.zeros(1, 2, 4, dtype=torch.uint8), torch.arange(3), (1, 2, 3)
    )
    with pytest.raises(ValueError, match="row 1 has shape"):
        images[torch.tensor([1])]


def test_pickles() -> None:
    images = lazy()
    images[:2]  # the pool exists now
    assert torch.equal(pickle.loads(pickle.dumps(images))[:], WHOLE)
