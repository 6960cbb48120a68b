"""Pictures made to be put in a paper: PNG and SVG, legible in print, safe for color-blind eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .extras import matplotlib_figure

__all__ = ["COLORS", "GRAY", "MARKERS", "SEQUENTIAL", "STYLES", "new_figure", "save_picture"]

# Okabe and Ito's palette, in the order in which its colors stay apart in gray too.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#F0E442")
GRAY = "#666666"
SEQUENTIAL = "viridis"
# A second cue beside the color, for print in gray.
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def new_figure(width: float = 5.2, height: float = 3.6) -> Any:
    """An empty figure of this size in inches (5.2 is a text column's width)."""
    return matplotlib_figure(width, height)


def save_picture(figure: Any, stem: Path) -> list[Path]:
    """Write ``stem.png`` (300 dpi) and ``stem.svg`` (text as text); the two paths."""
    from matplotlib import rc_context

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
