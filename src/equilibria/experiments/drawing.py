"""A figure of a paper from our numbers: lines or bars, one color a column."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path

from equilibria.theory import pictures

from .results import CellResult, Result, result_path

__all__ = ["copy_pictures", "draw"]


def draw(result: Result, folder: Path) -> Result:
    """Save the picture beside the table, where any cell was measured; the result names it."""
    columns = _columns(result)
    if not columns:
        return result
    rows = result.experiment.rows
    figure = pictures.new_figure(max(5.2, 0.45 * len(rows) + 2.0), 4.2)
    axes = figure.subplots()
    for number, (column, cells) in enumerate(columns.items()):
        color = pictures.COLORS[number % len(pictures.COLORS)]
        places = [rows.index(found.cell.row) for found in cells]
        means = [found.mean or 0.0 for found in cells]
        spread = [found.std or 0.0 for found in cells]
        if result.experiment.picture == "bars":
            width = 0.8 / len(columns)
            shifted = [p + width * (number - (len(columns) - 1) / 2) for p in places]
            axes.bar(shifted, means, width, yerr=spread, color=color, label=column)
        else:
            marker = pictures.MARKERS[number % len(pictures.MARKERS)]
            style = pictures.STYLES[number % len(pictures.STYLES)]
            axes.errorbar(
                places, means, spread, color=color, marker=marker, linestyle=style, label=column
            )
    axes.set_xticks(range(len(rows)), rows, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("ours")
    axes.legend(fontsize=7)
    change = f" ({result.change})" if result.change else ""
    axes.set_title(f"{result.experiment.id}: {result.status}{change}", fontsize=8)
    stem = result_path(folder, result.experiment.id, result.smoke, result.change)
    written = pictures.save_picture(figure, stem.with_suffix(""))
    return dataclasses.replace(result, files=tuple(path.name for path in written))


# What measures draw into a run's folder and what a figure of a paper shows; the corruptions' own
# picture is left there, for the figure has all networks in one.
_DRAWN = ("paths.png", "training_paths.png", "landscape.png", "gradcam.png")


def copy_pictures(result: Result, runs: Iterable[tuple[str, Path]], folder: Path) -> Result:
    """Put what was drawn for the jobs (name, run folder) beside the table; the result names it."""
    stem = result_path(folder, result.experiment.id, result.smoke, result.change).with_suffix("")
    names = []
    for job, run in dict(runs).items():
        for found in (run / name for name in _DRAWN):
            if found.exists():
                stem.parent.mkdir(parents=True, exist_ok=True)
                names.append(f"{stem.name}--{job}--{found.name}")
                shutil.copyfile(found, stem.parent / names[-1])
    return dataclasses.replace(result, files=(*result.files, *names))


def _columns(result: Result) -> dict[str, list[CellResult]]:
    """Measured cells by column."""
    found: dict[str, list[CellResult]] = {}
    for cell in result.cells:
        if cell.samples:
            found.setdefault(cell.cell.column, []).append(cell)
    return found
