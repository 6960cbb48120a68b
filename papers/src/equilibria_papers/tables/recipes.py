"""How the networks of the tables are trained: the recipes of recipes.toml, and jobs by them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .experiment import Job

_DECLARED = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text("utf-8"))
CIFAR: Mapping[str, Any] = MappingProxyType(_DECLARED["cifar"])
CIFAR_RECIPES: Mapping[str, Any] = MappingProxyType(
    {name: _DECLARED[f"cifar_{name}"] for name in ("randaugment", "printed")}
)
IMAGENET: Mapping[str, Any] = MappingProxyType({**CIFAR, **_DECLARED["imagenet"]})
OPTEQ: Mapping[str, Any] = MappingProxyType(_DECLARED["opteq"])
OPTEQ_IMAGENET: Mapping[str, Any] = MappingProxyType(_DECLARED["opteq_imagenet"])
SEGMENTATION: Mapping[str, Any] = MappingProxyType(_DECLARED["segmentation"])
THESIS: Mapping[str, Any] = MappingProxyType(_DECLARED["thesis"])
RATES: Mapping[str, float] = MappingProxyType(_DECLARED["rates"])

# Trainings that several tables share: declared once, so that they are run once.

_INSTEAD = {"data": "cifar10", "epochs": 20, "augment": ["crop", "flip"]}


def job(
    model: str,
    data: str,
    tag: str = "",
    *,
    options: Mapping[str, Any] | None = None,
    smoke: Mapping[str, Any] | None = None,
    rate: float | None = None,
    first: str = "",
    **more: Any,
) -> Job:
    """A job by the name ``data-model-tag``; rate and tiny form are those of the model's family.

    ``first`` stands in place of the data in the name; ``more`` are other fields of Job.
    """
    families = _DECLARED["families"]["all"]
    found = [(kind, tiny) for start, kind, tiny in families if model.startswith(start)]
    if not found:
        raise ValueError(f"{model!r} belongs to no family of recipes.toml: add it there.")
    kind, tiny = found[0]
    speed = RATES.get(f"{kind} {model[-2:]}", RATES[kind])  # of this size, where it has its own
    return Job(
        name="-".join(filter(None, (first or data, model, tag))),
        model=model,
        options=dict(options or {}),
        data=data,
        rate=speed if rate is None else rate,
        smoke=dict(tiny if smoke is None else smoke),
        **more,
    )


def cifar(
    model: str, data: str = "cifar10", *, recipe: Mapping[str, Any] | None = None, **more: Any
) -> Job:
    """A network on CIFAR by the recipe that all rows share; CIFAR-10 stands in for CIFAR-100.

    ``recipe`` holds what a row changes in it, by whatever recipe the table is trained.
    """
    own = dict(recipe or {})
    recipes = {name: {**changes, **own} for name, changes in CIFAR_RECIPES.items()}
    instead = {} if data == "cifar10" else {"data": "cifar10"}
    more = {"recipes": recipes, "graphs": True, "stand_in": instead, **more}
    return job(model, data, recipe={**CIFAR, **own}, **more)


def imagenet(model: str, data: str, *, pixels: int = 64, **more: Any) -> Job:
    """A network on ImageNette or ImageNet-100, 256 pixels; CIFAR-10 at ``pixels`` stands in."""
    return job(
        model,
        data,
        recipe=IMAGENET,
        rate=RATES["imagenet"] if model.startswith("mdeq_") else None,  # its own is of 32 pixels
        images=8_500 if data == "imagenette" else 114_000,
        stand_in={**_INSTEAD, "image_size": pixels},
        **more,
    )


def one_branch(model: str) -> Job:
    """KerDEQ §4.3: one branch at the full 32 pixels, trained on the first half of the classes.

    The paper gives no width: 128 channels are ours (0.45 M). Smoothed labels would change the KL.
    """
    tiny: dict[str, Any] = {"channels": 16, "mids": [8], "scales": [1], "image_size": 8}
    tiny |= {"hidden": 8} if model.startswith("kerdeq") else {}
    return cifar(
        model,
        tag="one-branch",
        recipe={"label_smoothing": 0.0},
        options={"scales": [1], "mids": [128], "channels": 128},
        classes="first half",
        images=22_500,
        measures=("known and unknown",),
        smoke=tiny,
        rate=RATES["one branch"],
    )


def deep_opteq(model: str, tag: str, options: Mapping[str, Any], **more: Any) -> Job:
    """A deep OptEq on CIFAR-10 by the recipe of OptEq §7.1 and §7.2."""
    unrolled = options.get("adjoint", {}).get("kind") == "Unrolled"
    rate = RATES["unrolled"] if unrolled else None
    return job(
        model, "cifar10", tag, options=options, rate=rate, recipe=OPTEQ, graphs=unrolled, **more
    )
