"""How the networks of the tables are trained: one recipe for all rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .experiment import Job


def _recipe(**options: Any) -> Mapping[str, Any]:
    return MappingProxyType(options)


CIFAR = _recipe(
    epochs=110,
    batch_size=512,
    lr=0.2,
    schedule="onecycle",
    weight_decay=5e-4,
    label_smoothing=0.1,
    augment=["crop", "flip", {"cutout": {"size": 16}}],
    precision="bf16-mixed",
    channels_last=True,
    validation=0.1,
)
"""GEQ A.7.1 says SGD with momentum, steps of the rate and RandAugment, no epochs and no rate. This
is what brought a GEQ stack of 4.34 M to 95.2% (results/experiments.md), the same for every row; 0.1
of the training images are the 5,000 held out."""

IMAGENET = _recipe(
    **{
        **CIFAR,
        "epochs": 100,
        "batch_size": 128,
        "lr": 0.1,
        "image_size": 256,
        "augment": ["resized_crop", "flip", "rand_augment"],
    }
)
"""GEQ A.7.2: images of 256 pixels, the rest as for CIFAR."""

OPTEQ = _recipe(
    epochs=200,
    batch_size=125,
    lr=0.1,
    schedule="step",
    milestones=[30, 60, 90, 120, 150, 180],
    drop=0.5,
    weight_decay=3e-4,
    augment=["crop", "flip"],
    validation=0.1,
)
"""OptEq §7.1: SGD, rate 0.1 halved after every 30 epochs, 200 epochs; §7.2: batches of 125, weight
decay 3e-4. Augmentation is not stated; crop and flip are ours. §7.2.2 has the rate times 0.7 after
every 20 epochs, for numbers that Table 3 of §7.1 prints too: one of the two made them."""

OPTEQ_IMAGENET = _recipe(
    epochs=300,
    batch_size=1024,
    optimizer="adamw",
    lr=1e-3,
    weight_decay=0.05,
    schedule="cosine",
    augment=["resized_crop", "flip"],
    image_size=224,
    precision="bf16-mixed",
    channels_last=True,
    validation=0.02,
)
"""OptEq §7.3.2: AdamW, weight decay 0.05, rate 0.001 with cosine decay, batch 1024, 300 epochs."""

SEGMENTATION = _recipe(
    epochs=120,
    batch_size=8,
    lr=0.01,
    momentum=0.9,
    nesterov=False,
    schedule="cosine",
    weight_decay=1e-3,
    augment=["flip"],
    validation=0.1,
)
"""OptEq §7.5: rate 0.01, momentum 0.9, weight decay 0.001, batches of 8, 40,000 steps (120 epochs
of Cityscapes). The polynomial decay of the rate is replaced by the cosine, which is close to it."""

THESIS = _recipe(
    epochs=50,
    batch_size=100,
    optimizer="adamw",
    lr=1e-3,
    weight_decay=0.0,
    schedule="cosine",
    warmup=0.0,
    validation=0.1,
)
"""Thesis §4.2.1: Adam (AdamW without decay is Adam), rate 0.001, cosine, batches of 100."""

# Training images per second on an H200. Measured alone: Gaussian branches 20,150 and GEQ stacks
# 28,519 at 3 M (results/geq_step.json), 17,200 at 5 M, 10,100 at 8 M, explicit stacks 54,019 at 3 M
# (a probe), ResNet-18 22,000. The others are guesses, some from trainings that shared a GPU.
RATES: Mapping[str, float] = MappingProxyType(
    {
        "branches": 15_000.0,
        "linear branches": 5000.0,
        "one branch": 20_000.0,
        "stack": 15_000.0,
        "explicit": 40_000.0,
        "resnet18": 22_000.0,
        "resnet50": 9000.0,
        "mdeq": 2000.0,
        "deep opteq": 8000.0,
        "unrolled": 4000.0,
        "mondeq": 3000.0,
        "imagenet": 400.0,
        "segmentation": 300.0,
        "deq": 3000.0,
    }
)

# Trainings that several tables share: declared once, so that they are run once.

_SIX = [8] * 6
_BRANCHES = {"channels": 16, "mids": _SIX, "image_size": 16}
_GAUSSIAN = {**_BRANCHES, "hidden": 8}
_STACK = {"widths": [8, 16], "depth": 1, "image_size": 8}
_MDEQ = {"channels": [8, 16], "expansion": 1, "head_channels": [4, 4], "final_channels": 16}
_INSTEAD = {"data": "cifar10", "epochs": 20, "augment": ["crop", "flip"]}
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
    ("mdeq_", "mdeq", {**_MDEQ, "image_size": 16}),
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
    found = [(RATES[kind], tiny) for start, kind, tiny in _FAMILIES if model.startswith(start)]
    if not found:
        raise ValueError(f"{model!r} belongs to no family of recipes.py: add it to _FAMILIES.")
    speed, tiny = found[0]
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

    ``recipe`` holds what a row changes in it.
    """
    changed = {**CIFAR, **recipe} if recipe else CIFAR
    instead = {} if data == "cifar10" else {"data": "cifar10"}
    return job(model, data, recipe=changed, graphs=True, stand_in=instead, **more)


def imagenet(model: str, data: str, *, pixels: int = 64, **more: Any) -> Job:
    """A network on ImageNette or ImageNet-100, 256 pixels; CIFAR-10 at ``pixels`` stands in."""
    return job(
        model,
        data,
        recipe=IMAGENET,
        rate=RATES["imagenet"],
        images=9_000 if data == "imagenette" else 114_000,
        stand_in={**_INSTEAD, "image_size": pixels},
        **more,
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


def deep_opteq(model: str, tag: str, options: Mapping[str, Any], **more: Any) -> Job:
    """A deep OptEq on CIFAR-10 by the recipe of OptEq §7.1 and §7.2."""
    unrolled = options.get("adjoint", {}).get("kind") == "Unrolled"
    rate = RATES["unrolled"] if unrolled else None
    return job(
        model, "cifar10", tag, options=options, rate=rate, recipe=OPTEQ, graphs=unrolled, **more
    )
