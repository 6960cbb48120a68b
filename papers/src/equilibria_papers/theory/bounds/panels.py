"""The pictures of ``equilibria theory bounds``: which curves stand in which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .comparing import Comparison
from .curves import (
    Curves,
    Line,
    lipschitz_curves,
    margin_curves_norm,
    margin_curves_width,
    rescaled,
    similarity_curves,
)
from .demonstration import Demonstration, fresh_pair
from .lipschitz import LipschitzReport
from .measuring import Provable

__all__ = ["demonstration_curves", "network_curves"]

Told = Callable[[str], None]
_WIDTH = 32  # of the layers whose similarity is drawn


def demonstration_curves(
    pair: Sequence[Demonstration],
    *,
    images: int = 32,
    draws: int = 128,
    margin: float = 0.05,
    seed: int = 0,
    told: Told = lambda _: None,
) -> dict[str, list[Curves]]:
    """{"lipschitz", "similarity", "margin"}: the panels of each picture."""
    first = pair[0]
    x = first.x[:images]
    lipschitz = lipschitz_curves([one.layer for one in pair], x, seed=seed, told=told)
    told("similarity over the angle")
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(_WIDTH, _WIDTH, generator=generator, dtype=torch.float64)
    random *= 0.9 / float(torch.linalg.matrix_norm(random, 2))
    mean = torch.full((_WIDTH, _WIDTH), 0.9 / _WIDTH, dtype=torch.float64)
    similarity = [
        similarity_curves(random, draws=draws, seed=seed, title="W random, ‖W‖ = 0.9"),
        similarity_curves(
            mean, draws=draws, seed=seed, title=r"W = 0.9 $\mathbf{1}\,\mathbf{1}^\top$/n"
        ),
    ]
    told("margin bounds")

    def make(width: int) -> list[tuple[Provable, nn.Linear]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = fresh_pair(width)
            made: list[tuple[Provable, nn.Linear]] = []
            for layer in layers:
                # Norms as those of the pair, so that the width alone changes.
                head = nn.Linear(width, 10)
                with torch.no_grad():
                    head.weight *= 0.85 / float(torch.linalg.matrix_norm(head.weight, 2))
                made.append((rescaled(layer, 0.85), head))
        return made

    heads = [(one.layer, one.head) for one in pair]
    return {
        "lipschitz": [lipschitz],
        "similarity": similarity,
        "margin": [
            margin_curves_norm(heads, first.x, first.labels, margin=margin),
            margin_curves_width(make, first.x, first.labels, margin=margin),
        ],
    }


def network_curves(found: Comparison) -> dict[str, list[Curves]]:
    """{"lipschitz"}: printed, ours and measured over the layers of a network, in their order."""
    reports = [r for r in found.reports if isinstance(r, LipschitzReport)]
    lines: list[Line] = []
    for family, gaussian in (("GEQ", True), ("OptEq", False)):
        own: list[Any] = [r if (r.gamma is not None) == gaussian else None for r in reports]
        if not any(own):
            continue
        values = {
            "measured": [None if r is None else r.measured for r in own],
            "Eq 11" if gaussian else "Eq 12": [None if r is None else r.printed for r in own],
            "ours": [None if r is None else r.ours for r in own],
            "ours, local": [None if r is None else r.local for r in own],
        }
        roles = ("measured", "printed", "ours", "ours, other")
        for (label, numbers), role in zip(values.items(), roles, strict=True):
            lines.append(Line(f"{family}, {label}", family, role, tuple(numbers)))  # type: ignore[arg-type]
    axis = tuple(float(i + 1) for i in range(len(reports)))
    title = "Proposition 3, layer by layer"
    return {
        "lipschitz": [Curves(title, "layer", "Lipschitz constant of x → z*", axis, tuple(lines))]
    }
