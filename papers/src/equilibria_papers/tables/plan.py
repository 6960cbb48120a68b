"""From a table to trainings: what the user chooses, each job and seed with its configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equilibria import data
from equilibria.data import DataError, find_named
from equilibria.engine import check_number, options
from equilibria.training import TrainConfig

from .experiment import Cell, Experiment, Job

RANDOM = "random"
"""Images that nobody drew: for measurements of time."""
MACHINE = frozenset(
    {
        *("out", "data_root", "download", "accelerator", "devices", "nodes", "strategy"),
        *("workers", "log_every", "loggers", "compile", "cuda_graphs", "on_corrupt"),
    }
)
"""Where and on what machine something is run does not change what it is."""

RECIPES = ("ours", "randaugment", "printed")

# What belongs to the plan, not to the recipe.
_RESERVED = ("model", "data", "data_root", "out", "seed", "accelerator", "devices", "model_options")
# What may only be checked with the rest of a recipe.
_TOGETHER = ("schedule", "milestones", "compile", "jacobian_weight", "select", "ema")


@options
class Choices:
    """What the user of ``reproduce`` chooses; checked when made."""

    seeds: tuple[int, ...] = (0,)  # One training of every job for each
    only: tuple[str, ...] = ()  # Rows of the table; none: all
    smoke: bool = False  # Tiny networks on the digits, by the same code: a test, not a result
    stand_in: bool = False  # Whether other data may stand in for data that are not at hand
    recipe: str = "ours"  # One of RECIPES
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Options of TrainConfig in place of the recipe's; the table says so."""
    device: str | None = None  # "cpu", "cuda", "cuda:1"; None: a GPU where there is one
    data_root: Path | None = None
    """Where data sets are looked for; None: the places of equilibria.data."""
    out: Path = Path("results/reproduce")  # Where tables are written
    runs: Path = Path("runs/reproduce")  # Where trainings are kept
    minutes: float | None = None
    """Stop training after this long, as by Ctrl-C: the same command goes on from there."""
    parallel: int = 1
    """Trainings at once, in so many processes. Times are measured alone, after the rest."""
    gather: bool = False
    """Train and measure nothing: the tables of what the run folders hold, such as those that
    another machine filled."""
    progress: bool = True  # Whether to show bars

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds={self.seeds}: expected at least one, none of them twice.")
        for seed in self.seeds:
            if type(seed) is not int or not 0 <= seed < 2**32:
                raise ValueError(f"seeds={self.seeds}: expected whole numbers from 0 to 2³² − 1.")
        check_number(self, "minutes", low=0.0, low_open=True, optional=True)
        check_number(self, "parallel", low=1, integer=True)
        if self.gather and (self.minutes is not None or self.parallel > 1):
            raise ValueError(
                f"gather=True, minutes={self.minutes}, parallel={self.parallel}: nothing is "
                "trained, and minutes and parallel are of trainings; leave them out, or gather."
            )
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe={self.recipe!r}: expected one of {', '.join(RECIPES)}.")
        taken = [name for name in self.overrides if name in _RESERVED]
        if taken:
            raise ValueError(
                f"overrides may not set {taken[0]}: the table decides it. They take other options "
                "of a training, such as epochs, batch_size or lr."
            )
        alone = {k: v for k, v in self.overrides.items() if k not in _TOGETHER}
        TrainConfig().with_overrides(alone)  # unknown names and values are said

    @property
    def change(self) -> str:
        """The choices in words, ``recipe=printed, epochs=2``; empty: the declared recipe."""
        named = {} if self.recipe == "ours" else {"recipe": self.recipe}
        made = named | {name: self.overrides[name] for name in sorted(self.overrides)}
        return ", ".join(f"{n}={_word(value)}" for n, value in made.items() if n not in MACHINE)


