"""Trainings that several tables share: declared once, so that they are run once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import recipes
from .declaring import Job
from .recipes import RATES

__all__ = ["cifar", "deep_opteq", "imagenet", "one_branch"]

_SIX = [8] * 6
_BRANCHES = {"channels": 16, "mids": _SIX, "image_size": 16}
_GAUSSIAN = {**_BRANCHES, "hidden": 8}
_STACK = {"widths": [8, 16], "depth": 1, "image_size": 8}
_MDEQ = {
    "channels": [8, 16],
    "expansion": 1,
    "head_channels": [4, 4],
    "final_channels": 16,
    "image_size": 16,
}
_COARSE = {"channels": 16, "mids": [8, 8], "scales": [1, 2], "image_size": 32}
_DEEP = {"channels": 8, "mids": [4, 8], "image_size": 8}

# The beginning of a model's name → its rate, and what makes it tiny.
_FAMILIES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("geq_stack_", "stack", {**_STACK, "hidden": 8}),
    ("opteq_stack_", "stack", _STACK),
    ("explicit_stack_", "explicit", _STACK),
    ("geq_imagenet_", "imagenet", {**_COARSE, "hidden": 8}),
    ("kerdeq_imagenet_", "imagenet", {**_COARSE, "hidden": 8}),
    ("mopteq_imagenet_", "imagenet", _COARSE),
    ("geq_cifar_", "branches", _GAUSSIAN),
    ("kerdeq_cifar_", "branches", _GAUSSIAN),
    ("mopteq_", "linear branches", _BRANCHES),
    ("mdeq_", "mdeq", _MDEQ),
    ("resnet18_cifar", "resnet18", {"image_size": 8}),
    ("resnet50_cifar", "resnet50", {"image_size": 8}),
    ("resnet", "imagenet", {"image_size": 32}),
    ("deep_opteq_small", "imagenet", {"image_size": 32}),
    ("deep_opteq_middle", "imagenet", {"image_size": 32}),
    ("deep_opteq_seg", "segmentation", {"channels": 8, "mids": [8, 8], "image_size": 16}),
    ("fcn_seg", "segmentation", {"channels": 8, "mids": [8, 8], "image_size": 16}),
    ("fcn_resnet18", "segmentation", {"image_size": 32}),
    ("deep_opteq_", "deep opteq", _DEEP),
    ("mondeq_", "mondeq", {"channels": [8], "image_size": 8}),
)


def family(model: str) -> tuple[float, Mapping[str, Any]]:
    """Images a second of a model of this name, and the options that make it tiny."""
    for beginning, rate, smoke in _FAMILIES:
        if model.startswith(beginning):
            return RATES[rate], smoke
    raise ValueError(f"{model!r} belongs to no family of jobs.py: add it to _FAMILIES.")


def cifar(
    model: str,
    data: str = "cifar10",
    *,
    tag: str = "",
    options: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
    classes: str = "all",
    measures: tuple[str, ...] = ("quality",),
    smoke: Mapping[str, Any] | None = None,
    rate: float | None = None,
) -> Job:
    """A network on CIFAR by the recipe that all rows share; CIFAR-10 stands in for CIFAR-100.

    ``recipe`` holds what a row changes in it.
    """
    speed, tiny = family(model)
    return Job(
        name=f"{data}-{model}{'-' if tag else ''}{tag}",
        model=model,
        options=dict(options or {}),
        data=data,
        recipe={**recipes.CIFAR, **recipe} if recipe else recipes.CIFAR,
        classes=classes,
        measures=measures,
        graphs=True,
        rate=speed if rate is None else rate,
        stand_in={} if data == "cifar10" else {"data": "cifar10"},
        smoke=dict(tiny if smoke is None else smoke),
    )


def imagenet(
    model: str,
    data: str,
    *,
    tag: str = "",
    options: Mapping[str, Any] | None = None,
    measures: tuple[str, ...] = ("quality",),
    pixels: int = 64,
) -> Job:
    """A network on ImageNette or ImageNet-100, 256 pixels; CIFAR-10 at ``pixels`` stands in."""
    speed, tiny = family(model)
    return Job(
        name=f"{data}-{model}{'-' if tag else ''}{tag}",
        model=model,
        options=dict(options or {}),
        data=data,
        recipe=recipes.IMAGENET,
        measures=measures,
        rate=min(speed, RATES["imagenet"]),
        images=9_000 if data == "imagenette" else 114_000,
        stand_in={
            "data": "cifar10",
            "image_size": pixels,
            "epochs": 20,
            "augment": ["crop", "flip"],
        },
        smoke=dict(tiny),
    )


def one_branch(model: str, data: str = "cifar10") -> Job:
    """KerDEQ §4.3: one branch at the full 32 pixels, trained on the first half of the classes.

    The paper gives no width; 128 channels of z, U and W are ours (0.45 M parameters).
    """
    tiny: dict[str, Any] = {"channels": 16, "mids": [8], "scales": [1], "image_size": 8}
    if model.startswith("kerdeq"):
        tiny["hidden"] = 8
    return cifar(
        model,
        data,
        tag="one-branch",
        options={"scales": [1], "mids": [128], "channels": 128},
        classes="first half",
        measures=("known and unknown",),
        smoke=tiny,
        rate=RATES["one branch"],
    )


def deep_opteq(
    model: str,
    tag: str,
    options: Mapping[str, Any],
    *,
    measures: tuple[str, ...] = ("quality",),
    smoke: Mapping[str, Any] | None = None,
) -> Job:
    """A deep OptEq on CIFAR-10 by the recipe of OptEq §7.1 and §7.2."""
    speed, tiny = family(model)
    unrolled = options.get("adjoint", {}).get("kind") == "Unrolled"
    return Job(
        name=f"cifar10-{model}-{tag}",
        model=model,
        options=dict(options),
        data="cifar10",
        recipe=recipes.OPTEQ,
        measures=measures,
        graphs=unrolled,
        rate=RATES["unrolled"] if unrolled else speed,
        smoke={**tiny, **(smoke or {})},
    )
