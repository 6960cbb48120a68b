"""A profile as one picture: where the time goes, and how many steps samples take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equilibria.evaluation.extras import matplotlib_figure
from equilibria.evaluation.solver_statistics import layer_label

from .report import PassProfile, Profile
from .tables import steps_histogram
from .timeline import ADJOINT_MAP, ADJOINT_SOLVER, MAP, SOLVER

__all__ = ["save_profile"]

# Okabe and Ito's colors, with hatches as a second cue for print in gray.
_LOOK = {
    "map": ("#0072B2", ""),
    "solver": ("#E69F00", "//"),
    "adjoint": ("#009E73", ".."),
    "rest": ("#999999", "xx"),
}
_LAYERS = 24
"""Up to how many layers have a bar each."""


def save_profile(profile: Profile, path: Path) -> Path:
    """Bars of the passes, bars of the layers, histogram of the steps."""
    main = profile.main
    histogram = steps_histogram(main)
    layers = sorted(main.layers, key=lambda p: -p.total)[:_LAYERS]
    rows = 1 + bool(layers) + (histogram is not None)
    heights = [1.3, *([0.5 + 0.28 * len(layers)] if layers else []), 1.8][:rows]
    figure = matplotlib_figure(6.4, 1.1 + sum(heights) * 1.25)
    axes = iter(figure.subplots(rows, 1, height_ratios=heights, squeeze=False)[:, 0])
    _passes(next(axes), [p for p in (profile.train, profile.inference) if p is not None])
    if layers:
        _bars(next(axes), main, layers)
    if histogram is not None:
        axis = next(axes)
        steps = histogram.nonzero()[:, 0]
        axis.bar(steps.tolist(), histogram[steps].tolist(), color=_LOOK["map"][0], width=0.9)
        axis.set(xlabel="steps per sample, all layers", ylabel="solves")
        axis.set_xlim(0, 1.05 * int(steps.max()) + 1)
        axis.xaxis.get_major_locator().set_params(integer=True)
    title = f"{profile.model}, batch {main.batch}, {profile.precision}, {profile.device}"
    figure.suptitle(title, fontsize=10)
    partial = path.with_name(path.name + ".part")
    figure.savefig(partial, dpi=150, format="png")
    return partial.replace(path)


def _passes(axis: Any, passes: list[PassProfile]) -> None:
    for place, one in enumerate(passes):
        left = 0.0
        for group, (color, hatch) in _LOOK.items():
            width = 1e3 * one.group(group)
            label = group if place == 0 else None
            axis.barh(
                place, width, left=left, color=color, hatch=hatch, edgecolor="white", label=label
            )
            left += width
        axis.text(left, place, f" {one.images_per_second:,.4g} images/s", va="center", fontsize=8)
    axis.set_yticks(range(len(passes)), [p.kind for p in passes])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds (with marks)")
    axis.margins(x=0.25)
    axis.legend(ncols=4, fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)


def _bars(axis: Any, main: PassProfile, layers: list[Any]) -> None:
    groups = {"map": (MAP,), "solver": (SOLVER,), "adjoint": (ADJOINT_MAP, ADJOINT_SOLVER)}
    for place, layer in enumerate(layers):
        left = 0.0
        for group, parts in groups.items():
            color, hatch = _LOOK[group]
            width = 1e3 * sum(layer.seconds[part] for part in parts)
            axis.barh(place, width, left=left, color=color, hatch=hatch, edgecolor="white")
            left += width
    axis.set_yticks(range(len(layers)), [layer_label(p.name) for p in layers], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(f"milliseconds in a layer's solves, {main.kind}")
