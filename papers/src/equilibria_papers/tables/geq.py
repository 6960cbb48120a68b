"""The cells of GEQ (Tables 1–3, 5, Figures 2–4) and of KerDEQ, its earlier version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .experiment import Cell, Job, cells, printed
from .recipes import cifar, imagenet, one_branch

# MOptEqs of 10 M on ImageNette: the widths of the 13 M network times 7/8.
TEN_MILLION = {"channels": 336, "mids": [42, 84, 168, 168, 336, 336]}
# Of these the equilibrium is unique by the bound on W: the certificate checks the trained weights.
_PROVEN = ("geq_", "mopteq_", "opteq_", "kerdeq_", "deep_opteq_")
_BOTH = (("CIFAR-10", "cifar10"), ("CIFAR-100", "cifar100"))
# Rows that are a named network with an option.
_AFTER: dict[str, Any] = {"tag": "norm-after", "options": {"norm": "after"}}
_CHANGED = {f"GEQ stack {size}, norm after (ours)": _AFTER for size in ("5M", "8M")}


def sized(row: str, title: str, job: Job, size: str, accuracy: str) -> list[Cell]:
    """The two cells of a model in these tables: its size and its accuracy."""
    return cells(
        row,
        job,
        (f"{title}, size in M", "parameters_m", size),
        (f"{title}, accuracy in %", "accuracy", accuracy),
    )


def _cifar_cells() -> list[Cell]:
    made: list[Cell] = []
    for row, model, *numbers in printed("geq-table1"):
        training = partial(cifar, model, **_CHANGED.get(row, {}))
        made += sized(row, "CIFAR-10", training(data="cifar10"), *numbers[:2])
        made += sized(row, "CIFAR-100", training(data="cifar100"), *numbers[2:])
        if model.startswith(_PROVEN):
            job = training(measures=("quality", "certificate"))
            made += cells(row, job, ("certified unique, in %", "certified"))
        if "_stack_" in model:
            job = training(measures=("quality", "flip"))
            made += cells(row, job, ("CIFAR-10 with test-time flip, in %", "flip.accuracy"))
    return made


def imagenet_cells(
    row: str, model: str, numbers: Sequence[str], title: str, data: str, pixels: int = 64
) -> list[Cell]:
    """Size and accuracy of a network on one of the two large sets."""
    options: dict[str, Any] = {}
    tag = ""
    if model == "mdeq_cifar":
        options, tag = {"downsample": 2}, "coarse"
    elif model == "mopteq_imagenet_13m" and numbers[0] == "10M":
        options, tag = TEN_MILLION, "10m"
    job = imagenet(model, data, tag=tag, options=options, pixels=pixels)
    return sized(row, title, job, *numbers)


def _large_cells() -> list[Cell]:
    made: list[Cell] = []
    for row, model, *numbers in printed("geq-table2"):
        made += imagenet_cells(row, model, numbers[:2], "ImageNette", "imagenette")
        made += imagenet_cells(row, model, numbers[2:], "ImageNet-100", "imagenet-100")
    return made


def _superclass(row: str, model: str, known: str, unknown: str) -> list[Cell]:
    how: dict[str, Any] = {"classes": "superclass", "measures": ("superclass",), "images": 36_000}
    job = cifar(model, "cifar100", tag="superclass", **how)
    return cells(
        row,
        job,
        ("known accuracy in %", "known_accuracy", known),
        ("unknown accuracy in %", "unknown_accuracy", unknown),
    )


KINDS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    *("snow", "frost", "fog", "brightness", "spatter"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
)


def corruption_cells(models: Mapping[str, str]) -> list[Cell]:
    """Title → model on CIFAR-10: a row for each corruption, the mean and the clean images."""
    jobs = {
        title: cifar(model, measures=("quality", "corruptions")) for title, model in models.items()
    }
    rows = [(kind.replace("_", " "), f"corruption.{kind}") for kind in KINDS]
    rows += [("mean of 19", "corruption.mean"), ("clean", "corruption.clean")]
    return [
        Cell(row=row, column=f"{title}, accuracy in %", job=job, metric=metric)
        for row, metric in rows
        for title, job in jobs.items()
    ]


def _saliency(row: str, model: str) -> list[Cell]:
    job = imagenet(model, "imagenette", measures=("quality", "saliency"))
    share = ("share of the map in its top fifth, in %", "focus")
    return cells(row, job, share, ("accuracy in %", "accuracy"))


def patch_cells(model: str) -> list[Cell]:
    """Accuracy on CIFAR-100 by channel split (2 × 2 pixels) and by patch size (8 channels)."""

    def one(row: str, channels: int, size: int) -> Cell:
        job = cifar(model, "cifar100")  # the network of the tables
        if (channels, size) != (8, 2):
            patch = {"kind": "Patches", "channels": channels, "size": size}
            # Two scales of 16 pixels: patches of 4 must divide the coarser map.
            tiny = {"channels": 16, "hidden": 8, "image_size": 16, "scales": [1, 2]}
            tiny["mids"] = [max(8, channels)] * 2
            tag = f"patch-{channels}-{size}"
            job = cifar(model, "cifar100", tag=tag, options={"patch": patch}, smoke=tiny)
        return Cell(row=row, column="CIFAR-100, accuracy in %", job=job)

    splits = [one(f"c_s = {c}, p = 2", c, 2) for c in (2, 4, 8, 16, 32)]
    return splits + [one(f"p = {p}, c_s = 8", 8, p) for p in (1, 2, 4)]


# KerDEQ, the earlier version of GEQ: Tables 1–3, Figures 2–4.


def _kerdeq_large() -> list[Cell]:
    made: list[Cell] = []
    for row, model, title, *numbers in printed("kerdeq-table2"):
        # Patches of 4 pixels want maps that 4 divides: larger images where CIFAR stands in.
        pixels = 128 if model.startswith("kerdeq") else 64
        made += imagenet_cells(row, model, numbers, title, title.lower(), pixels)
    return made


def _known_unknown(row: str, model: str, accuracy: str, known: str, unknown: str) -> list[Cell]:
    return cells(
        row,
        one_branch(model),
        ("accuracy in %", "known.accuracy", accuracy),
        ("known KL", "known.kl", known),
        ("unknown KL", "unknown.kl", unknown),
    )


def _gamma(value: float, data: str) -> Job:
    if value == 0.5:  # the paper's choice is the network of the tables
        return cifar("kerdeq_cifar_5m", data)
    policy = {"kind": "FixedGamma", "value": value}
    return cifar("kerdeq_cifar_5m", data, tag=f"gamma-{value:g}", options={"gamma": policy})


CELLS = {
    "geq-table1": _cifar_cells(),
    "geq-table2": _large_cells(),
    "geq-table3": [
        *_superclass("MOptEqs", "mopteq_cifar_8m", "80.1 ± 0.3%", "77.4 ± 0.5%"),
        *_superclass("GEQ", "geq_cifar_8m", "80.9 ± 0.2%", "80.1 ± 0.6%"),
    ],
    "geq-table5": [
        cell
        for row, model, text, change in printed("geq-table5")
        for cell in sized(row, "CIFAR-100", cifar(model, "cifar100", **change), "8M", text)
    ],
    "geq-figure2": corruption_cells(
        {
            "GEQ 8M": "geq_cifar_8m",
            "MOptEqs 8M": "mopteq_cifar_8m",
            "GEQ 5M": "geq_cifar_5m",
            "MOptEqs 5M": "mopteq_cifar_5m",
            "ResNet-18": "resnet18_cifar",
            "GEQ stack 8M (ours)": "geq_stack_cifar_8m",
        }
    ),
    "geq-figure3": [
        *_saliency("MOptEqs", "mopteq_imagenet_13m"),
        *_saliency("GEQ", "geq_imagenet_13m"),
    ],
    "geq-figure4": patch_cells("geq_cifar_5m"),
    "kerdeq-table1": [
        cell
        for row, model, size, *texts in printed("kerdeq-table1")
        for (title, data), text in zip(_BOTH, texts, strict=True)
        for cell in sized(row, title, cifar(model, data), size, text)
    ],
    "kerdeq-table2": _kerdeq_large(),
    "kerdeq-table3": [
        *_known_unknown("OptEq", "mopteq_cifar_5m", "90.56%", "0.38", "1.51"),
        *_known_unknown("KerDEQ", "kerdeq_cifar_5m", "92.42%", "0.306", "1.21"),
    ],
    "kerdeq-figure2": corruption_cells(
        {
            "KerDEQ 8M": "kerdeq_cifar_8m",
            "MOptEq 8M": "mopteq_cifar_8m",
            "KerDEQ 5M": "kerdeq_cifar_5m",
            "MOptEq 5M": "mopteq_cifar_5m",
            "ResNet-18": "resnet18_cifar",
        }
    ),
    "kerdeq-figure3": [
        Cell(row=f"γ = {value:g}", column=f"{title}, accuracy in %", job=_gamma(value, data))
        for value in (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
        for title, data in _BOTH
    ],
    "kerdeq-figure4": patch_cells("kerdeq_cifar_5m"),
}
