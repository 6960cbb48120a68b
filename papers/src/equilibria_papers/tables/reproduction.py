"""``reproduce``: every table and figure by its id, with the papers' numbers beside ours."""

from __future__ import annotations

import difflib
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from . import geq, opteq, ours, thesis
from .experiment import WORDS, Cell, Experiment
from .pages import copy_pictures, draw
from .parallel import Task, Tell, handled, run_beside, split
from .plan import RECIPES, Choices, Planned, at_hand, cells_asked, plan, plan_of
from .provenance import Log, made_by
from .results import (
    NOT_RUN,
    SMOKE,
    STAND_IN,
    CellResult,
    Result,
    Sample,
    earlier_samples,
    merged,
    read_result,
    result_path,
    status_of,
)
from .runs import Stop, chosen_device, complete, is_trained, remembered, run_job


def _declared() -> dict[str, Experiment]:
    """The words of papers.toml with the cells of the modules, in the order of the former."""
    words = {name: dict(said) for name, said in WORDS.items()}
    shared, made = words.pop("shared"), {}
    for module in (geq, opteq, thesis, ours):
        for name, cells in module.CELLS.items():
            said = words[name]
            said.pop("rows", None)
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


_WITH = {"ours": "", "randaugment": ", with RandAugment", "printed": ", recipe as printed"}


@dataclass(frozen=True)
class Longest:
    """A cell with the numbers of the longest training that there is of it."""

    found: CellResult
    epochs: int  # 0: nothing was trained
    recipe: str

    @property
    def texts(self) -> tuple[str, str, str, str, str]:
        """What it is, the paper's number, ours, epochs, seeds."""
        cell = self.found.cell
        note = " (other data)" if self.found.status == STAND_IN else ""
        note = note or (" (earlier recipe)" if self.found.outdated else "")
        name = cell.name + _WITH[self.recipe]
        seeds = str(len(self.found.samples))
        return name, cell.paper, self.found.number + note, str(self.epochs or "–"), seeds


@dataclass(frozen=True)
class Listed:
    """A line of ``reproduce list``."""

    experiment: Experiment
    status: str
    longest: tuple[Longest, ...]  # Of each cell with a number of ours
    missing: tuple[str, ...]  # Data that are not at hand

    @property
    def numbers(self) -> tuple[Longest, ...]:
        """Those that were measured; the size of a network is counted."""
        return tuple(one for one in self.longest if "size" not in one.found.cell.column)

    @property
    def epochs(self) -> tuple[int, ...]:
        """Of the longest trainings, each once, in order."""
        return tuple(sorted({one.epochs for one in self.longest if one.epochs}))

    @property
    def seeds(self) -> tuple[int, ...]:
        """How many seeds cells have, each count once, in order."""
        return tuple(sorted({len(one.found.samples) for one in self.longest}))


def listing(out: Path, data_root: Path | None) -> list[Listed]:
    """Every id with its state and numbers, as the files in ``out`` have them."""
    there = {name: at_hand(name, data_root) for e in EXPERIMENTS.values() for name in e.data}
    made = []
    for one in EXPERIMENTS.values():
        missing = tuple(name for name in one.data if not there[name])
        made.append(Listed(one, *_kept_of(out, one), missing))
    return made


def _files(out: Path, name: str, *, smoke: bool) -> list[Path]:
    """Where a table's results may be: the declared recipe first, then changed ones by name."""
    declared = result_path(out, name, smoke)
    return [declared, *sorted(declared.parent.glob(f"{name}--*.json"))]


