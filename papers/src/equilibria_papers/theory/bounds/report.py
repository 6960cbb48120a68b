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

Row = tuple[str, Any, str]  # (name, value, note) of a line to show


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
    """Four digits; a dash for None and for no finite number."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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

    layer: str  # What it is about: "GEQ", "OptEq", or the name of a layer in a network
    assumptions: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Numbers of the paper that have no meaning here, by name, with the reason."""

    def rows(self) -> list[Row]:
        """The lines to show; overridden by each report."""
        return []

    def summary(self) -> list[tuple[str, str]]:
        """(name, text) of the few numbers to compare layers by; overridden by each report."""
        return []

    @property
    def checked(self) -> bool:
        """Whether every premise was checked and holds."""
        return all(a.holds is True for a in self.assumptions)

    def to_dict(self) -> dict[str, Any]:
        """Every field in types that JSON has."""
        return {"title": self.TITLE, **dataclasses.asdict(self)}

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


# Remarks 1 and 3 of GEQ and Remark 1 of KerDEQ: when GEQ's bounds are below OptEq's.


def remark1_ratios(beta: float, mu: float, m: float) -> tuple[float, float]:
    """βμ(1 − m)/(1 − βm) and (2μβ + 1)(1 − m)/(1 − βm): where both are below 1, GEQ is tighter."""
    if not 0.0 <= m < 1.0:
        raise AssumptionError(f"Remark 1 needs 0 ≤ m < 1, got m = {m:.4g}.")
    scale = (1.0 - m) / (1.0 - beta * m)
    return beta * mu * scale, (2.0 * mu * beta + 1.0) * scale


def remark1(beta: float, mu: float, m: float) -> tuple[bool, str]:
    """GEQ Remark 1: β_max < 0.8 and μ, m > 0.9 make both terms of GEQ's bound the smaller ones."""
    premise = beta < 0.8 and mu > 0.9 and 0.9 < m < 1.0
    if not m < 1.0:
        return False, f"says nothing for m = {m:.4g} ≥ 1"
    first, second = remark1_ratios(beta, mu, m)
    word = "met" if premise else "not met"
    return premise, (
        f"premise β_max < 0.8, μ, m > 0.9 is {word}; the two ratios are {first:.3g}, {second:.3g}"
    )


def kerdeq_remark1(m: float = 0.9, mu: float | None = None) -> float:
    """The β below which both terms of KerDEQ's bound are below OptEq's; KerDEQ prints 0.83 at 0.9.

    βμ(1 − m) < 1 − βm and (2μβ + 1)(1 − m) ≤ 1 − βm give β < 1/(m + μ(1 − m)) and
    β ≤ m/(2μ(1 − m) + m). The paper takes m = μ = 0.9, which no W has: μ ≥ ‖W‖ = √m = 0.9487, the
    value taken if ``mu`` is None.
    """
    check_positive(m=m)
    if m >= 1.0:
        raise AssumptionError(f"KerDEQ's Remark 1 needs m < 1, got {m:.4g}.")
    size = math.sqrt(m) if mu is None else mu
    return min(1.0 / (m + size * (1.0 - m)), m / (2.0 * size * (1.0 - m) + m))


def remark3(log_d: float, gamma: float, smallest: float, *, printed: bool = False) -> float:
    """The distance ‖x₁ − x₂‖ from which κ̄_geq ≤ κ̄_opteq: 2√(log D/γ)/σ_min(U).

    The paper prints 2√(−log(1/D))/σ_min(U), which lacks 1/γ (and κ̄_geq on both sides); with γ < 1
    that is too short. inf where σ_min(U) = 0.
    """
    check_positive(gamma=gamma)
    if log_d < 0.0:
        raise ValueError(f"log_d={log_d!r}: D = e^… is at least 1, so its logarithm is 0 or more.")
    if smallest <= 0.0:
        return math.inf
    return 2.0 * math.sqrt(log_d if printed else log_d / gamma) / smallest
