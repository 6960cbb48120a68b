"""Where the commands print: tables to stdout, everything else to stderr."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

# C0 but tab and newline, DEL, C1, marks that change the direction of writing, lone surrogates.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with control characters written out, ESC as ``\\x1b``: a terminal obeys none."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PlainConsole(Console):
    """Prints text as it is: file and class names are not read as markup, emoji or escape codes.

    Cells of tables and all strings pass ``render_str``. Styles are set by ``Text`` and ``style=``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


error_console = PlainConsole(stderr=True)


def output() -> Console:
    """A console on the present stdout: made when needed, so that it can be redirected."""
    return PlainConsole()


def print_table(*columns: Column | str, rows: Iterable[Sequence[str]], **style: Any) -> None:
    table = Table(*columns, **style)
    for row in rows:
        table.add_row(*row)
    output().print(table)


def complain(label: str, message: str, style: str) -> None:
    """One message on stderr, its label in color; wrapped as one text."""
    error_console.print(Text.assemble((label, style), " ", printable(message)))


def say(text: str, style: str = "dim") -> None:
    """Lines on stderr that are not wrapped: they may hold a command to copy."""
    error_console.print(text, style=style, highlight=False, soft_wrap=True)


def fail(message: str, hint: str = "") -> typer.Exit:
    """Say what went wrong, and give the exception to raise: ``raise fail(...)``."""
    complain("error:", message, "bold red")
    if hint:
        say(hint)
    return typer.Exit(1)


def stop(message: str = "") -> typer.Exit:
    """Say that the user stopped it, and give the exception to raise: ``raise stop(...)``."""
    say(message or "interrupted", "yellow")
    return typer.Exit(130)


def print_json(value: Any) -> None:
    """One JSON document on stdout, and nothing else."""
    from equilibria.engine import json_text

    typer.echo(json_text(value))


def make_folder(path: Path) -> Path:
    """The folder, made where it is missing; an error that names the flag if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise fail(f"--out {path}: this is a file; expected a folder.") from None
    except OSError as error:
        raise fail(f"--out {path}: the folder cannot be made ({error.strerror}).") from None
    if not os.access(path, os.W_OK):
        raise fail(f"--out {path}: the folder cannot be written to.")
    return path


def check_file(path: Path) -> None:
    """An error that names the flag where no file can be written, before work is spent on it."""
    if path.is_dir():
        raise fail(f"--out {path}: this is a folder; expected the name of a file.")
    make_folder(path.parent)
