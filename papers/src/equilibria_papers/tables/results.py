"""A reproduced table: the paper's numbers beside ours, each with what it rests on."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equilibria.engine import write_json, write_text

from .experiment import Cell, Experiment

MEASURED, PARTLY, STAND_IN = "measured", "partly", "stand-in data"
SMOKE, NOT_RUN, QUOTED = "smoke only", "not run", "quoted"
_WARNING = "a smoke test: tiny networks on a few digits, no result"


@dataclass(frozen=True)
class Sample:
    """One number of one run."""

    seed: int
    value: float
    group: str  # Runs of the same settings have the same
    seconds: float
    made_by: Mapping[str, Any]
    stands_in: str = ""
    residual: float | None = None
    """‖T(z) − z‖/‖T(z)‖ of the last step: the median over the test images, of the worst layer. None
    where the run did not look at it."""


@dataclass(frozen=True)
class CellResult:
    """A cell with what was measured for it."""

    cell: Cell
    samples: tuple[Sample, ...] = ()
    why: str = ""  # Why there is no sample
    group: str = ""
    """Of the settings as they are declared now; samples of other settings are out of date."""

    @property
    def outdated(self) -> bool:
        """Whether the samples were made by other settings than those of today."""
        return any(s.group != self.group and not s.stands_in for s in self.samples)

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self.samples]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.samples else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds; None below two."""
        return statistics.stdev(self.values) if len(self.samples) > 1 else None

    @property
    def residual(self) -> float | None:
        """The largest of its samples; NaN where one is."""
        return largest(s.residual for s in self.samples if s.residual is not None)

    @property
    def status(self) -> str:
        if self.samples:
            if any(s.stands_in for s in self.samples):
                return STAND_IN
            return PARTLY if self.outdated else MEASURED
        return QUOTED if self.cell.job is None else NOT_RUN

    @property
    def number(self) -> str:
        """``94.8 ± 0.1``: mean and standard deviation; "–" where nothing was measured."""
        if self.mean is None:
            return "–"
        size = abs(self.mean)
        small = size < 0.01 and self.mean != 0.0
        digits = ".2e" if small else ".3g" if size < 1 else ".2f" if size < 1000 else ",.0f"
        spread = "" if self.std is None else f" ± {self.std:{digits}}"
        return f"{self.mean:{digits}}{spread}"

    @property
    def ours(self) -> str:
        """``94.8 ± 0.1 (3)``: with the number of seeds."""
        count = f" ({len(self.samples)})" if len(self.samples) > 1 else ""
        return self.number + count

    def to_dict(self) -> dict[str, Any]:
        published = self.cell.published
        return {
            "row": self.cell.row,
            "column": self.cell.column,
            "published": None
            if published is None
            else {"text": published.text, "value": published.value, "spread": published.spread},
            "job": None if self.cell.job is None else self.cell.job.name,
            "metric": self.cell.metric,
            "status": self.status,
            "mean": in_json(self.mean),
            "std": in_json(self.std),
            "n": len(self.samples),
            "why": self.why,
            "note": self.cell.note,
            "samples": [
                {**vars(s), "value": in_json(s.value), "residual": in_json(s.residual)}
                for s in self.samples
            ],
        }


def in_json(value: float | None) -> float | str | None:
    """What is not finite as a word, which ``float`` reads: JSON has no number for it."""
    return value if value is None or math.isfinite(value) else str(value)


