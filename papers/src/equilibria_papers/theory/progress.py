"""A progress bar on stderr, silent where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(text: str, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Yields ``update(done, total, text=text)``."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    off = not (shown and console.is_terminal)
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=off)
    with bar:
        task = bar.add_task(text, total=None)

        def update(done: float, total: float, text: str = text) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield update
