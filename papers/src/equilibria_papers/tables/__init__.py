"""The papers' tables and figures, beside ours.

::

    result = experiments.reproduce("kerdeq-table3", experiments.Choices(seeds=(0, 1, 2)))
    result.status, result.cells[0].ours
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .choices import Choices
from .declaring import Cell, Experiment, Job
from .published import Published
from .registry import describe, names

if TYPE_CHECKING:
    from .log import read_log
    from .planning import Planned, cells_asked, plan
    from .reproducing import reproduce, reproduce_all
    from .results import Result
    from .standing import Listed, listing
    from .tables import markdown, rich_table

__all__ = [
    "Cell",
    "Choices",
    "Experiment",
    "Job",
    "Listed",
    "Planned",
    "Published",
    "Result",
    "cells_asked",
    "describe",
    "listing",
    "markdown",
    "names",
    "plan",
    "read_log",
    "reproduce",
    "reproduce_all",
    "rich_table",
]


def __getattr__(name: str) -> Any:
    """What needs Lightning and the extras is imported when first used."""
    if name not in __all__:
        raise AttributeError(f"module 'equilibria_papers.tables' has no attribute {name!r}")
    from . import log, planning, reproducing, results, standing, tables

    rooms = (log, planning, reproducing, results, standing, tables)
    found = next(getattr(room, name) for room in rooms if name in room.__all__)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
