"""``reproduce``: from an id to a table with the paper's numbers beside ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .choices import Choices
from .declaring import Cell, Experiment
from .log import Log
from .planning import Planned, plan, plan_of
from .provenance import made_by
from .registry import EXPERIMENTS, describe
from .results import (
    NOT_RUN,
    SMOKE,
    CellResult,
    Result,
    Sample,
    earlier_samples,
    merged,
    read_result,
    result_path,
)
from .running import Outcome, chosen_device, remembered, run_job
from .supplying import at_hand

__all__ = ["Listed", "listing", "reproduce"]

Tell = Callable[[str], None]


def reproduce(
    experiment: str | Experiment, choices: Choices | None = None, *, tell: Tell | None = None
) -> Result:
    """Train what the table needs, measure it, write the table; what was done before is kept.

    Args:
        experiment: an id of ``names()``, or an Experiment.
        choices: seeds, rows, folders, device; None: the defaults.
        tell: is told what happens, a sentence a job.

    Returns:
        The table, as written to ``choices.out``. Jobs whose data are not at hand are left out and
        the table says so. Ctrl-C keeps what is done: the same call goes on from there.
    """
    choices = Choices() if choices is None else choices
    found = describe(experiment) if isinstance(experiment, str) else experiment
    say: Tell = (lambda text: None) if tell is None else tell
    done = _Done({}, {})
    try:
        _run_all(found, choices, done, say)
    except BaseException:
        if done.outcomes:  # what is done is shown, whatever ended the rest
            _table(found, choices, done).save(choices.out)
        raise
    result = _table(found, choices, done)
    if found.picture:
        from .drawing import draw

        result = draw(result, choices.out)
    result.save(choices.out)
    return result


@dataclass(frozen=True)
class _Done:
    """By the key of a training: what it gave, or why it gave nothing."""

    outcomes: dict[str, Outcome]
    failures: dict[str, str]


def _run_all(experiment: Experiment, choices: Choices, done: _Done, say: Tell) -> None:
    """Every training in turn. One that fails is logged and said, and the others go on."""
    planned = plan(experiment.cells_of(choices.only), choices)
    log = Log(choices.out, experiment.id, choices.change)
    deadline = None if choices.minutes is None else time.monotonic() + 60.0 * choices.minutes
    worked = False
    for number, one in enumerate(planned, 1):
        label = f"{number}/{len(planned)} {one.job.name}, seed {one.seed}"
        if one.missing:
            say(f"{label}: left out, {one.missing} is not at hand")
            continue
        known = remembered(one)
        say(f"{label}: {'done before' if known else f'in {one.folder}'}")
        # The first training gets its step in any case: calls that are too short get on too.
        if not known and worked and deadline is not None and time.monotonic() >= deadline:
            raise KeyboardInterrupt(f"The {choices.minutes:g} minutes are over.")
        worked = worked or not known
        try:
            done.outcomes[one.key] = known or run_job(one, choices, log, deadline=deadline)
        except Exception as error:
            if choices.smoke:  # a test: nothing may be passed over
                raise
            done.failures[one.key] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            say(f"{label}: {done.failures[one.key]}")


def _table(experiment: Experiment, choices: Choices, done: _Done) -> Result:
    path = result_path(choices.out, experiment.id, choices.smoke, choices.change)
    earlier = earlier_samples(path)
    wanted = {(cell.row, cell.column) for cell in experiment.cells_of(choices.only)}
    runs_of = {job.name: plan_of(job, choices) for job in experiment.jobs}
    cells = []
    for cell in experiment.cells:
        place = (cell.row, cell.column)
        runs = [] if cell.job is None else runs_of[cell.job.name]
        new = _samples(cell, runs, done.outcomes) if place in wanted else []
        group = runs[0].group if runs else ""
        found = merged(new, earlier.get(place, []), group)
        cells.append(CellResult(cell, found, _why(runs, done, place in wanted), group))
    return Result(
        experiment=experiment,
        cells=tuple(cells),
        smoke=choices.smoke,
        change=choices.change,
        made_by=made_by(chosen_device(choices.device)),
    )


def _samples(cell: Cell, runs: list[Planned], outcomes: Mapping[str, Outcome]) -> list[Sample]:
    made = []
    for run in runs:
        outcome = outcomes.get(run.key)
        if outcome is None:
            continue
        if cell.metric not in outcome.values:
            raise KeyError(
                f"{run.job.name} was measured and has no {cell.metric!r}; it has: "
                f"{', '.join(outcome.values)}."
            )
        made.append(
            Sample(
                seed=run.seed,
                value=outcome.values[cell.metric],
                group=run.group,
                seconds=outcome.seconds,
                made_by=outcome.made_by,
                stands_in=run.stands_in,
            )
        )
    return made


def _why(runs: list[Planned], done: _Done, wanted: bool) -> str:
    """Why a cell has no number."""
    for run in runs:
        if run.missing:
            return f"{run.missing} is not at hand"
        if run.key in done.failures:
            return done.failures[run.key]
    return "" if wanted or not runs else "not asked for"


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
            *_standing(out, experiment.id),
            tuple(name for name in experiment.data if not there[name]),
        )
        for experiment in EXPERIMENTS.values()
    ]


def _standing(out: Path, name: str) -> tuple[str, int]:
    """(state, cells measured): the declared recipe first, then changed ones by name, then smoke."""
    files = [result_path(out, name, smoke=False), *sorted(out.glob(f"{name}--*.json"))]
    found = [one for one in map(read_result, files) if one is not None]
    ran = [one for one in found if one["status"] != NOT_RUN]
    if ran:
        states = [one["status"] + (f" ({one['change']})" * bool(one["change"])) for one in ran]
        places = {(c["row"], c["column"]) for one in ran for c in one["cells"] if c["n"] > 0}
        return "; ".join(states), len(places)
    smoke = read_result(result_path(out, name, smoke=True))
    return (NOT_RUN if smoke is None else SMOKE), 0
