"""What an audit found: one outcome per reading, one record per claim, kept as JSON.

The verdict is computed from the outcomes:

    printed reading not violated                   → holds
    violated, a later reading is not               → holds under what that reading needs
    every reading violated                         → fails
    no draw of the printed reading met its premise → vacuous
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .claim import Claim, Trial

__all__ = ["Outcome", "Record", "Settings", "Verdict", "Worst", "read_records", "write_records"]

Verdict = Literal["holds", "holds under", "fails", "vacuous"]
Source = Literal["random", "adversarial", "climb"]

FEW = 100
"""Below so many trials a verdict is said to rest on few."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes an audit repeatable, but for how far the clock (processor time) let it go."""

    trials: int = 2000
    seconds: float = 20.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials={self.trials}: expected 1 or more.")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds={self.seconds}: expected a positive number per reading.")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: expected 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The trial with the largest ratio; ``index`` names it within its source.

    Of a climb it counts the moves, and ``start`` is the random trial that it began from.
    """

    source: Source
    index: int
    ratio: float
    case: Mapping[str, Any]
    start: int | None = None


def badness(ratio: float) -> float:
    """The ratio, where not a number is as bad as can be."""
    return math.inf if math.isnan(ratio) else ratio


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One reading after its trials. Draws that miss the premise are in ``vacuous`` alone.

    ``adversarial`` counts families, optimizer searches and the moves of ``climbs``, which it holds.
    """

    name: str
    needs: str
    tolerance: float
    random: int
    adversarial: int
    vacuous: int
    violations: int
    worst: Worst | None
    seconds: float
    climbs: int = 0
    proof: str = ""

    @property
    def trials(self) -> int:
        """How many trials met the premise."""
        return self.random + self.adversarial

    @property
    def verdict(self) -> Verdict:
        """Of this reading alone: holds, fails or vacuous."""
        if self.trials == 0:
            return "vacuous"
        return "fails" if self.violations else "holds"

    @property
    def few(self) -> bool:
        """Whether a verdict other than ``fails`` rests on fewer than ``FEW`` trials."""
        return self.verdict == "holds" and self.trials < FEW


@dataclass(frozen=True, kw_only=True)
class Record:
    """A claim and what its trials found."""

    id: str
    paper: str
    where: str
    statement: str
    note: str
    outcomes: tuple[Outcome, ...]
    settings: Settings

    @property
    def printed(self) -> Outcome:
        return self.outcomes[0]

    @property
    def repair(self) -> Outcome | None:
        """The first later reading that holds."""
        return next((o for o in self.outcomes[1:] if o.verdict == "holds"), None)

    @property
    def verdict(self) -> Verdict:
        own = self.printed.verdict
        if own == "fails" and self.repair is not None:
            return "holds under"
        return own

    def sentence(self) -> str:
        """The verdict in words, with the numbers that it rests on."""
        first, verdict = self.printed, self.verdict
        if verdict == "holds":
            return f"holds in all {first.trials:,} trials" + " (few trials)" * first.few
        if verdict == "vacuous":
            return f"vacuous: the premise was met in none of {first.vacuous:,} draws"
        violated = f"violated in {first.violations:,} of {first.trials:,} trials"
        if self.repair is None:
            return f"fails ({violated})"
        return f"holds under: {self.repair.needs}{_few(self.repair)} ({first.name}: {violated})"

    def answers(self, claim: Claim, settings: Settings) -> bool:
        """Whether this record is that of ``claim`` as it reads now, under these settings."""
        readings = [(o.name, o.needs, o.tolerance, o.proof) for o in self.outcomes]
        wanted = [(v.name, v.needs, v.tolerance, v.proof) for v in claim.variants]
        same = (self.id, self.statement, self.settings) == (claim.id, claim.statement, settings)
        return same and readings == wanted


def _few(outcome: Outcome) -> str:
    return f" (few trials: {outcome.trials})" if outcome.few else ""


def plain(value: Any) -> Any:
    """JSON's types: tensors as lists, non-finite numbers as words."""
    if isinstance(value, torch.Tensor):
        return plain(value.detach().cpu().tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        number = float(value)  # also numpy's numbers
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)


def worst_of(source: Source, index: int, trial: Trial, start: int | None = None) -> Worst:
    return Worst(
        source=source, index=index, ratio=float(trial.ratio), case=plain(trial.case), start=start
    )


def write_records(path: Path, records: Iterable[Record], *, about: Mapping[str, Any]) -> Path:
    """``{**about, claims: […]}`` in one step: after Ctrl-C the old file or the new one is there."""
    made = {**about, "claims": [_as_json(record) for record in records]}
    text = json.dumps(plain(made), indent=1, ensure_ascii=False) + "\n"
    return write_whole(path, text)


def write_whole(path: Path, text: str) -> Path:
    """Write a text beside its place, then put it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _as_json(record: Record) -> dict[str, Any]:
    return {**asdict(record), "verdict": record.verdict, "sentence": record.sentence()}


def read_records(path: Path) -> list[Record]:
    """The records in an ``audit.json``; an error that names the file where it is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
        return [_from_json(each) for each in found["claims"]]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a record of an audit ({type(error).__name__}: {error}); move it away "
            "or give another folder."
        ) from error


def _from_json(found: Mapping[str, Any]) -> Record:
    return Record(
        outcomes=tuple(_outcome(each) for each in found["outcomes"]),
        settings=Settings(**found["settings"]),
        **{key: found[key] for key in ("id", "paper", "where", "statement", "note")},
    )


def _outcome(found: Mapping[str, Any]) -> Outcome:
    worst = found["worst"]
    if worst is not None:
        worst = Worst(**{**worst, "ratio": float(worst["ratio"])})
    return Outcome(**{**found, "worst": worst})
