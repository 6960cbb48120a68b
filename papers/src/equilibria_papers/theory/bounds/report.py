"""What every calculator of a proposition returns: numbers, what they are made of, what was checked.

A report is a frozen dataclass. Its numbers are its fields; ``assumptions`` says of each premise
whether it holds on the layer and data given; ``warnings`` says where the paper's inequality is
known not to hold; ``refused`` says which numbers of the paper have no meaning here, and why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

__all__ = ["Assumption", "AssumptionError", "Report", "number", "refusing"]


class AssumptionError(ValueError):
    """A premise of the proposition fails, and without it the number has no meaning."""


@dataclass(frozen=True)
class Assumption:
    """One premise: whether it holds here (None: not checked), and how that is known."""

    name: str
    holds: bool | None
    how: str

    def __str__(self) -> str:
        word = {True: "yes", False: "NO", None: "not checked"}[self.holds]
        return f"{self.name}: {word} ({self.how})"


def number(value: Any) -> str:
    """Four digits; a dash for None and for no finite number, a word for true and false."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def refusing(refused: dict[str, str], name: str, formula: Any, *args: float) -> float | None:
    """``formula(*args)``, or None with the reason kept under ``name`` where it refuses."""
    try:
        return float(formula(*args))
    except AssumptionError as error:
        refused[name] = str(error)
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class Report:
    """The base of all reports; ``print`` it to read it, ``to_dict()`` for JSON."""

    TITLE: ClassVar[str] = ""

    layer: str
    """What it is about: "GEQ", "OptEq", or the name of a layer in a network."""
    assumptions: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Numbers of the paper that have no meaning here, by name, with the reason."""

    def rows(self) -> list[tuple[str, Any, str]]:
        """(name, value, note) of the lines to show; overridden by each report."""
        return []

    @property
    def checked(self) -> bool:
        """Whether every premise was checked and holds."""
        return all(a.holds is True for a in self.assumptions)

    def to_dict(self) -> dict[str, Any]:
        """Every field in types that JSON has."""
        made: dict[str, Any] = {"title": self.TITLE, **_plain(self)}
        return made

    def __str__(self) -> str:
        shown = [(name, number(value), note) for name, value, note in self.rows()]
        wide = max((len(name) for name, _, _ in shown), default=0)
        figures = max((len(value) for _, value, _ in shown), default=0)
        lines = [f"{self.TITLE}: {self.layer}"]
        lines += [f"  {n:<{wide}}  {v:<{figures}}  {note}".rstrip() for n, v, note in shown]
        lines += [f"  assumption  {a}" for a in self.assumptions]
        lines += [f"  refused     {name}: {why}" for name, why in self.refused.items()]
        lines += [f"  warning     {text}" for text in self.warnings]
        return "\n".join(lines)


def check_positive(**values: float) -> None:
    """Raise unless each is a positive finite number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}={value!r}: expected a positive number.")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value!r}: expected a positive finite number.")
