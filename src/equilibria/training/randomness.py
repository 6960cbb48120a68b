"""Random numbers: seed them all, keep their states, put them back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["keep_random_state", "random_state", "restore_random_state", "seed_all"]


def seed_all(seed: int) -> None:
    """Seed torch (every device), Python and, where it is loaded, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """Where all generators stand, in tensors and numbers that a checkpoint may hold."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the generators back to where ``random_state`` found them."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    devices = state.get("cuda")
    if devices is not None and torch.cuda.is_available():
        count = min(len(devices), torch.cuda.device_count())
        for index in range(count):
            torch.cuda.set_rng_state(devices[index].cpu(), index)
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Leave the caller's random numbers as they were."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)
