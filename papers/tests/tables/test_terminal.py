"""The table in the terminal: every number in it is whole, and what has none is a sentence."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from equilibria_papers.tables import Cell, Experiment, Published
from equilibria_papers.tables.registry import EXPERIMENTS
from equilibria_papers.tables.results import CellResult, Result, Sample
from equilibria_papers.tables.tables import Shown, rich_table

from . import tiny


def shown(result: Result, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(rich_table(result))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def sample(value: float, seed: int = 0, stands_in: str = "") -> Sample:
    return Sample(seed, value, "a", 10.0, {}, stands_in)


def result(cells: list[CellResult], **changes: bool) -> Result:
    table = dataclasses.replace(tiny.table(), cells=tuple(one.cell for one in cells))
    return Result(table, tuple(cells), changes.get("smoke", False), "", {})


def cell(row: str, column: str, value: float | None, why: str = "", paper: str = "") -> CellResult:
    published = Published.read(paper) if paper else None
    made = Cell(row=row, column=column, published=published, job=tiny.job())
    return CellResult(made, () if value is None else (sample(value),), why, "a")


def mixed() -> Result:
    no, far = "no run folder has it", "cifar100 is not at hand"
    return result(
        [
            cell("first", "accuracy in %", 91.5, paper="94.8 ± 0.1%"),
            cell("first", "size in M", 4.25),
            cell("second", "accuracy in %", 92.5),
            cell("second", "size in M", None, no, paper="5M"),
            cell("second", "nowhere", None, no),
            cell("third", "accuracy in %", None, no, paper="95.2%"),
            cell("third", "size in M", None, no),
            cell("fourth", "accuracy in %", None, no),
            cell("fifth", "accuracy in %", None, far),
            cell("sixth", "accuracy in %", None, no),
            cell("sixth", "size in M", None, far),
        ]
    )


def test_a_line_a_row_and_a_sentence_for_rows_without_numbers() -> None:
    lines = shown(mixed(), 120)
    assert [line.split("│")[1:-1] for line in lines if line.startswith("│ ")] == [
        [" first  ", " 91.50 / 94.8 ± 0.1% ", "      4.25 "],
        [" second ", "               92.50 ", "    – / 5M "],
    ]
    (head,) = [line for line in lines if "size in M" in line and "┃" in line]
    assert [part.strip() for part in head.split("┃")[1:-1]] == ["", "accuracy in %", "size in M"]
    after = lines[next(k for k, line in enumerate(lines) if line.startswith("└")) + 1 :]
    assert after == [
        "ours / paper; partly; 10 s of training and measuring.",
        "- not run (no run folder has it): third, fourth.",
        "- not run (cifar100 is not at hand): fifth.",
        "- not run (no run folder has it); not run (cifar100 is not at hand): sixth.",
        "- not run (no run folder has it), of the rows above: size in M (second); nowhere.",
    ]


def test_a_narrow_terminal_has_a_line_a_cell() -> None:
    lines = shown(mixed(), 40)
    inside = [[p.strip() for p in line.split("│")[1:-1]] for line in lines if line[0] == "│"]
    assert inside == [
        ["first", ""],
        ["accuracy in %", "91.50 / 94.8 ± 0.1%"],
        ["size in M", "4.25"],
        ["second", ""],
        ["accuracy in %", "92.50"],
        ["size in M", "– / 5M"],
    ]
    assert max(map(len, lines)) <= 40


def test_where_nothing_was_run_there_is_no_grid() -> None:
    lines = shown(result([cell(name, "x", None, "no run folder has it") for name in "ab"]), 80)
    assert lines == [
        "none, tiny-table: a tiny table",
        "not run; 0 s of training and measuring.",
        "- not run (no run folder has it): a, b.",
    ]


def test_what_stands_in_and_notes_are_said() -> None:
    row = cell("net", "x", 1.5)
    other = dataclasses.replace(row, cell=dataclasses.replace(row.cell, row="own", note="by hand"))
    found = dataclasses.replace(row, samples=(sample(1.5, stands_in="digits"),))
    lines = shown(result([found, other]), 80)
    assert "- stand-in data (digits), of the rows above: x (net)." in lines
    assert "- measured (by hand), of the rows above: x (own)." in lines
    assert not any("- " in line for line in shown(result([found], smoke=True), 80))


def test_names_are_text_and_not_markup_and_commas_do_not_join_names() -> None:
    no = "no run folder has it"
    cells = [cell("[red]", "[b]", 1.5), cell("c = 2, p = 2", "[b]", None, no)]
    text = "\n".join(shown(result([*cells, cell("p", "[b]", None, no)]), 80))
    assert "[red]" in text
    assert "[b]" in text
    assert ": c = 2, p = 2; p." in text


def _full(experiment: Experiment) -> Result:
    """Three seeds in every second row, also where the paper alone has a number."""
    seeds = tuple(sample(94.25 + seed, seed) for seed in range(3))
    kept = experiment.rows[::2]
    cells = (CellResult(c, seeds if c.row in kept else (), "why") for c in experiment.cells)
    return Result(experiment, tuple(cells), False, "epochs=10", {})


@pytest.mark.parametrize("width", [40, 80, 160, 300])
@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_no_number_and_no_name_is_cut_in_any_table(name: str, width: int) -> None:
    made = _full(EXPERIMENTS[name])
    lines = shown(made, width)
    text, words = "\n".join(lines), " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    assert "…" not in text
    kept = [c for c in made.cells if c.samples]
    assert text.count("95.25 ± 1.00 (3)") == len(kept)
    for found in kept:
        if found.cell.published is not None:
            assert f"95.25 ± 1.00 (3) / {found.cell.published.text}" in text
    for row in made.experiment.rows[1::2]:
        assert row in words
    grid = [line for line in lines if line.startswith("│")]
    if width == 300:  # a line a row
        assert len(grid) == len({c.cell.row for c in kept})
    lines_a_cell = 4 if width == 40 else 2
    assert len(lines) < lines_a_cell * len(kept) + 4 * len(made.experiment.rows) + 35


def test_a_notebook_shows_the_table() -> None:
    made = _full(EXPERIMENTS["geq-table1"])
    shows = Shown(made)._repr_mimebundle_()
    assert "ResNet-18" in shows["text/plain"]
    assert shows["text/html"].startswith("<pre")
    assert "95.25 ± 1.00 (3) / 93.5 ± 0.2%" in shows["text/html"]
