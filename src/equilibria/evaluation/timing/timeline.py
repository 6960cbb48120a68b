"""Whose time is it now? Marks on one time axis; what lies between two marks belongs to one part."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

__all__ = [
    "ADJOINT_MAP",
    "ADJOINT_SOLVER",
    "BACKWARD",
    "FORWARD",
    "LOSS",
    "MAP",
    "NORM",
    "OPTIMIZER",
    "PARTS",
    "PREPARE",
    "SOLVER",
    "Key",
    "Timeline",
]

MAP = "map"
SOLVER = "solver"
ADJOINT_MAP = "adjoint_map"
ADJOINT_SOLVER = "adjoint_solver"
PREPARE = "prepare"
NORM = "norm"
FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
OPTIMIZER = "optimizer"

PARTS: dict[str, str] = {
    MAP: "evaluations of the map",
    SOLVER: "the rest of the solves",
    ADJOINT_MAP: "evaluations with a graph, and products with the Jacobian's transpose",
    ADJOINT_SOLVER: "the rest of the adjoints",
    PREPARE: "equilibrium layers outside of their solves",
    NORM: "norm constraints (power iteration), forward",
    FORWARD: "explicit layers, forward",
    LOSS: "the loss",
    BACKWARD: "explicit layers, backward",
    OPTIMIZER: "the optimizer",
}
"""Every part of a pass, and what it holds."""

Key = tuple[str, str]
"""(name of the layer or "", part)."""


class Timeline:
    """Marks in order; ``seconds()`` sums what lies between them, so that the parts make the whole.

    On a CPU a mark is a clock reading. On a GPU it is an event in the stream: the time is the
    device's, and nothing waits until ``seconds()`` is asked.
    """

    # No __dict__: adjoints look through closures for tensors, and must find nothing here.
    __slots__ = ("_cuda", "_here", "_marks", "counts", "in_backward")

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._marks: list[tuple[Any, Key]] = []
        self._here: Key = ("", FORWARD)
        self.counts: Counter[Key] = Counter()
        self.in_backward = False

    def to(self, key: Key) -> Key:
        """From now on the time is ``key``'s; whose it was."""
        before, self._here = self._here, key
        self._marks.append((self._now(), key))
        return before

    def count(self, key: Key, times: int = 1) -> None:
        self.counts[key] += times

    def _now(self) -> Any:
        if self._cuda is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._cuda))
        return event

    def seconds(self) -> dict[Key, float]:
        """By part; the time after the last mark is nobody's."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        found: dict[Key, float] = {}
        for (start, key), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            passed = end - start if self._cuda is None else start.elapsed_time(end) * 1e-3
            found[key] = found.get(key, 0.0) + passed
        return found
