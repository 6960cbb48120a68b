"""The papers' tables and figures, beside ours.

::

    result = tables.reproduce("kerdeq-table3", tables.Choices(seeds=(0, 1, 2)))
    result.status, result.cells[0].ours
"""

from .experiment import Cell, Experiment, Job, Published
from .pages import markdown, rich_table
from .plan import Choices, Planned, cells_asked, plan
from .provenance import read_log
from .reproduction import Listed, describe, listing, names, reproduce, reproduce_all
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
