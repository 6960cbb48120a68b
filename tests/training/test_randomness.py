"""Random numbers are seeded, kept and put back, in a form that a checkpoint may hold."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

from equilibria.training.randomness import (
    keep_random_state,
    random_state,
    restore_random_state,
    seed_all,
)


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand()]  # noqa: NPY002


def test_a_seed_repeats_all_generators() -> None:
    with keep_random_state():
        seed_all(7)
        first = draw()
        seed_all(7)
        assert draw() == first
        seed_all(8)
        assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_state_survives_a_checkpoint() -> None:
    with keep_random_state():
        seed_all(3)
        random.gauss(0, 1)  # leaves a second number behind
        np.random.randn()  # noqa: NPY002
        file = io.BytesIO()
        torch.save(random_state(), file)
        expected = [draw() for _ in range(3)]
        seed_all(99)
        file.seek(0)
        restore_random_state(torch.load(file, weights_only=True))
        assert [draw() for _ in range(3)] == expected


def test_the_caller_goes_on_as_before() -> None:
    seed_all(1)
    expected = draw()
    seed_all(1)
    with keep_random_state():
        seed_all(2)
        draw()
    assert draw() == expected
