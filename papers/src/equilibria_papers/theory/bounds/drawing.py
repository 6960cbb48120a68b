"""Curves as a picture: one panel each, one color a layer, one line style a kind of number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from equilibria_papers.theory.pictures import COLORS, MARKERS, new_figure
from equilibria_papers.theory.scales import plain_ticks

from .curves import Curves

__all__ = ["draw_curves"]

_STYLE = {"printed": "--", "derived": ":", "ours": "-", "ours, other": "-."}
_FAMILY = {"GEQ": 0, "OptEq": 4}


def draw_curves(panels: Sequence[Curves], *, width: float = 5.2, height: float = 4.4) -> Any:
    """A figure with one panel a ``Curves``, values on a logarithmic axis; a legend below each.

    A value of zero, which such an axis lacks, stands at its bottom, marked "0": a bound's as a
    hollow ▽, a measured one as the line's own marker.
    """
    if not panels:
        raise ValueError("draw_curves needs one panel or more.")
    figure = new_figure(width * len(panels), height)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for line in panel.lines:
            number = _FAMILY.get(line.family, 2)
            values = [_drawn(v) for v in line.values]
            if all(math.isnan(v) for v in values):
                continue
            measured = line.role == "measured"
            axes.plot(
                panel.x,
                values,
                color=COLORS[number],
                linestyle="none" if measured else _STYLE[line.role],
                marker=MARKERS[number % len(MARKERS)] if measured else None,
                markersize=4,
                linewidth=1.4,
                label=line.label,
            )
        axes.set_yscale("log")
        plain_ticks(axes)
        _zeros(axes, panel)
        axes.set_xlabel(panel.axis)
        axes.set_ylabel(panel.unit)
        axes.set_title(panel.title, fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.legend(
            fontsize=7, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2)
        )
    return figure


def _zeros(axes: Any, panel: Curves) -> None:
    """Marks at the bottom where a line is zero; several at one place stand side by side."""
    from matplotlib.transforms import ScaledTranslation

    if not any(value == 0.0 for line in panel.lines for value in line.values):
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** 0.12, high)  # room below all points
    taken: dict[float, int] = {}
    for line in panel.lines:
        number = _FAMILY.get(line.family, 2)
        color = COLORS[number]
        measured = line.role == "measured"
        look: dict[str, Any] = {
            "color": color,
            "marker": MARKERS[number % len(MARKERS)] if measured else "v",
            "markerfacecolor": color if measured else "white",
            "markersize": 4 if measured else 6,
            "linestyle": "none",
        }
        for x, value in zip(panel.x, line.values, strict=True):
            if value != 0.0:
                continue
            place = taken.setdefault(x, 0)
            taken[x] += 1
            # In points from the place itself: the size of the panel does not matter.
            aside = ScaledTranslation(-10 * place / 72, 4 / 72, axes.figure.dpi_scale_trans)
            at = axes.get_xaxis_transform() + aside
            axes.plot([x], [0.0], transform=at, **look)
            words = {"ha": "center", "va": "bottom", "fontsize": 7, "color": color}
            axes.annotate(
                "0", (x, 0.0), xycoords=at, xytext=(0, 4), textcoords="offset points", **words
            )


def _drawn(value: float | None) -> float:
    """NaN where there is no number, or none that a logarithm has."""
    return math.nan if value is None or not math.isfinite(value) or value <= 0.0 else value
