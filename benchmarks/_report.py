"""Tables for the terminal and for results/, and where and when a run happened."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

try:  # rich makes the output pleasant; a bare machine may not have it
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table as RichTable
except ModuleNotFoundError:
    Console = None  # type: ignore[assignment, misc]


@dataclass
class Table:
    """A titled table of strings, with a note under it."""

    title: str
    columns: Sequence[str]
    note: str = ""
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        self.rows.append(list(cells))

    def markdown(self) -> str:
        head = "| " + " | ".join(self.columns) + " |"
        # The first column holds names; all others numbers.
        rule = "|" + "|".join(["---"] + ["---:"] * (len(self.columns) - 1)) + "|"
        body = ["| " + " | ".join(row) + " |" for row in self.rows]
        parts = [f"## {self.title}", "", head, rule, *body]
        if self.note:
            parts += ["", self.note]
        return "\n".join(parts) + "\n"


def show(table: Table) -> None:
    """Print a table: with rich where it is installed, else as Markdown."""
    if Console is None:
        print("\n" + table.markdown())
        return
    made = RichTable(title=table.title, caption=table.note, title_justify="left")
    for i, column in enumerate(table.columns):
        made.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in table.rows:
        made.add_row(*row)
    # A pipe has no width: give it one that keeps the columns whole.
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(made)


class Steps:
    """Progress over a known number of steps, each with a name."""

    def __init__(self, total: int, advance: Any) -> None:
        self.total, self.done, self._advance = total, 0, advance

    def next(self, what: str) -> None:
        """Say what is measured now."""
        self._advance(what, self.done)
        self.done += 1


@contextmanager
def progress(total: int) -> Iterator[Steps]:
    """A bar on a terminal; otherwise one line per step on standard error."""
    if Console is None or not sys.stderr.isatty():

        def line(what: str, done: int) -> None:
            print(f"[{done + 1}/{total}] {what}", file=sys.stderr, flush=True)

        yield Steps(total, line)
        return
    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield Steps(total, lambda what, done: bar.update(task, description=what, completed=done))
        bar.update(task, completed=total)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        asked = ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"]
        head = subprocess.run(asked, capture_output=True, text=True, timeout=10)
        if head.returncode != 0:
            return None
        asked = ["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"]
        state = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + (" with local changes" if state.stdout.strip() else "")


def describe_run(command: str, seed: int, device: torch.device, **more: Any) -> dict[str, Any]:
    """Everything a reader needs to repeat the run, and nothing that names a machine's folders."""
    found: dict[str, Any] = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "seed": seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if hasattr(os, "getloadavg"):
        found["load average at the start"] = round(os.getloadavg()[0], 2)
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found | more


def write(
    folder: Path, name: str, meta: dict[str, Any], notes: str, tables: list[Table], data: Any
) -> list[Path]:
    """results/<name>.json with the numbers and results/<name>.md with the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = folder / f"{name}.json"
    numbers.write_text(json.dumps({"run": meta, **data}, indent=1, ensure_ascii=False) + "\n")
    lines = ["# Comparison with torchdeq", "", "Written by the command below; do not edit.", ""]
    lines += ["```", meta["command"], "```", ""]
    lines += [f"- {key}: {value}" for key, value in meta.items() if key != "command"]
    lines += ["", notes.strip(), ""]
    text = folder / f"{name}.md"
    text.write_text("\n".join(lines) + "\n" + "\n".join(t.markdown() for t in tables))
    return [numbers, text]