def _kept_of(out: Path, experiment: Experiment) -> tuple[str, tuple[Longest, ...]]:
    """(state, longest), of smoke tests where there is nothing else."""
    name = experiment.id
    states, best = [], dict[tuple[str, str, str], Longest]()
    for path in _files(out, name, smoke=False):
        kept = read_result(path)
        if kept is None:
            continue
        samples = earlier_samples(path)
        choices = Choices(
            overrides=kept.get("overrides", {}), recipe=kept.get("recipe", "ours"), gather=True
        )
        groups = {job.name: plan_of(job, choices)[0].group for job in experiment.jobs}
        cells = []
        for cell in experiment.cells:  # today's, in which samples of an earlier recipe show
            group = "" if cell.job is None else groups[cell.job.name]
            found = CellResult(cell, tuple(samples.get((cell.row, cell.column), ())), group=group)
            epochs, place = _epochs(found, choices), (cell.row, cell.column, choices.recipe)
            if found.samples and (place not in best or epochs > best[place].epochs):
                best[place] = Longest(found, epochs, choices.recipe)
            cells.append(found)
        status = status_of((cell.status for cell in cells), smoke=False)
        if status != NOT_RUN:
            states.append(status + (f" ({kept['change']})" if kept["change"] else ""))
    if states:
        places = [(c.row, c.column, name) for c in experiment.cells for name in RECIPES]
        return "; ".join(states), tuple(best[place] for place in places if place in best)
    return (SMOKE if any(map(read_result, _files(out, name, smoke=True))) else NOT_RUN), ()


def _epochs(found: CellResult, choices: Choices) -> int:
    """Of the training behind a number; 0 where there is none."""
    job = found.cell.job
    if job is None or not job.trained:
        return 0
    recipe = {**job.recipe, **job.recipes.get(choices.recipe, {})}
    recipe |= job.stand_in if found.status == STAND_IN else {}
    return int({**recipe, **choices.overrides}.get("epochs", 0))


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
        tell: called with what happens, a sentence per job.

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
    work = _Work(choices, asked, tell or (lambda text: None))
    try:
        work.run()
    except BaseException:
        with held():
            for one in asked:  # what is done is shown, whatever ended the rest
                if work.table(*one)[1]:
                    work.written(*one)
        raise
    return [work.written(*one) for one in asked]


