"""Reproduced tables for people: for the terminal (rich), as Markdown, and as pictures."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from equilibria_papers.theory import pictures

from .results import MEASURED, NOT_RUN, CellResult, Result, largest, result_path

_NAMED = 4  # places that a remark names
UNSETTLED = 0.1
"""A relative residual above which a state is not near its equilibrium."""


def _state(found: CellResult) -> str:
    if found.status == MEASURED:
        return MEASURED + (f": {found.cell.note}" if found.cell.note else "")
    if found.outdated:
        return f"{found.status}: measured by an earlier recipe"
    if found.samples:
        return f"{found.status}: {found.samples[0].stands_in}"
    if found.status == NOT_RUN and found.why:
        return f"{NOT_RUN}: {found.why}"
    return f"{found.status}{': ' if found.cell.note else ''}{found.cell.note}"


def heading(result: Result) -> str:
    """The paper, the id and what the table is of."""
    smoke = "SMOKE TEST, NO RESULT: " if result.smoke else ""
    return f"{smoke}{result.experiment.paper}, {result.experiment.id}: {result.experiment.title}"


def markdown(result: Result) -> str:
    """The page that stands beside the JSON."""
    experiment, made = result.experiment, result.made_by
    origins = [sample.made_by for cell in result.cells for sample in cell.samples]
    commands = sorted({str(by.get("command", "unknown")) for by in origins})
    machines = {
        f"{by.get('device', 'an unknown machine')}, torch {by.get('torch', '?')}, commit "
        f"{by.get('commit', 'unknown')}"
        for by in origins
    }
    lines = [f"# {heading(result)}", ""]
    if result.smoke:
        lines += [
            "Tiny networks, a few hundred digits, two epochs: this shows that the code runs. The "
            "numbers under *ours* mean nothing.",
            "",
        ]
    lines += [f"Paper: {experiment.source}.", ""]
    if experiment.claim:
        lines += [f"The paper's reading: {experiment.claim}", ""]
    change = f", by a changed recipe: {result.change}" if result.change else ""
    lines += [f"State: **{result.status}**{change}. Seeds: {', '.join(map(str, result.seeds))}."]
    lines += ["", *_wide(result), ""]
    lines += ["Ours / the paper's; ours is mean ± standard deviation (number of seeds).", ""]
    lines += [*_remarks(result), ""]
    pictures = [name for name in result.files if name.endswith(".png")]
    lines += [line for name in pictures for line in (f"![{name}]({name})", "")]
    if result.change and experiment.notes:
        lines += [f"The notes speak of the recipe as declared; here {result.change}:", ""]
    lines += [f"- {note}" for note in experiment.notes]
    lines += [
        "",
        f"Numbers from {'; '.join(sorted(machines)) or 'nowhere yet'}; {result.seconds:,.0f} s of "
        "training and measuring, longer where trainings ran side by side. They were made by:",
        "",
        *(f"- `{command}`" for command in commands),
        "",
        f"Written by `{made.get('command', '')}`, commit {made.get('commit', 'unknown')}, "
        f"equilibria {made.get('version', '')}, {made.get('date', '')}.",
        "",
    ]
    return "\n".join(lines)


def _wide(result: Result) -> list[str]:
    """A line for each row of the table, a column for each of its columns: ours / the paper's."""
    columns = result.experiment.columns
    found = {(one.cell.row, one.cell.column): one for one in result.cells}
    lines = [f"| | {' | '.join(map(_cell, columns))} |", "|---|" + "---:|" * len(columns)]
    for row in result.experiment.rows:
        texts = [pair(found.get((row, column))) for column in columns]
        lines.append(f"| {_cell(row)} | {' | '.join(map(_cell, texts))} |")
    return lines


def pair(found: CellResult | None) -> str:
    """``94.90 / 94.8 ± 0.1%``: ours / the paper's; empty where the table has no cell."""
    if found is None:
        return ""
    paper = "" if found.cell.published is None else f" / {found.cell.paper}"
    return f"{found.ours}{paper}"


