"""Every table and figure that can be reproduced, by its id."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from . import geq, kerdeq, opteq, opteq_large, ours, thesis
from .declaring import Experiment

__all__ = ["EXPERIMENTS", "describe", "names"]


def _ordered() -> dict[str, Experiment]:
    every = (
        *geq.EXPERIMENTS,
        *kerdeq.EXPERIMENTS,
        *sorted(
            (*opteq.EXPERIMENTS, *opteq_large.EXPERIMENTS),
            key=lambda e: int(e.id.removeprefix("opteq-table")),
        ),
        *thesis.EXPERIMENTS,
        *ours.EXPERIMENTS,
    )
    return {experiment.id: experiment for experiment in every}


EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(_ordered())


def names() -> list[str]:
    """The ids, in the order of the papers."""
    return list(EXPERIMENTS)


def describe(name: str) -> Experiment:
    """The table or figure of this id, or an error that offers the nearest ones."""
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, EXPERIMENTS, n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise ValueError(f"there is no experiment {name!r}.{hint} Known: {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]
