"""The cells of our studies: what carries a stack of GEQ layers, and what closed the gap."""

from __future__ import annotations

import dataclasses
from typing import Any

from .experiment import Cell, Job, cells
from .recipes import cifar


def _steps(count: int) -> dict[str, Any]:
    """``count`` steps of the certificate's size, and at most as many terms of the series back."""
    solver = {"kind": "ProximalGradient", "rtol": 0.0, "atol": 0.0, "accelerate": False}
    adjoint = {"kind": "Phantom", "damping": 1.0, "form": "neumann"}
    return {
        "solver": {**solver, "max_steps": count},
        "adjoint": {**adjoint, "steps": min(count, 3)},
    }


def _patch(channels: int, size: int) -> dict[str, Any]:
    return {"patch": {"kind": "Patches", "channels": channels, "size": size}}


def _bound(value: float) -> dict[str, Any]:
    return {"constraint": {"kind": "NormBounded", "bound": value}}


def _gamma(scale: float) -> dict[str, Any]:
    return {"gamma": {"kind": "MeanPatchEnergy", "scale": scale}}


def _cells(*rows: tuple[str, Job]) -> list[Cell]:
    made: list[Cell] = []
    for row, job in rows:
        held_out = dataclasses.replace(job, measures=("quality", "held out"))
        made += cells(row, job, ("size in M", "parameters_m"))
        made += cells(row, held_out, ("CIFAR-10, held-out images, in %", "held_out.accuracy"))
        made += cells(row, job, ("CIFAR-10, test images, in %", "accuracy"))
    return made


_FIVE, _THREE = "geq_stack_cifar_5m", "geq_stack_cifar_3m"
_AUGMENT = ["crop", "flip"]
# Patches of 32 channels want as many.
_TINY = {"widths": [32, 32], "depth": 1, "hidden": 8, "image_size": 8}


def _changed(tag: str, options: dict[str, Any] | None = None, **recipe: Any) -> Job:
    # A shift wants a second layer.
    tiny = {**_TINY, "depth": 2} if options and options.get("shift") else _TINY
    return cifar(_THREE, tag=tag, options=options, recipe=recipe, smoke=tiny)


CELLS = {
    "ours-ablation": _cells(
        ("GEQ stack 5M, four steps", cifar(_FIVE)),
        ("one step", cifar(_FIVE, tag="steps-1", options=_steps(1))),
        ("two steps", cifar(_FIVE, tag="steps-2", options=_steps(2))),
        ("eight steps", cifar(_FIVE, tag="steps-8", options=_steps(8))),
        ("linear kernel: OptEq stack", cifar("opteq_stack_cifar_5m")),
        ("two convolutions: explicit twin", cifar("explicit_stack_cifar_5m")),
    ),
    "ours-stack": _cells(
        ("GEQ stack 3M", cifar(_THREE)),
        ("explicit twin", cifar("explicit_stack_cifar_3m")),
        ("‖W‖ ≤ 0.95 (1.2)", _changed("bound-0.95", _bound(0.95))),
        ("‖W‖ ≤ 1.45", _changed("bound-1.45", _bound(1.45))),
        ("γ = 0.05/mean energy (0.2)", _changed("gamma-0.05", _gamma(0.05))),
        ("γ = 0.5/mean energy", _changed("gamma-0.5", _gamma(0.5))),
        ("patches of 1 pixel, 32 channels (2, 8)", _changed("patch-32-1", _patch(32, 1))),
        ("patches of 2 pixels, 4 channels", _changed("patch-4-2", _patch(4, 2))),
        ("patches of 2 pixels, 16 channels", _changed("patch-16-2", _patch(16, 2))),
        ("norm after the layer (before)", _changed("norm-after", {"norm": "after"})),
        ("norm before and after", _changed("norm-both", {"norm": "both"})),
        ("patches shifted in every second layer", _changed("shift", {"shift": True})),
        ("no cutout (16)", _changed("no-cutout", augment=_AUGMENT)),
        ("cutout 8", _changed("cutout-8", augment=[*_AUGMENT, {"cutout": {"size": 8}}])),
        ("cutmix for cutout", _changed("cutmix", augment=[*_AUGMENT, "cutmix"])),
        ("no label smoothing (0.1)", _changed("no-smoothing", label_smoothing=0.0)),
        ("running average of the weights", _changed("ema", ema=0.998)),
        ("weight decay 1e-3 (5e-4)", _changed("decay-1e-3", weight_decay=1e-3)),
        ("rate 0.1 (0.2)", _changed("rate-0.1", lr=0.1)),
        ("rate 0.4", _changed("rate-0.4", lr=0.4)),
        ("norms and biases do not decay", _changed("no-norm-decay", decay_norms=False)),
    ),
}
