"""A table of a paper as data: its cells, what each is measured from, and what is trained for it."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_FORM = re.compile(
    rf"(?P<sign>[<>]?)\s*(?P<value>-?{_NUMBER})\s*(?:±\s*(?P<spread>{_NUMBER}))?\s*"
    r"(?P<unit>%|s|/s|M|k)?"
)


WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("papers.toml").read_text("utf-8"))


def printed(name: str) -> list[list[Any]]:
    """The rows of a table in papers.toml: the row's name, our network, what the paper prints."""
    rows: list[list[Any]] = WORDS[name]["rows"]
    return rows


@dataclass(frozen=True)
class Published:
    """What stands in the paper, and the number that it is; units are those of the table."""

    text: str
    value: float
    spread: float | None = None  # What follows ±, if anything does
    limit: str = ""  # ">" or "<" where the paper prints no more than a limit

    @classmethod
    def read(cls, text: str) -> Published:
        """From the printed text: ``95.2 ± 0.2``, ``93.5 ± 0.2%``, ``> 5``, ``1.22e-02``."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} is no printed number: expected such as '94.8 ± 0.1%', '> 5', '1.3 s'."
            )
        spread = None if found["spread"] is None else float(found["spread"])
        return cls(text.strip(), float(found["value"]), spread, found["sign"])


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, or one network to be measured without training, and what is measured of it.

    Jobs with the same settings are one run, whichever table asked for them.
    """

    name: str
    model: str  # A name of ``models.names()``, or of ``thesis.NETWORKS``
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model, in JSON's types."""
    data: str
    recipe: Mapping[str, Any]  # Options of TrainConfig
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What other recipes change in it, by their names; empty: there is one recipe."""
    classes: str = "all"  # "all"; "first half": only those are learned; "superclass": GEQ §4.3
    measures: tuple[str, ...] = ("quality",)  # Names of ``measures.MEASURES``
    trained: bool = True
    """False: the network is measured as it is drawn (throughput, paths at the start)."""
    graphs: bool = False
    """Whether the training step is replayed as CUDA graphs on a GPU: for fixed steps."""
    rate: float = 5000.0
    """Images per second that a training on one H200 sees: an estimate, for the cost."""
    images: int = 45_000  # Training images, for the cost
    stand_in: Mapping[str, Any] = field(default_factory=dict)
    """TrainConfig's options for data that stand in: ``{"data": "cifar10"}``; empty: none does."""
    smoke: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model that make it tiny; ``image_size`` is that of the digits."""

    @property
    def minutes(self) -> float:
        """GPU minutes, estimated."""
        if not self.trained:
            return 1.0
        return float(self.recipe.get("epochs", 1)) * self.images / self.rate / 60.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table: where it stands, what the paper prints, how we measure it."""

    row: str
    column: str
    published: Published | None = None
    job: Job | None = None
    """None: the paper's number is quoted, and we have nothing to measure beside it."""
    metric: str = "accuracy"  # A number that the job's measures give
    note: str = ""

    @property
    def name(self) -> str:
        """``GEQ 5M, CIFAR-10``: row and column, without their units."""
        column = self.column.removesuffix(" in %").removesuffix(",").removesuffix(", accuracy")
        return f"{self.row}, {column}"

    @property
    def paper(self) -> str:
        """The paper's number; "–" where it prints none."""
        return "–" if self.published is None else self.published.text


def cells(row: str, job: Job | None, *columns: tuple[str, ...], note: str = "") -> list[Cell]:
    """A cell for each (column, metric), or (column, metric, what the paper prints)."""
    made = []
    for column, metric, *printed in columns:
        published = Published.read(printed[0]) if printed and printed[0] else None
        made.append(
            Cell(row=row, column=column, published=published, job=job, metric=metric, note=note)
        )
    return made


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or a figure of a paper."""

    id: str
    paper: str
    title: str
    source: str  # Where the printed numbers were copied from
    cells: tuple[Cell, ...]
    claim: str = ""  # What the paper reads off it
    verdict: str = "not tested"  # Whether our numbers support the claim, in a word or two
    why: str = ""
    notes: tuple[str, ...] = ()
    """Where our run differs from the paper's, and what we chose where the paper is silent."""
    picture: str = ""  # "line" or "bars": how the cells are drawn; "": not

    def __post_init__(self) -> None:
        places = [(cell.row, cell.column) for cell in self.cells]
        if not places or len(set(places)) != len(places):
            raise ValueError(f"{self.id}: cells must be there, and each place has one.")

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def jobs(self) -> tuple[Job, ...]:
        """What has to be trained, each once, in the order of the cells."""
        found = {cell.job.name: cell.job for cell in self.cells if cell.job is not None}
        return tuple(found.values())

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets that it needs."""
        return tuple(dict.fromkeys(job.data for job in self.jobs))

    @property
    def minutes(self) -> int:
        """GPU minutes of one seed, estimated, rounded up."""
        return math.ceil(sum(job.minutes for job in self.jobs))

    def cells_of(self, rows: tuple[str, ...]) -> tuple[Cell, ...]:
        """The cells of these rows; none given: all. A row that is not there is an error."""
        wrong = [name for name in rows if name not in self.rows]
        if wrong:
            known = ", ".join(repr(row) for row in self.rows)
            raise ValueError(f"{self.id} has no row {wrong[0]!r}; its rows are {known}.")
        return tuple(cell for cell in self.cells if not rows or cell.row in rows)
