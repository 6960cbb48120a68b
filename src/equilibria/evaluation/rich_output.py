"""What is shown on a terminal, by rich: tables, numbers in them, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from equilibria.engine.optional import needs


def make_table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    boxed: bool = False,
    **more: Any,
) -> Any:
    """A table whose first ``left`` columns are text, the others numbers.

    Without a box seven columns and a layer's whole name fit into 80.
    """
    with needs("rich", "A table"):
        from rich.box import HEAVY_HEAD, SIMPLE_HEAD
        from rich.table import Table
    table = Table(title=title, box=HEAVY_HEAD if boxed else SIMPLE_HEAD, show_edge=boxed, **more)
    if not boxed:
        table.title_justify, table.pad_edge, table.collapse_padding = "left", False, True
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def group(*parts: Any) -> Any:
    with needs("rich", "A table"):
        from rich.console import Group
    return Group(*parts)


def as_text(shown: Any) -> str:
    with needs("rich", "A table"):
        from rich.console import Console
    console = Console(width=100, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(shown, highlight=False, markup=False)
    return str(captured.get()).rstrip()


def percent(value: float | None) -> str:
    return "–" if value is None or value != value else f"{100 * value:.2f}%"


def number(value: Any, digits: int = 4) -> str:
    """A number, the largest of a spread {min, median, max}, or a dash where there is none."""
    if isinstance(value, dict):
        value = value["max"]
    return "–" if value is None or value != value else f"{value:.{digits}g}"


@contextmanager
def progress_bar(total: int, text: str, shown: bool) -> Iterator[Callable[..., None]]:
    """A function ``advance(text=None)`` that moves a bar, where stderr is a terminal."""
    if not shown:
        yield lambda text=None: None
        return
    with needs("rich", "A progress bar"):
        from rich import progress
        from rich.console import Console
    console = Console(stderr=True)
    with progress.Progress(
        "{task.description}",
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(text, total=total)
        yield lambda text=None: bar.update(task, advance=1, description=text)
