"""From a table to trainings: each job and seed with its configuration, its name and its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibria.training.config import TrainConfig

from .choices import MACHINE, Choices
from .declaring import Cell, Job
from .supplying import at_hand

__all__ = ["Planned", "plan"]


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


def plan(cells: Iterable[Cell], choices: Choices) -> list[Planned]:
    """Every training that the cells need, each once, seeds innermost.

    A job that two cells measure differently is one training.
    """
    given = list(cells)
    made: dict[str, Planned] = {}
    for name in dict.fromkeys(_jobs(given)):
        for found in plan_of(_merged(name, given), choices):
            made.setdefault(found.key, found)
    return list(made.values())


def plan_of(job: Job, choices: Choices) -> list[Planned]:
    """One training for each seed."""
    there = choices.smoke or at_hand(job.data, choices.data_root)
    return [_planned(job, seed, choices, there) for seed in choices.seeds]


def _jobs(cells: Iterable[Cell]) -> list[str]:
    return [cell.job.name for cell in cells if cell.job is not None]


def _merged(name: str, cells: Iterable[Cell]) -> Job:
    """The job of this name with the measures of all cells that use it."""
    found = [cell.job for cell in cells if cell.job is not None and cell.job.name == name]
    measures = tuple(dict.fromkeys(m for job in found for m in job.measures))
    return dataclasses.replace(found[0], measures=measures)


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
            missing = "" if stands_in and at_hand(stands_in, choices.data_root) else job.data
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


def _key(job: Job, config: TrainConfig, smoke: bool, *, seed: bool = True) -> str:
    said = {k: v for k, v in config.to_dict().items() if k not in MACHINE}
    if not seed:
        said.pop("seed")
    said |= {"classes": job.classes, "trained": job.trained, "smoke": smoke}
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]
