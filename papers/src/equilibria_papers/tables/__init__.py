"""The papers' tables and figures, beside ours.

::

    result = tables.reproduce("kerdeq-table3", tables.Choices(seeds=(0, 1, 2)))
    result.status, result.cells[0].ours
"""

from .choices import Choices
from .declaring import Cell, Experiment, Job, Published
from .planning import Planned, cells_asked, plan
from .provenance import read_log
from .registry import Listed, describe, listing, names
from .rendering import markdown, rich_table
from .reproducing import reproduce, reproduce_all
from .results import Result

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