def _word(value: Any) -> str:
    """0.0 and 0, and 0.001 and what YAML reads as the text 1e-3, are one training: one word."""
    if isinstance(value, str) and value[:1].isdecimal():
        with contextlib.suppress(ValueError):
            value = float(value)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def data_folder(name: str, root: Path | None) -> Path:
    """Where images that no catalog names are."""
    return (Path() if root is None else root) / name


def at_hand(name: str, root: Path | None) -> bool:
    """Whether the training images can be read without a download."""
    if name == RANDOM:
        return True
    if name not in data.names():
        return data_folder(name, root).is_dir()
    try:
        find_named(name, "train", root, False, False)
    except (DataError, OSError):
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job with a seed: what will be trained, and where it is kept."""

    job: Job
    seed: int
    config: TrainConfig
    key: str  # Ten hexadecimal digits of the settings and the seed
    group: str  # The same without the seed: runs of one group are averaged
    stands_in: str  # The data that stand in for the job's, or empty
    missing: str  # The data that are not at hand, or empty: then it cannot be run
    smoke: bool = False

    @property
    def folder(self) -> Path:
        return self.config.folder

    def measuring(self, measures: tuple[str, ...]) -> Planned:
        """The same training, other measures."""
        return dataclasses.replace(self, job=dataclasses.replace(self.job, measures=measures))


def cells_asked(
    experiments: Iterable[Experiment], only: tuple[str, ...] = ()
) -> list[tuple[Experiment, tuple[Cell, ...]]]:
    """Each table with the cells of these rows; no rows given: all.

    Tables that have none of the rows are left out; a row that no table has is an error, and so is
    a table that is given twice.
    """
    given = list(experiments)
    ids = [one.id for one in given]
    if not ids or len(set(ids)) != len(ids):
        said = ", ".join(ids) or "none"
        raise ValueError(f"tables given: {said}; expected at least one, none of them twice.")
    if len(given) == 1:
        return [(given[0], given[0].cells_of(only))]
    wrong = [row for row in only if not any(row in one.rows for one in given)]
    if wrong:
        known = "; ".join(f"{one.id}: {', '.join(map(repr, one.rows))}" for one in given)
        raise ValueError(f"none of these tables has a row {wrong[0]!r}; their rows are {known}.")
    found = [(one, tuple(row for row in only if row in one.rows)) for one in given]
    return [(one, one.cells_of(rows)) for one, rows in found if rows or not only]


def plan(cells: Iterable[Cell], choices: Choices) -> list[Planned]:
    """Every training that the cells need, each once: all rows with the first seed, then the next.

    Cells may be those of several tables. What they measure of one training, whatever they call it,
    is united: it is one folder, and the weights are loaded once.
    """
    jobs = {id(cell.job): cell.job for cell in cells if cell.job is not None}
    if choices.recipe != "ours" and not any(job.recipes for job in jobs.values()):
        raise ValueError(
            f"recipe={choices.recipe!r}: these tables have one recipe, as far as the paper states "
            "it; leave it out. It is for networks on CIFAR in tables of GEQ, KerDEQ and our own."
        )
    made: dict[str, Planned] = {}
    for job in jobs.values():
        for new in plan_of(job, choices):
            if "held out" in job.measures and not new.config.validation:
                raise ValueError(
                    f"validation=0: {job.name} is also judged by the images that are held out; "
                    "give another share, or leave it out."
                )
            one = made.get(new.key, new)
            measures = tuple(dict.fromkeys((*one.job.measures, *new.job.measures)))
            made[new.key] = one.measuring(measures)
    return sorted(made.values(), key=lambda one: choices.seeds.index(one.seed))


def plan_of(job: Job, choices: Choices) -> list[Planned]:
    """One training for each seed."""
    if choices.gather:  # what counts is what was trained, wherever the data lie
        own = (_planned(job, seed, choices, True).folder for seed in choices.seeds)
        there = not (choices.stand_in and job.stand_in) or any(folder.is_dir() for folder in own)
    else:
        there = choices.smoke or at_hand(job.data, choices.data_root)
    return [_planned(job, seed, choices, there) for seed in choices.seeds]


def _planned(job: Job, seed: int, choices: Choices, there: bool) -> Planned:
    """``there``: whether the job's own data are taken."""
    stands_in = missing = ""
    if choices.recipe in job.recipes:
        recipe = _override(job.recipe, job.recipes[choices.recipe])
        job = dataclasses.replace(job, recipe=recipe)
    model_options = dict(job.options)
    if choices.smoke:
        model_options |= {k: v for k, v in job.smoke.items() if k != "image_size"}
        recipe = _smoke_recipe(job)
    else:
        recipe = {**job.recipe, "data": job.data}
        if not there:
            if choices.stand_in and job.stand_in:
                recipe = _override(recipe, job.stand_in)
                stands_in = str(job.stand_in["data"])
            known = stands_in and (choices.gather or at_hand(stands_in, choices.data_root))
            missing = "" if known else job.data
    recipe = _override(recipe, choices.overrides)
    if choices.data_root is not None:
        recipe["data_root"] = str(choices.data_root)
    if choices.device is not None:  # Lightning's words for it
        recipe["accelerator"], _, index = choices.device.partition(":")
        recipe |= {"devices": [int(index)]} if index else {}
    config = TrainConfig(
        **{**recipe, "model": job.model, "model_options": model_options, "seed": seed}
    )
    key, group = _key(job, config, choices.smoke), _key(job, config, choices.smoke, seed=False)
    # A network on data that stand in is the one of the tables on those data.
    name = job.name.replace(job.data, stands_in, 1) if stands_in else job.name
    return Planned(
        job=job,
        seed=seed,
        config=config.with_overrides(out=str(choices.runs / f"{name}-{key}")),
        key=key,
        group=group,
        stands_in=stands_in,
        missing=missing,
        smoke=choices.smoke,
    )


