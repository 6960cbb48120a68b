"""Where the commands print: tables to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

__all__ = [
    "complain",
    "error_console",
    "fail",
    "finite",
    "make_folder",
    "output",
    "print_json",
    "stop",
    "write_json",
]

error_console = Console(stderr=True)


def output() -> Console:
    """A console on the present stdout: made when needed, so that it can be redirected."""
    return Console()


def complain(label: str, message: str, style: str) -> None:
    """One message on stderr, its label in color; wrapped as one text."""
    error_console.print(Text.assemble((label, style), " ", message))


def fail(message: str, hint: str = "") -> typer.Exit:
    """Say what went wrong, and give the exception to raise: ``raise fail(...)``."""
    complain("error:", message, "bold red")
    if hint:
        error_console.print(hint, markup=False, highlight=False, style="dim")
    return typer.Exit(1)


def stop(message: str = "") -> typer.Exit:
    """Say that the user stopped it, and give the exception to raise: ``raise stop(...)``."""
    # Soft: a command to copy must not be cut by a line's end.
    said = message or "interrupted"
    error_console.print(said, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(130)


def finite(value: Any) -> Any:
    """The same with NaN and infinities as words: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def print_json(value: Any) -> None:
    """One JSON document on stdout, and nothing else."""
    typer.echo(json.dumps(finite(value), indent=1, default=str))


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


def write_json(path: Path, value: Any) -> Path:
    """A JSON file, its folder made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(value), indent=1, default=str) + "\n", encoding="utf-8")
    return path
