"""A reproduced table for the terminal: what has numbers of ours, and in a sentence what has none.

A line for each row and a column for each of its columns where the terminal is wide enough; a line
for each cell, under the name of its row, where it is not.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any

from .results import MEASURED, SMOKE, CellResult, Result
from .tables import caption, heading, pair, rows_of, unsettled

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Shown"]

_HEADS = (60, 24, 16, 12, 0)  # widths that a heading may be wrapped to; no word is cut
_NAMES = (60, 26)  # the same of a row's name
_FEW = 3  # rows that are named beside a column
_NOTEBOOK = 160  # characters of a line
_EDGES = 3  # a column's: a space on each side, and a line


class Shown:
    """For ``Console.print``: it looks at the width of the console."""

    def __init__(self, result: Result) -> None:
        self.result = result
        measured = {found.cell.row for found in result.cells if found.samples}
        self.rows = [row for row in result.experiment.rows if row in measured]
        self.cells = {(found.cell.row, found.cell.column): found for found in result.cells}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(heading(self.result), style="bold")
        if self.rows:
            yield self._wide(options.max_width) or self._long(options.max_width)
        yield Text(self._caption(), style="dim")
        for remark in (*self._absent(), *self._partial(), *unsettled(self.result)):
            yield Text(f"- {remark}")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """What a notebook shows."""
        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=_NOTEBOOK, force_jupyter=False)
        console.print(self)
        plain = console.export_text(clear=False)
        page = '<pre style="white-space:pre;overflow-x:auto">{code}</pre>'
        return {
            "text/plain": plain,
            "text/html": console.export_html(inline_styles=True, code_format=page),
        }

    def _wide(self, room: int) -> Any:
        """A line a row; None where numbers would have to be cut."""
        given = {f.cell.column for row in self.rows for f in self._of(row) if _has_number(f)}
        columns = [one for one in self.result.experiment.columns if one in given]
        texts = [[pair(self.cells.get((row, one))) for row in self.rows] for one in columns]
        for name_width in _NAMES:
            names = [_wrapped(row, name_width, "  ") for row in self.rows]
            for head_width in _HEADS:
                heads = [_wrapped(one, head_width) for one in columns]
                grid = list(zip(["", *heads], [names, *texts], strict=True))
                if sum(_width([head, *below]) + _EDGES for head, below in grid) < room:
                    return _grid(grid)
        return None

    def _long(self, room: int) -> Any:
        """A line a cell, under the names of the rows; two where its number leaves no room."""
        from rich.table import Table
        from rich.text import Text

        cells = {row: [f for f in self._of(row) if _has_number(f)] for row in self.rows}
        numbers = _width([pair(found) for each in cells.values() for found in each])
        names = _width([found.cell.column for each in cells.values() for found in each])
        beside = numbers + 2 * _EDGES + min(names, _NAMES[-1]) < room
        table = Table()
        table.add_column("what", overflow="fold")
        if beside:
            table.add_column("ours / paper", justify="right", no_wrap=True)
        for row, each in cells.items():
            table.add_section()
            table.add_row(Text(row, style="bold"))
            for found in each:
                texts = [Text(found.cell.column), Text(pair(found), justify="right")]
                for line in [texts] if beside else [[text] for text in texts]:
                    table.add_row(*line)
        return table

    def _of(self, row: str) -> list[CellResult]:
        return [found for found in self.result.cells if found.cell.row == row]

    def _caption(self) -> str:
        beside = any(found.cell.published for row in self.rows for found in self._of(row))
        return f"{'ours / paper; ' if beside else ''}{caption(self.result)}"

    def _partial(self) -> list[str]:
        """What is to be said of single cells of the rows that are shown, by column."""
        said: dict[str, dict[str, list[str]]] = {}
        for row, column, _, _, state in rows_of(self.result):
            if row in self.rows and state not in (MEASURED, SMOKE):
                said.setdefault(_said(state), {}).setdefault(column, []).append(row)
        return [
            f"{state}, of the rows above: {'; '.join(starmap(self._part, places.items()))}."
            for state, places in said.items()
        ]

    def _part(self, column: str, rows: list[str]) -> str:
        """The column, with its rows where they are not all."""
        whole = sum((row, column) in self.cells for row in self.rows)
        if len(rows) == whole:
            return column
        return f"{column} ({_listed(rows) if len(rows) <= _FEW else f'{len(rows)} of {whole}'})"

    def _absent(self) -> list[str]:
        """The rows of which nothing is ours, by the reason."""
        states: dict[str, dict[str, None]] = {}
        for row, _, _, _, state in rows_of(self.result):
            if row not in self.rows:
                states.setdefault(row, {})[_said(state)] = None
        reasons: dict[str, list[str]] = {}
        for row, why in states.items():
            reasons.setdefault("; ".join(why), []).append(row)
        return [f"{why}: {_listed(rows)}." for why, rows in reasons.items()]


def _has_number(found: CellResult) -> bool:
    """Of ours or of the paper."""
    return bool(found.samples) or found.cell.published is not None


def _said(state: str) -> str:
    """``not run (no run folder has it)``: what follows is names."""
    head, _, why = state.partition(": ")
    return f"{head} ({why})" if why else head


def _listed(names: Sequence[str]) -> str:
    return ("; " if any("," in name for name in names) else ", ").join(names)


def _wrapped(text: str, width: int, indent: str = "") -> str:
    """In lines of this width, or of the longest word."""
    longest = max(map(len, text.split()), default=1) + len(indent)
    return textwrap.fill(
        text, max(width, longest), subsequent_indent=indent, break_on_hyphens=False
    )


def _width(texts: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max((cell_len(line) for text in texts for line in text.splitlines()), default=0)


def _grid(columns: Sequence[tuple[str, Sequence[str]]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for number, (head, _) in enumerate(columns):
        table.add_column(Text(head), justify="right" if number else "left", no_wrap=True)
    for texts in zip(*(below for _, below in columns), strict=True):
        table.add_row(*map(Text, texts))
    return table
