"""A table of two rows on the digits whose trainings take a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equilibria_papers.tables import Cell, Choices, Experiment, Job, Published

OPTIONS = {"widths": [4], "depth": 1}
RECIPE = {"epochs": 1, "batch_size": 64, "lr": 0.05, "schedule": "constant", "validation": 0.25}


def job(name: str = "tiny", **changes: Any) -> Job:
    made: dict[str, Any] = {
        "name": name,
        "model": "explicit_digits",
        "options": OPTIONS,
        "data": "digits",
        "recipe": RECIPE,
        "smoke": {"image_size": 8},
        **changes,
    }
    return Job(**made)


def table(**changes: Any) -> Experiment:
    """Two cells of one job, and one that is only quoted."""
    one = job(**changes)
    return Experiment(
        id="tiny-table",
        paper="none",
        title="a tiny table",
        source="made up",
        cells=(
            Cell(row="net", column="accuracy in %", published=Published.read("90 ± 1%"), job=one),
            Cell(row="net", column="size in k", job=one, metric="parameters_k"),
            Cell(row="other", column="accuracy in %", published=Published.read("95%")),
        ),
    )


def choices(folder: Path, **changes: Any) -> Choices:
    made: dict[str, Any] = {
        "out": folder / "results",
        "runs": folder / "runs",
        "device": "cpu",
        "progress": False,
        **changes,
    }
    return Choices(**made)
