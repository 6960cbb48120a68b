"""The log of experiments: one line of JSON for every training, also for those that failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .planning import Planned
from .provenance import now

__all__ = ["Log", "read_log"]


class Log:
    """``log.jsonl`` in a folder; lines are only ever added."""

    def __init__(self, folder: Path, experiment: str, change: str) -> None:
        self.path = folder / "log.jsonl"
        self.experiment = experiment
        self.change = change

    def add(
        self,
        planned: Planned,
        outcome: str,
        seconds: float,
        result: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Note how a training ended: "done", "measured", "failed", "interrupted"."""
        line = {
            "date": now(),
            "id": self.experiment,
            "job": planned.job.name,
            "key": planned.key,
            "seed": planned.seed,
            "smoke": planned.smoke,
            "stand_in": planned.stands_in,
            "change": self.change,
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "result": dict(result or {}),
            **more,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log, oldest first; an incomplete last line is left out."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