class _Work:
    """What is asked for: the trainings by their keys, and why one gave nothing if it did not."""

    def __init__(
        self, choices: Choices, asked: list[tuple[Experiment, tuple[Cell, ...]]], say: Tell
    ) -> None:
        self.choices, self.say = choices, say
        found = plan([cell for _, cells in asked for cell in cells], choices)
        self.planned = {one.key: one for one in found}
        self.failures: dict[str, str] = {}
        self.users: dict[str, list[str]] = {}  # the tables that ask for a training
        for experiment, cells in asked:
            for one in plan(cells, choices):
                self.users.setdefault(one.key, []).append(experiment.id)

    def run(self) -> None:
        """Every training. One that fails is logged and said, and the others go on."""
        choices, say, count = self.choices, self.say, len(self.planned)
        if choices.gather:
            there = sum(one.folder.is_dir() for one in self.planned.values())
            say(f"nothing is trained: {there} of {count} run folders are in {choices.runs}")
            return
        stop = Stop(None if choices.minutes is None else time.time() + 60.0 * choices.minutes)
        # A smoke test is no experiment: its lines stand beside its pages.
        folder = choices.out / "smoke" if choices.smoke else choices.out
        tasks = []
        for number, (key, one) in enumerate(self.planned.items(), 1):
            label = f"{number}/{count} {one.job.name}, seed {one.seed}"
            if one.missing:
                say(f"{label}: left out, {one.missing} is not at hand")
            elif complete(one):
                say(f"{label}: done before")
            else:
                log = Log(folder, ", ".join(self.users[key]), choices.change)
                tasks.append(Task(one, label, log))
        if choices.parallel == 1:
            self._in_turn(tasks, stop)
            return
        # Trainings at once; measures of time after all of them, one after another.
        parts = [(task, *split(task.planned)) for task in tasks]
        beside = [replace(task, planned=part) for task, part, _ in parts if part]
        run_beside(beside, choices, stop, self.failures, say)
        alone = [
            replace(task, planned=part, label=f"{task.label}, times")
            for task, _, part in parts
            # A training that failed is not begun again for the sake of its times.
            if part and (not part.job.trained or is_trained(part.folder))
        ]
        self._in_turn(alone, stop)

    def _in_turn(self, tasks: Sequence[Task], stop: Stop) -> None:
        for number, task in enumerate(tasks):
            # The first training gets its step in any case: calls that are too short get on too.
            if number and stop.late():
                raise KeyboardInterrupt(f"The {self.choices.minutes:g} minutes are over.")
            self.say(f"{task.label}: in {task.planned.folder}")
            try:
                run_job(task.planned, self.choices, task.log, stop=stop)
            except Exception as error:
                if self.choices.smoke:  # a test: nothing may be passed over
                    raise
                why = f"failed: {type(error).__name__}: {str(error)[:200]}"
                self.failures[task.planned.key] = why
                self.say(f"{task.label}: {why}")

    def written(self, experiment: Experiment, cells: Sequence[Cell]) -> Result:
        choices = self.choices
        result, _ = self.table(experiment, cells)
        if choices.gather and not any(found.samples for found in result.cells):
            return result  # a wrong word on the command line leaves no empty page behind
        with held():  # files are whole, and a page has its pictures
            if experiment.picture:
                result = draw(result, choices.out)
            jobs = {cell.job.name: cell.job for cell in cells if cell.job is not None}
            first = [(name, plan_of(job, choices)[0].key) for name, job in jobs.items()]
            folders = [(name, self.planned[key].folder) for name, key in first]
            result = copy_pictures(result, folders, choices.out)
            result.save(choices.out)
        return result

    def table(self, experiment: Experiment, asked: Sequence[Cell]) -> tuple[Result, bool]:
        """(the table as the run folders and the earlier table have it, whether a run is in it)."""
        choices = self.choices
        path = result_path(choices.out, experiment.id, choices.smoke, choices.change)
        earlier = earlier_samples(path)
        wanted = {(cell.row, cell.column) for cell in asked}
        jobs = {id(cell.job): cell.job for cell in experiment.cells if cell.job is not None}
        runs_of = {which: plan_of(job, choices) for which, job in jobs.items()}
        cells, fresh = [], False
        for cell in experiment.cells:
            place = (cell.row, cell.column)
            runs = [] if cell.job is None else runs_of[id(cell.job)]
            new = self._samples(cell, runs) if place in wanted else []
            fresh = fresh or bool(new)
            group = runs[0].group if runs else ""
            found = merged(new, earlier.get(place, []), group)
            cells.append(CellResult(cell, found, self._why(runs, place in wanted), group))
        result = Result(
            experiment=experiment,
            cells=tuple(cells),
            smoke=choices.smoke,
            change=choices.change,
            overrides=choices.overrides,
            recipe=choices.recipe,
            made_by=made_by(chosen_device(choices.device)),
        )
        return result, fresh

    def _samples(self, cell: Cell, runs: Sequence[Planned]) -> list[Sample]:
        made = []
        for run in runs:
            if run.key not in self.planned:
                continue
            # Equal trainings by several names are in the first's folder.
            kept = self.planned[run.key].measuring(run.job.measures)
            outcome = remembered(kept, part=True)
            if outcome is None:
                continue
            values = outcome.values
            if cell.metric not in values:
                if not complete(kept):  # a measure that failed or was not come to
                    continue
                raise KeyError(
                    f"{run.job.name} was measured and has no {cell.metric!r}; it has: "
                    f"{', '.join(values)}."
                )
            made.append(
                Sample(
                    seed=run.seed,
                    value=values[cell.metric],
                    group=run.group,
                    seconds=outcome.seconds,
                    made_by=outcome.made_by,
                    stands_in=run.stands_in,
                    residual=values.get("median_residual"),
                )
            )
        return made

    def _why(self, runs: Sequence[Planned], wanted: bool) -> str:
        """Why a cell has no number."""
        for run in runs:
            if run.missing:
                return f"{run.missing} is not at hand"
            if run.key in self.failures:
                return self.failures[run.key]
            if wanted and run.key in self.planned and self.choices.gather:
                return "no run folder has it"
        return "" if wanted or not runs else "not asked for"