def _smoke_recipe(job: Job) -> dict[str, Any]:
    """Two epochs of a few hundred digits; optimizer, schedule and augmentation are the recipe's."""
    kept = ("optimizer", "schedule", "augment", "label_smoothing", "weight_decay", "validation")
    made = {name: job.recipe[name] for name in kept if name in job.recipe}
    made |= {"data": "digits", "epochs": 2, "batch_size": 32, "validation": 0.2}
    made |= {"image_size": job.smoke.get("image_size", 8)}
    made |= {"lr": 1e-3 if made.get("optimizer") == "adamw" else 0.02}
    return {**made, "milestones": [1]} if made.get("schedule") == "step" else made


def _override(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with changes; milestones move with the number of epochs."""
    made = {**recipe, **changes}
    if made.get("schedule") != "step":
        made.pop("milestones", None)
    elif "milestones" not in changes and made.get("epochs") != recipe.get("epochs"):
        share = made["epochs"] / recipe["epochs"]
        moved = {round(m * share) for m in recipe.get("milestones", ())}
        made["milestones"] = sorted(m for m in moved if 1 <= m < made["epochs"])
        if not made["milestones"]:  # too short a run for any
            made.pop("milestones")
            made["schedule"] = "constant"
    return made


_NEWER: dict[str, Any] = {"samples": None, "margin": 0.0, "temperature": 1.0, "half_steps": 0.0}
_NEWER |= {"sync_batchnorm": False, "process_timeout": 45.0}
"""Options of TrainConfig that came after the first results, with their defaults: where they are not
set they say nothing, so that results stay those of today's recipe."""


def _key(job: Job, config: TrainConfig, smoke: bool, *, seed: bool = True) -> str:
    said = {k: v for k, v in config.to_dict().items() if k not in MACHINE}
    said = {k: v for k, v in said.items() if k not in _NEWER or v != _NEWER[k]}
    if not seed:
        said.pop("seed")
    said |= {"classes": job.classes, "trained": job.trained, "smoke": smoke}
    if config.model_revision:
        said["revision"] = config.model_revision
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]
