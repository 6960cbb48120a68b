"""Where the commands print: tables to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

__all__ = ["error_console", "fail", "finite", "output", "print_json", "write_json"]

error_console = Console(stderr=True)


def output() -> Console:
    """A console on the present stdout: made when needed, so that it can be redirected."""
    return Console()


def fail(message: str, hint: str = "") -> typer.Exit:
    """Say what went wrong, and give the exception to raise: ``raise fail(...)``."""
    error_console.print("[bold red]error:[/] ", end="")
    error_console.print(message, markup=False, highlight=False)
    if hint:
        error_console.print(hint, markup=False, highlight=False, style="dim")
    return typer.Exit(1)


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


def write_json(path: Path, value: Any) -> Path:
    """A JSON file, its folder made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(value), indent=1, default=str) + "\n", encoding="utf-8")
    return path