def largest(values: Iterable[float]) -> float | None:
    """The maximum, and NaN where one is NaN, wherever it stands; None of nothing."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=None)


@dataclass(frozen=True)
class Result:
    """What ``reproduce`` found."""

    experiment: Experiment
    cells: tuple[CellResult, ...]
    smoke: bool
    change: str  # Overrides of the recipe, in words
    made_by: Mapping[str, Any]
    files: tuple[str, ...] = field(default=())
    overrides: Mapping[str, Any] = field(default_factory=dict)  # The same as values
    recipe: str = "ours"

    @property
    def status(self) -> str:
        """The state of the whole table."""
        return status_of((cell.status for cell in self.cells), self.smoke)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Those of its numbers."""
        return tuple(sorted({s.seed for cell in self.cells for s in cell.samples}))

    @property
    def seconds(self) -> float:
        """Of all trainings behind it, each counted once."""
        spent = {(s.group, s.seed): s.seconds for c in self.cells for s in c.samples}
        return sum(spent.values())

    def to_dict(self) -> dict[str, Any]:
        experiment = self.experiment
        return {
            **{k: getattr(experiment, k) for k in ("id", "paper", "title", "source", "claim")},
            "smoke": self.smoke,
            "warning": _WARNING if self.smoke else "",
            "status": self.status,
            "change": self.change,
            "recipe": self.recipe,
            "overrides": dict(self.overrides),
            "seeds": list(self.seeds),
            "seconds": round(self.seconds, 1),
            "made_by": dict(self.made_by),
            "notes": list(experiment.notes),
            "files": list(self.files),
            "cells": [
                {**cell.to_dict(), **({"status": SMOKE} if self.smoke and cell.samples else {})}
                for cell in self.cells
            ],
        }

    def save(self, folder: Path) -> list[Path]:
        """Write the JSON and the Markdown; each is whole or not there."""
        from .pages import markdown

        path = result_path(folder, self.experiment.id, self.smoke, self.change)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_dict())
        page = path.with_suffix(".md")
        write_text(page, markdown(self))
        return [path, page]


def status_of(cells: Iterable[str], smoke: bool) -> str:
    """The state of a table from that of its cells; what is only quoted does not count."""
    found = [status for status in cells if status != QUOTED]
    ran = [status for status in found if status != NOT_RUN]
    if not ran:
        return NOT_RUN
    if smoke:
        return SMOKE
    if STAND_IN in ran:
        return STAND_IN
    return PARTLY if len(ran) < len(found) or PARTLY in ran else MEASURED


def result_path(folder: Path, name: str, smoke: bool, change: str = "") -> Path:
    """Smoke tests and changed recipes have files of their own: neither replaces a result."""
    folder = folder / "smoke" if smoke else folder
    ending = re.sub(r"[^\w.=-]+", "-", change).strip("-")
    return folder / f"{name}{'--' if ending else ''}{ending}.json"


def read_result(path: Path) -> dict[str, Any] | None:
    """What was written before; None where there is nothing, or nothing that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) and "cells" in found else None


def earlier_samples(path: Path) -> dict[tuple[str, str], list[Sample]]:
    """(row, column) → the samples of an earlier call."""
    kept = read_result(path) or {"cells": ()}
    return {
        (cell["row"], cell["column"]): [_sample(sample) for sample in cell["samples"]]
        for cell in kept["cells"]
    }


def _sample(kept: Mapping[str, Any]) -> Sample:
    """Numbers that JSON does not know are kept as text; older files have no residual."""
    residual = kept.get("residual")
    residual = None if residual is None else float(residual)
    return Sample(**{**kept, "value": float(kept["value"]), "residual": residual})


def merged(new: Iterable[Sample], old: Iterable[Sample], group: str) -> tuple[Sample, ...]:
    """New samples, and of the old ones those of other seeds by the same settings.

    Numbers are not lost to less: samples on the paper's data stay where the new ones are on data
    that stand in, and samples of other settings stay (out of date) until there are new ones.
    """
    fresh, kept = list(new), list(old)
    real = [s for s in kept if not s.stands_in]
    if real and all(s.stands_in for s in fresh):
        same = [s for s in real if s.group == group]
        return _ordered(same or real)
    if not fresh:
        return _ordered([s for s in kept if s.group == group] or kept)
    taken, own = {s.seed for s in fresh}, fresh[0].group
    return _ordered(fresh + [s for s in kept if s.group == own and s.seed not in taken])


def _ordered(samples: list[Sample]) -> tuple[Sample, ...]:
    return tuple(sorted(samples, key=lambda s: s.seed))
