"""The ring of past vectors against numpy, recorded by autograd or not, in every memory order."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equilibria.engine.tree import History
from tests.contracts.problems import randn


def leaves_like(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A leaf [B, n], a channels_last one, and one with a number a sample."""
    image = randn(3, 2, 4, 5, seed=seed).contiguous(memory_format=torch.channels_last)
    return [t.to(dtype) for t in (randn(3, 7, seed=seed + 100), image, randn(3, seed=seed + 200))]


def rows(leaves: list[Tensor]) -> np.ndarray:
    return np.concatenate([x.detach().double().reshape(3, -1).numpy() for x in leaves], 1)


MODES: dict[str, Any] = {"in place": torch.no_grad, "recorded": contextlib.nullcontext}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writes", [1, 3, 4, 7])
def test_products_and_combinations(mode: str, writes: int) -> None:
    memory = 4
    with MODES[mode]():
        ring = History(leaves_like(0), memory)
        assert ring.functional == (mode == "recorded")
        held: dict[int, list[Tensor]] = {}
        for k in range(writes):
            held[k % memory] = leaves_like(k)
            ring.write(k % memory, held[k % memory])
        used = len(held)
        assert ring.used == used
        x = leaves_like(50)
        expected = np.stack([(rows(held[i]) * rows(x)).sum(1) for i in range(used)], 1)
        np.testing.assert_allclose(ring.dot(x), expected, rtol=1e-12, atol=1e-13)
        weights = randn(3, used, seed=9)
        combined = ring.combine(weights)
        mixed = sum(weights.numpy()[:, [i]] * rows(held[i]) for i in range(used))
        np.testing.assert_allclose(rows(combined), mixed, rtol=1e-12, atol=1e-13)
        assert [c.shape for c in combined] == [v.shape for v in x]
        assert combined[1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("mode", MODES)
def test_written_vectors_are_copies_or_constants(mode: str) -> None:
    """Overwriting a slot later changes no combination that was taken before."""
    with MODES[mode]():
        ring = History(leaves_like(0), 2)
        ring.write(0, leaves_like(1))
        before = ring.combine(torch.ones(3, 1, dtype=torch.float64))
        kept = rows(before).copy()
        ring.write(0, leaves_like(2))
        np.testing.assert_array_equal(rows(before), kept)


@pytest.mark.parametrize("mode", MODES)
def test_part_of_the_samples(mode: str) -> None:
    with MODES[mode]():
        ring = History(leaves_like(0), 3)
        for k in range(3):
            ring.write(k, leaves_like(k))
        x, weights, index = leaves_like(8), randn(3, 3, seed=9), torch.tensor([2, 0])
        whole_dot, whole = ring.dot(x), ring.combine(weights)
        part = ring.take(index)
        np.testing.assert_allclose(part.dot([t[index] for t in x]), whole_dot[index], rtol=1e-13)
        for a, b in zip(part.combine(weights[index]), whole, strict=True):
            np.testing.assert_allclose(a, b[index], rtol=1e-12, atol=1e-14)
        part.write(1, [t[index] for t in leaves_like(40)])
        np.testing.assert_array_equal(ring.dot(x), whole_dot)  # the whole is untouched


@pytest.mark.parametrize("mode", MODES)
def test_cleared_history_is_empty_and_usable(mode: str) -> None:
    with MODES[mode]():
        ring = History(leaves_like(0), 3)
        for k in range(3):
            ring.write(k, leaves_like(k))
        ring.clear()
        assert ring.used == 0
        ring.write(0, leaves_like(7))
        x = leaves_like(8)
        expected = (rows(leaves_like(7)) * rows(x)).sum(1, keepdims=True)
        np.testing.assert_allclose(ring.dot(x), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_products_are_summed_and_given_in_float32(
    mode: str, dtype: torch.dtype
) -> None:
    with MODES[mode]():
        x = [randn(3, 5000, seed=1).to(dtype)]
        ring = History(x, 1)
        ring.write(0, x)
        found = ring.dot(x)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found[:, 0], (rows(x) ** 2).sum(1), rtol=1e-5)
        assert ring.combine(torch.ones(3, 1))[0].dtype == dtype


def test_gradients_pass_a_recorded_history() -> None:
    x = randn(2, 3, seed=0).requires_grad_()

    def through(v: Tensor) -> Tensor:
        ring = History([v], 2)
        ring.write(0, [v])
        ring.write(1, [v.sin()])
        return ring.combine(ring.dot([v.cos()]))[0]

    assert torch.autograd.gradcheck(through, x)
