"""The cells of KerDEQ, the earlier version of GEQ: Tables 1–3, Figures 2–4."""

from __future__ import annotations

from .experiment import Cell, Job, cells, printed
from .geq import corruption_cells, imagenet_cells, patch_cells, sized
from .recipes import cifar, one_branch


def _cifar_cells() -> list[Cell]:
    made: list[Cell] = []
    for row, model, size, ten, hundred in printed("kerdeq-table1"):
        made += sized(row, "CIFAR-10", cifar(model), size, ten)
        made += sized(row, "CIFAR-100", cifar(model, "cifar100"), size, hundred)
    return made


def _large_cells() -> list[Cell]:
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
    "kerdeq-table1": _cifar_cells(),
    "kerdeq-table2": _large_cells(),
    "kerdeq-table3": [
        *_known_unknown("OptEq", "mopteq_cifar_5m", "90.56%", "0.38", "1.51"),
        *_known_unknown("KerDEQ", "kerdeq_cifar_5m", "92.42%", "0.306", "1.21"),
    ],
    "kerdeq-figure2": corruption_cells(
        {
            "KerDEQ 8M": "kerdeq_cifar_8m",
            "MOptEq 8M": "mopteq_cifar_8m",
            "ResNet-18": "resnet18_cifar",
        }
    ),
    "kerdeq-figure3": [
        Cell(row=f"γ = {value:g}", column=f"{title}, accuracy in %", job=_gamma(value, data))
        for value in (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
        for title, data in (("CIFAR-10", "cifar10"), ("CIFAR-100", "cifar100"))
    ],
    "kerdeq-figure4": patch_cells("kerdeq_cifar_5m"),
}
