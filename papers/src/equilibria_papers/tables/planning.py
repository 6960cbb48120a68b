"""From a table to trainings: each job and seed with its configuration, its name and its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibria.training import TrainConfig

from .choices import MACHINE, Choices
from .declaring import Cell, Experiment, Job
from .supplying import at_hand


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job with a seed: what will be trained, and where it is kept."""

    job: Job
    seed: int
    config: TrainConfig
    key: str
    """Ten hexadecimal digits of the settings and the seed."""
    group: str
    """The same without the seed: runs of one group are averaged."""
    stands_in: str
    """The data that stand in for the job's, or empty."""
    missing: str
    """The data that are not at hand, or empty: then it cannot be run."""
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
    """Every training that the cells need, each once, seeds innermost.

    Cells may be those of several tables. What they measure of one training, whatever they call it,
    is united: it is one folder, and the weights are loaded once.
    """
    jobs = {id(cell.job): cell.job for cell in cells if cell.job is not None}
    made: dict[str, Planned] = {}
    for job in jobs.values():
        for found in plan_of(job, choices):
            made[found.key] = _united(made.get(found.key, found), found)
    return list(made.values())


def plan_of(job: Job, choices: Choices) -> list[Planned]:
    """One training for each seed."""
    if choices.gather:  # what counts is what was trained, wherever the data lie
        there = not (choices.stand_in and job.stand_in) or _was_run(job, choices)
    else:
        there = choices.smoke or at_hand(job.data, choices.data_root)
    return [_planned(job, seed, choices, there) for seed in choices.seeds]


def _was_run(job: Job, choices: Choices) -> bool:
    """Whether a run on the job's own data is kept."""
    return any(_planned(job, seed, choices, True).folder.is_dir() for seed in choices.seeds)


def _united(first: Planned, second: Planned) -> Planned:
    """The first of two plans of one training, with what either measures."""
    measures = tuple(dict.fromkeys((*first.job.measures, *second.job.measures)))
    return first.measuring(measures)


def _planned(job: Job, seed: int, choices: Choices, there: bool) -> Planned:
    stands_in = missing = ""
    options = dict(job.options)
    if choices.smoke:
        options |= {k: v for k, v in job.smoke.items() if k != "image_size"}
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
    where = {} if choices.data_root is None else {"data_root": str(choices.data_root)}
    config = TrainConfig(
        **{
            **recipe,
            **where,
            **_machine(choices.device),
            "model": job.model,
            "model_options": options,
            "seed": seed,
        }
    )
    key, group = _key(job, config, choices.smoke), _key(job, config, choices.smoke, seed=False)
    return Planned(
        job=job,
        seed=seed,
        config=config.with_overrides(out=str(choices.runs / f"{_name(job, stands_in)}-{key}")),
        key=key,
        group=group,
        stands_in=stands_in,
        missing=missing,
        smoke=choices.smoke,
    )


def _name(job: Job, stands_in: str) -> str:
    """A network on data that stand in is the one of the tables on those data."""
    return job.name.replace(job.data, stands_in, 1) if stands_in else job.name


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


def _machine(device: str | None) -> dict[str, Any]:
    """Lightning's words for a device."""
    if device is None:
        return {}
    kind, _, index = device.partition(":")
    return {"accelerator": kind, **({"devices": [int(index)]} if index else {})}


_NEWER = {"samples": None}
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
