"""Where the commands print: tables to stdout, everything else to stderr."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

error_console = Console(stderr=True)


def output() -> Console:
    """A console on the present stdout: made when needed, so that it can be redirected."""
    return Console()


def print_table(*columns: Column | str, rows: Iterable[Sequence[str]], **style: Any) -> None:
    """A table on stdout."""
    table = Table(*columns, **style)
    for row in rows:
        table.add_row(*row)
    output().print(table)


def complain(label: str, message: str, style: str) -> None:
    """One message on stderr, its label in color; wrapped as one text."""
    error_console.print(Text.assemble((label, style), " ", message))


def say(text: str, style: str = "dim") -> None:
    """Lines on stderr that are not wrapped: they may hold a command to copy."""
    error_console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


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
