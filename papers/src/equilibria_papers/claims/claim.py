"""A claim of a paper as something that can be tried: ratio = left side / right side ≤ 1.

A claim has one or more readings (variants): the printed one first, then repaired ones. A reading is
a function that makes one random trial, and perhaps one that makes adversarial trials. What the
trials found is kept as JSON, and the verdict is computed from it:

    printed reading not violated                   → holds
    violated, a later reading is not               → holds under what that reading needs
    every reading violated                         → fails
    no draw of the printed reading met its premise → vacuous
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from equilibria.engine import check_number, write_text


class Trial(NamedTuple):
    """ratio = left/right (or residual/tolerance): it holds iff ratio ≤ 1 + variant.tolerance.

    A ratio of nan or +inf counts as a violation. case holds the numbers that reproduce the trial
    and is small: scalars, short lists, names.
    """

    ratio: float
    case: Mapping[str, Any]


# None: the draw does not satisfy the claim's premise; such draws are counted apart.
Draw = Callable[[torch.Generator], Trial | None]
Adversary = Callable[[torch.Generator], Iterable[Trial | None]]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One reading of a claim. All trials are float64 and seeded by the generator given.

    name: "as printed", "with P inside", "without a bias", "ours: sharp constant".
    random: one random trial, or None when the draw does not satisfy the premise.
    adversarial: families, optimizer searches, known counterexamples.
    tolerance: slack for rounding in ratio ≤ 1 + tolerance.
    needs: the extra condition or change that this reading adds, one clause; "" for the printed one.
    cost: relative cost of one random trial; the runner divides the trial count by it.
    climbs: whether hill climbing may push the ratio up. Not where the ratio is the rounding of an
        equality, which would be what it finds.
    proof: the argument that proves this reading, one clause; "" where trials are all there is.
    """

    name: str
    random: Draw
    adversarial: Adversary | None = None
    tolerance: float = 1e-6
    needs: str = ""
    cost: float = 1.0
    climbs: bool = True
    proof: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One proposition, theorem, lemma, remark or fact, with its readings.

    id: "geq.prop3", "kerdeq.theorem3", "opteq.lemma3", "thesis.lemma3.3.2", "ours.fact4".
    paper: "GEQ", "KerDEQ", "OptEq", "NTK thesis" or "ours". where: "Proposition 3, Eq 11".
    statement: one or two sentences, formulas in LaTeX between $…$.
    variants: the printed reading first, then repaired ones.
    note: why it fails, or what is wrong in the proof; one or two sentences.
    """

    id: str
    paper: str
    where: str
    statement: str
    variants: tuple[Variant, ...]
    note: str = ""


PAPERS = {
    "GEQ": "geq",
    "KerDEQ": "kerdeq",
    "OptEq": "opteq",
    "NTK thesis": "thesis",
    "ours": "ours",
}
"""A paper's name → its short name, with which the ids of its claims begin."""

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
        check_number(self, "trials", low=1, integer=True)
        check_number(self, "seconds", low=0.0, low_open=True)
        check_number(self, "seed", low=0, integer=True)


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
        return "holds under" if own == "fails" and self.repair is not None else own

    def sentence(self) -> str:
        """The verdict in words, with the numbers that it rests on."""
        first, repair = self.printed, self.repair
        if first.verdict == "holds":
            return f"holds in all {first.trials:,} trials" + " (few trials)" * first.few
        if first.verdict == "vacuous":
            return f"vacuous: the premise was met in none of {first.vacuous:,} draws"
        violated = f"violated in {first.violations:,} of {first.trials:,} trials"
        if repair is None:
            return f"fails ({violated})"
        few = f" (few trials: {repair.trials})" if repair.few else ""
        return f"holds under: {repair.needs}{few} ({first.name}: {violated})"

    def answers(self, claim: Claim, settings: Settings) -> bool:
        """Whether this record is that of ``claim`` as it reads now, under these settings."""
        readings = [(o.name, o.needs, o.tolerance, o.proof) for o in self.outcomes]
        wanted = [(v.name, v.needs, v.tolerance, v.proof) for v in claim.variants]
        same = (self.id, self.statement, self.settings) == (claim.id, claim.statement, settings)
        return same and readings == wanted

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict, "sentence": self.sentence()}


def plain(value: Any) -> Any:
    """JSON's types: tensors as lists, non-finite numbers as words."""
    if hasattr(value, "tolist"):  # tensors, and numpy's arrays and numbers
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    known = value is None or isinstance(value, (bool, int, str))
    known = known or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def write_records(path: Path, records: Iterable[Record], *, about: Mapping[str, Any]) -> Path:
    """``{**about, claims: […]}`` in one step: after Ctrl-C the old file or the new one is there."""
    made = {**about, "claims": [record.to_dict() for record in records]}
    return write_text(path, json.dumps(plain(made), indent=1, ensure_ascii=False) + "\n")


def read_records(path: Path) -> list[Record]:
    """The records in an ``audit.json``; an error that names the file where it is none."""
    try:
        return [_record(each) for each in json.loads(path.read_text("utf-8"))["claims"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a record of an audit ({type(error).__name__}: {error}); move it away "
            "or give another folder."
        ) from error


def _record(found: Mapping[str, Any]) -> Record:
    outcomes = []
    for each in found["outcomes"]:
        worst = each["worst"]
        if worst is not None:
            worst = Worst(**{**worst, "ratio": float(worst["ratio"])})
        outcomes.append(Outcome(**{**each, "worst": worst}))
    words = {key: found[key] for key in ("id", "paper", "where", "statement", "note")}
    return Record(outcomes=tuple(outcomes), settings=Settings(**found["settings"]), **words)
