"""Pictures made to be put in a paper: PNG and SVG, legible in print, safe for color-blind eyes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

# Okabe and Ito's palette, in the order in which its colors stay apart in gray too.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#F0E442")
GRAY = "#666666"
SEQUENTIAL = "viridis"
# A second cue beside the color, for print in gray.
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def look(i: int, *, marker: bool = True) -> dict[str, Any]:
    """Color, line style and marker of the i-th line of a picture."""
    found = {"color": COLORS[i % len(COLORS)], "linestyle": STYLES[i % len(STYLES)]}
    return found | ({"marker": MARKERS[i % len(MARKERS)]} if marker else {})


def new_figure(width: float = 5.2, height: float = 3.6) -> Any:
    """An empty figure of this size in inches (5.2 is a text column's width)."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no window, no state shared with the user's plots
    return figure


def save_picture(figure: Any, stem: Path) -> list[Path]:
    """Write ``stem.png`` (300 dpi) and ``stem.svg`` (text as text); the two paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix in (".png", ".svg"):
        path = stem.with_name(stem.name + suffix)
        # A fixed salt and no date: the same data make the same file.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "equilibria"}):
            kept = {"Date": None} if suffix == ".svg" else {"Software": "equilibria"}
            figure.savefig(path, dpi=300, metadata=kept)
        written.append(path)
    return written


def on_log_axis(values: Iterable[float | None]) -> list[float]:
    """NaN, which is not drawn, for what a logarithmic axis cannot show."""
    return [math.nan if v is None or not math.isfinite(v) or v <= 0.0 else float(v) for v in values]


def plain_ticks(axes: Any) -> None:
    """Plain numbers on a logarithmic y axis that shows fewer than two powers of ten.

    Matplotlib labels such an axis at 2.9 × 10⁰, 3 × 10⁰, …; to be called when all is drawn.
    """
    low, high = sorted(axes.get_ylim())
    if axes.get_yscale() != "log" or low <= 0.0:
        return
    powers = [t for t in LogLocator(10.0).tick_values(low, high) if low <= t <= high]
    if len(powers) >= 2:
        return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%.6g"))
    axes.yaxis.set_minor_locator(NullLocator())