def _remarks(result: Result) -> list[str]:
    """What is to be said of cells: why there is no number, whose data, notes; each once."""
    said: dict[str, list[str]] = {}
    for found in result.cells:
        state = _state(found)
        if state != MEASURED and not (result.smoke and found.samples):
            said.setdefault(state, []).append(f"{found.cell.row}, {found.cell.column}")
    remarks = []
    for state, places in said.items():
        more = len(places) - _NAMED
        end = f"; and {more} more." if more > 0 else "."
        remarks.append(f"{state}: {_cell('; '.join(places[:_NAMED]) + end)}")
    return [f"- {remark}" for remark in (*remarks, *unsettled(result))]


def unsettled(result: Result) -> list[str]:
    """A line on the trainings whose last step still moves the state, where there are such."""
    if result.smoke:
        return []
    seen: dict[str, list[float]] = {}
    for found in result.cells:
        if found.cell.job is not None and found.residual is not None:
            seen.setdefault(found.cell.job.name, []).append(found.residual)
    worst = {name: largest(residuals) for name, residuals in seen.items()}
    far = {name: r for name, r in worst.items() if r is not None and not r <= UNSETTLED}
    if not far:
        return []
    named = "; ".join(f"{name} ({residual:.2g})" for name, residual in far.items())
    return [
        "not at their equilibrium; the last step still moved the state (by this share of it, the "
        f"median over the test images): {_cell(named)}."
    ]


def _cell(text: str) -> str:
    """Text that does not end a column of a Markdown table."""
    return text.replace("|", "\\|")


# For the terminal.


def number_table(rows: Iterable[Sequence[str]], *titles: str) -> Table:
    """A line for each number: what it is, and the texts of the columns."""
    numbers = [Column(title, justify="right", overflow="fold") for title in titles]
    table = Table(Column(overflow="fold"), *numbers)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def rich_table(result: Result) -> Group:
    """For ``Console.print``: the numbers that were measured or are quoted, and the remarks."""
    change = f" Changed recipe: {result.change}." if result.change else ""
    state = f"{result.status}; {result.seconds:,.0f} s of training and measuring.{change}"
    shown = [found for found in result.cells if found.samples or found.cell.job is None]
    rows = [(found.cell.name, found.cell.paper, found.ours) for found in shown]
    return Group(
        Text(heading(result), style="bold"),
        *([number_table(rows, "paper", "ours")] if any(f.samples for f in shown) else ()),
        Text(state, style="dim"),
        *map(Text, _remarks(result)),
    )


# A figure of a paper from our numbers: lines or bars, one color a column.


def draw(result: Result, folder: Path) -> Result:
    """Save the picture beside the table, where any cell was measured; the result names it."""
    columns: dict[str, list[CellResult]] = {}
    for cell in result.cells:
        if cell.samples:
            columns.setdefault(cell.cell.column, []).append(cell)
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
    axes.bar(places, means, width, yerr=spread, color=pictures.look(number)["color"], label=label)


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
            label=label,
            **pictures.look(number),
        )
        label = ""


def _varied(row: str) -> str:
    """``γ`` of the row "γ = 0.5"; rows that name no quantity vary the same."""
    return row.split(" = ")[0] if " = " in row else ""


# What measures draw into a run's folder and what a figure of a paper shows; the corruptions' own
# picture is left there, for the figure has all networks in one.
_DRAWN = ("residuals", "paths", "training_paths", "landscape", "test_landscape", "gradcam")


def copy_pictures(result: Result, runs: Iterable[tuple[str, Path]], folder: Path) -> Result:
    """Put what was drawn for the jobs (name, run folder) beside the table; the result names it."""
    stem = result_path(folder, result.experiment.id, result.smoke, result.change).with_suffix("")
    names = []
    for job, run in dict(runs).items():
        for found in (run / f"{name}.png" for name in _DRAWN):
            if found.exists():
                stem.parent.mkdir(parents=True, exist_ok=True)
                names.append(f"{stem.name}--{job}--{found.name}")
                shutil.copyfile(found, stem.parent / names[-1])
    return dataclasses.replace(result, files=(*result.files, *names))
