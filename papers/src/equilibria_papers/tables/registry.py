"""Every table and figure that can be reproduced, by its id."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import geq, kerdeq, opteq, ours, thesis
from .choices import Choices
from .declaring import Experiment
from .planning import plan_of
from .results import (
    NOT_RUN,
    SMOKE,
    CellResult,
    Sample,
    earlier_samples,
    read_result,
    result_path,
    status_of,
)
from .supplying import at_hand


def _ordered() -> dict[str, Experiment]:
    every = (
        *geq.EXPERIMENTS,
        *kerdeq.EXPERIMENTS,
        *opteq.EXPERIMENTS,
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


# ``reproduce list``: every table with its state, as the files of results have it.


@dataclass(frozen=True)
class Listed:
    """A line of ``reproduce list``."""

    experiment: Experiment
    status: str
    measured: int
    """Cells with a number of ours."""
    missing: tuple[str, ...]
    """Data that are not at hand."""


def listing(out: Path, data_root: Path | None) -> list[Listed]:
    """Every id with its state, as the files in ``out`` have it."""
    there = {name: at_hand(name, data_root) for e in EXPERIMENTS.values() for name in e.data}
    return [
        Listed(
            experiment,
            *_standing(out, experiment),
            tuple(name for name in experiment.data if not there[name]),
        )
        for experiment in EXPERIMENTS.values()
    ]


def _standing(out: Path, experiment: Experiment) -> tuple[str, int]:
    """(state, cells measured): the declared recipe first, then changed ones by name, then smoke."""
    name = experiment.id
    states, places = [], set()
    for path in (result_path(out, name, smoke=False), *sorted(out.glob(f"{name}--*.json"))):
        kept = read_result(path)
        if kept is None:
            continue
        cells = _today(experiment, kept, earlier_samples(path))
        status = status_of((cell.status for cell in cells), smoke=False)
        if status != NOT_RUN:
            states.append(status + (f" ({kept['change']})" if kept["change"] else ""))
            places |= {(c.cell.row, c.cell.column) for c in cells if c.samples}
    if states:
        return "; ".join(states), len(places)
    smoke = read_result(result_path(out, name, smoke=True))
    return (NOT_RUN if smoke is None else SMOKE), 0


def _today(
    experiment: Experiment,
    kept: Mapping[str, Any],
    samples: Mapping[tuple[str, str], list[Sample]],
) -> list[CellResult]:
    """The cells of today's table with the samples of a file: those of an earlier recipe show."""
    choices = Choices(overrides=kept.get("overrides", {}), gather=True)
    jobs = {cell.job.name: cell.job for cell in experiment.cells if cell.job is not None}
    groups = {name: plan_of(job, choices)[0].group for name, job in jobs.items()}
    return [
        CellResult(
            cell,
            tuple(samples.get((cell.row, cell.column), ())),
            group="" if cell.job is None else groups[cell.job.name],
        )
        for cell in experiment.cells
    ]
