"""A figure of a paper from our numbers: lines or bars, one color a column."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from equilibria_papers.theory import pictures

from .results import CellResult, Result, result_path


def draw(result: Result, folder: Path) -> Result:
    """Save the picture beside the table, where any cell was measured; the result names it."""
    columns = _columns(result)
    if not columns:
        return result
    rows = result.experiment.rows
    figure = pictures.new_figure(max(5.2, 0.45 * len(rows) + 2.0), 4.2)
    axes = figure.subplots()
    for number, (column, cells) in enumerate(columns.items()):
        label = column + _instead(cells)
        if result.experiment.picture == "bars":
            _bars(axes, rows, cells, label, number, len(columns))
        else:
            _lines(axes, rows, cells, label, number)
    axes.set_xticks(range(len(rows)), rows, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("ours")
    axes.legend(fontsize=7)
    change = f" ({result.change})" if result.change else ""
    axes.set_title(f"{result.experiment.id}: {result.status}{change}", fontsize=8)
    stem = result_path(folder, result.experiment.id, result.smoke, result.change)
    written = pictures.save_picture(figure, stem.with_suffix(""))
    return dataclasses.replace(result, files=tuple(path.name for path in written))


def _instead(cells: Sequence[CellResult]) -> str:
    names = {sample.stands_in for cell in cells for sample in cell.samples if sample.stands_in}
    return f" ({', '.join(sorted(names))} stands in)" if names else ""


def _bars(
    axes: Any, rows: Sequence[str], cells: Sequence[CellResult], label: str, number: int, count: int
) -> None:
    width = 0.8 / count
    shift = width * (number - (count - 1) / 2)
    places = [rows.index(found.cell.row) + shift for found in cells]
    means, spread = zip(*((found.mean, found.std or 0.0) for found in cells), strict=True)
    axes.bar(places, means, width, yerr=spread, color=_pick(pictures.COLORS, number), label=label)


def _lines(
    axes: Any, rows: Sequence[str], cells: Sequence[CellResult], label: str, number: int
) -> None:
    """A line for each quantity that the rows vary; none through a row without a number."""
    found = {cell.cell.row: cell for cell in cells}
    for quantity in dict.fromkeys(_varied(row) for row in rows):
        mine = [row for row in rows if _varied(row) == quantity]
        means = [found[row].mean if row in found else math.nan for row in mine]
        spread = [(found[row].std or 0.0) if row in found else 0.0 for row in mine]
        axes.errorbar(
            [rows.index(row) for row in mine],
            means,
            spread,
            color=_pick(pictures.COLORS, number),
            marker=_pick(pictures.MARKERS, number),
            linestyle=_pick(pictures.STYLES, number),
            label=label,
        )
        label = ""


def _varied(row: str) -> str:
    """``γ`` of the row "γ = 0.5"; rows that name no quantity vary the same."""
    return row.split(" = ")[0] if " = " in row else ""


def _pick(values: Sequence[Any], number: int) -> Any:
    return values[number % len(values)]


# What measures draw into a run's folder and what a figure of a paper shows; the corruptions' own
# picture is left there, for the figure has all networks in one.
_DRAWN = (
    "paths.png",
    "training_paths.png",
    "landscape.png",
    "test_landscape.png",
    "gradcam.png",
)


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
