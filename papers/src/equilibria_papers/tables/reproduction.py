"""``reproduce``: every table and figure by its id, with the papers' numbers beside ours."""

from __future__ import annotations

import difflib
import signal
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import geq, kerdeq, opteq, ours, thesis
from .experiment import Cell, Experiment
from .pages import copy_pictures, draw
from .parallel import Task, Tell, handled, run_beside, split
from .plan import Choices, Planned, at_hand, cells_asked, plan, plan_of
from .provenance import Log, made_by
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
    status_of,
)
from .runs import Outcome, Stop, chosen_device, complete, is_trained, remembered, run_job


def _declared() -> dict[str, Experiment]:
    """The words of papers.toml with the cells of the modules, in the order of the former."""
    words = tomllib.loads(Path(__file__).with_name("papers.toml").read_text("utf-8"))
    shared, made = words.pop("shared"), {}
    for module in (geq, kerdeq, opteq, thesis, ours):
        for name, cells in module.CELLS.items():
            said = words[name]
            notes = [note for part in said.pop("shared", ()) for note in shared[part]]
            notes += said.pop("notes", ())
            made[name] = Experiment(id=name, cells=tuple(cells), notes=tuple(notes), **said)
    return {name: made[name] for name in words}


EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(_declared())


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


@contextmanager
def held() -> Iterator[None]:
    """Ctrl-C inside the block interrupts at its end: a file is whole, a worker is on the list.

    Blocks may be nested: the outermost interrupts. Outside the main thread Python gives no signals,
    and the block changes nothing.
    """
    came: list[int] = []
    try:
        with handled(lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(signal.SIGINT)


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
    return reproduce_all([experiment], choices, tell=tell)[0]


def reproduce_all(
    experiments: Iterable[str | Experiment],
    choices: Choices | None = None,
    *,
    tell: Tell | None = None,
) -> list[Result]:
    """``reproduce`` for several tables at once: what they share is trained and loaded once.

    Rows of ``choices.only`` have to be in one of the tables; those that have none of them are left
    out of the answer.
    """
    choices = Choices() if choices is None else choices
    given = [describe(one) if isinstance(one, str) else one for one in experiments]
    asked = cells_asked(given, choices.only)
    planned = plan([cell for _, cells in asked for cell in cells], choices)
    done = _Done({one.key: one for one in planned}, {}, choices.gather)
    try:
        _run_all(planned, _users(asked, choices), choices, done, tell or (lambda text: None))
    except BaseException:
        with held():
            for experiment, cells in asked:  # what is done is shown, whatever ended the rest
                if _table(experiment, cells, choices, done)[1]:
                    _written(experiment, cells, choices, done)
        raise
    return [_written(*one, choices, done) for one in asked]


@dataclass(frozen=True)
class _Done:
    """By the key of a training: where it is kept, and why it gave nothing if it did not."""

    planned: Mapping[str, Planned]
    failures: dict[str, str]
    gathered: bool = False

    def outcome(self, run: Planned) -> Outcome | None:
        """What was measured of it; equal trainings by several names are in the first's folder."""
        kept = self.planned.get(run.key)
        if kept is None:
            return None
        return remembered(kept.measuring(run.job.measures), part=True)

    def complete(self, run: Planned) -> bool:
        """Whether all that its job measures is there."""
        return complete(self.planned[run.key].measuring(run.job.measures))


def _users(
    asked: Sequence[tuple[Experiment, Sequence[Cell]]], choices: Choices
) -> dict[str, list[str]]:
    """By the key of a training: the tables that ask for it."""
    found: dict[str, list[str]] = {}
    for experiment, cells in asked:
        for one in plan(cells, choices):
            found.setdefault(one.key, []).append(experiment.id)
    return found


def _written(
    experiment: Experiment, cells: Sequence[Cell], choices: Choices, done: _Done
) -> Result:
    result, _ = _table(experiment, cells, choices, done)
    if choices.gather and not any(found.samples for found in result.cells):
        return result  # a wrong word on the command line leaves no empty page behind
    with held():  # files are whole, and a page has its pictures
        if experiment.picture:
            result = draw(result, choices.out)
        jobs = {cell.job.name: cell.job for cell in cells if cell.job is not None}
        first = {name: plan_of(job, choices)[0] for name, job in jobs.items()}
        folders = [(name, done.planned[run.key].folder) for name, run in first.items()]
        result = copy_pictures(result, folders, choices.out)
        result.save(choices.out)
    return result


def _run_all(
    planned: Sequence[Planned],
    users: Mapping[str, Sequence[str]],
    choices: Choices,
    done: _Done,
    say: Tell,
) -> None:
    """Every training. One that fails is logged and said, and the others go on."""
    if choices.gather:
        there = sum(one.folder.is_dir() for one in planned)
        say(f"nothing is trained: {there} of {len(planned)} run folders are in {choices.runs}")
        return
    stop = Stop(None if choices.minutes is None else time.time() + 60.0 * choices.minutes)
    # A smoke test is no experiment: its lines stand beside its pages.
    folder = choices.out / "smoke" if choices.smoke else choices.out
    tasks = []
    for number, one in enumerate(planned, 1):
        label = f"{number}/{len(planned)} {one.job.name}, seed {one.seed}"
        log = Log(folder, ", ".join(users[one.key]), choices.change)
        if one.missing:
            say(f"{label}: left out, {one.missing} is not at hand")
        elif complete(one):
            say(f"{label}: done before")
        else:
            tasks.append(Task(one, label, log))
    if choices.parallel == 1:
        _in_turn(tasks, choices, stop, done.failures, say)
        return
    # Trainings at once; measures of time after all of them, one after another.
    parts = [(task, *split(task.planned)) for task in tasks]
    beside = [replace(task, planned=part) for task, part, _ in parts if part]
    run_beside(beside, choices, stop, done.failures, say)
    alone = [
        replace(task, planned=part, label=f"{task.label}, times") for task, _, part in parts if part
    ]
    # A training that failed is not begun again for the sake of its times.
    ready = [t for t in alone if not t.planned.job.trained or is_trained(t.planned.folder)]
    _in_turn(ready, choices, stop, done.failures, say)


def _in_turn(
    tasks: Sequence[Task], choices: Choices, stop: Stop, failures: dict[str, str], say: Tell
) -> None:
    for number, task in enumerate(tasks):
        # The first training gets its step in any case: calls that are too short get on too.
        if number and stop.late():
            raise KeyboardInterrupt(f"The {choices.minutes:g} minutes are over.")
        say(f"{task.label}: in {task.planned.folder}")
        try:
            run_job(task.planned, choices, task.log, stop=stop)
        except Exception as error:
            if choices.smoke:  # a test: nothing may be passed over
                raise
            failures[task.planned.key] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            say(f"{task.label}: {failures[task.planned.key]}")


def _table(
    experiment: Experiment, asked: Sequence[Cell], choices: Choices, done: _Done
) -> tuple[Result, bool]:
    """(the table as the run folders and the earlier table have it, whether a run is in it)."""
    path = result_path(choices.out, experiment.id, choices.smoke, choices.change)
    earlier = earlier_samples(path)
    wanted = {(cell.row, cell.column) for cell in asked}
    jobs = {id(cell.job): cell.job for cell in experiment.cells if cell.job is not None}
    runs_of = {which: plan_of(job, choices) for which, job in jobs.items()}
    cells, fresh = [], False
    for cell in experiment.cells:
        place = (cell.row, cell.column)
        runs = [] if cell.job is None else runs_of[id(cell.job)]
        new = _samples(cell, runs, done) if place in wanted else []
        fresh = fresh or bool(new)
        group = runs[0].group if runs else ""
        found = merged(new, earlier.get(place, []), group)
        cells.append(CellResult(cell, found, _why(runs, done, place in wanted), group))
    result = Result(
        experiment=experiment,
        cells=tuple(cells),
        smoke=choices.smoke,
        change=choices.change,
        overrides=choices.overrides,
        made_by=made_by(chosen_device(choices.device)),
    )
    return result, fresh


def _samples(cell: Cell, runs: Sequence[Planned], done: _Done) -> list[Sample]:
    made = []
    for run in runs:
        outcome = done.outcome(run)
        if outcome is None:
            continue
        if cell.metric not in outcome.values:
            if not done.complete(run):  # a measure that failed or was not come to
                continue
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
                residual=outcome.values.get("median_residual"),
            )
        )
    return made


def _why(runs: Sequence[Planned], done: _Done, wanted: bool) -> str:
    """Why a cell has no number."""
    for run in runs:
        if run.missing:
            return f"{run.missing} is not at hand"
        if run.key in done.failures:
            return done.failures[run.key]
        if wanted and run.key in done.planned and done.gathered:
            return "no run folder has it"
    return "" if wanted or not runs else "not asked for"
