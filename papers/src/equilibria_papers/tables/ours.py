"""The cells of our studies: what carries a stack of GEQ layers, and what closed the gap."""

from __future__ import annotations

import dataclasses
from typing import Any

from .experiment import Cell, cells, printed
from .recipes import CIFAR, cifar

# Patches of 32 channels want as many.
_TINY = {"widths": [32, 32], "depth": 1, "hidden": 8, "image_size": 8}


def _cells(name: str, tiny: dict[str, Any] | None = None) -> list[Cell]:
    """The rows of papers.toml; ``tiny`` is what makes a changed network small."""
    made: list[Cell] = []
    for row, model, tag, options, recipe in printed(name):
        # A shift wants a second layer.
        smoke = {**tiny, "depth": 2} if tiny and options.get("shift") else tiny
        recipe = {"validation": CIFAR["validation"], **recipe}  # choices need images held out
        one = cifar(model, tag=tag, options=options, recipe=recipe, smoke=smoke if tag else None)
        held_out = dataclasses.replace(one, measures=("quality", "held out"))
        made += cells(row, one, ("size in M", "parameters_m"))
        made += cells(row, held_out, ("CIFAR-10, held-out images, in %", "held_out.accuracy"))
        made += cells(row, one, ("CIFAR-10, test images, in %", "accuracy"))
    return made


CELLS = {
    "ours-ablation": _cells("ours-ablation"),
    "ours-kernels": _cells("ours-kernels"),
    "ours-stack": _cells("ours-stack", _TINY),
}
