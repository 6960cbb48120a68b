"""Reports: what they print and hand on, and how refusals are kept."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from equilibria_papers.theory.bounds import Assumption, AssumptionError, Report
from equilibria_papers.theory.bounds.report import (
    check_positive,
    kerdeq_remark1,
    number,
    refusing,
    remark1,
    remark1_ratios,
    remark3,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Example(Report):
    TITLE: ClassVar[str] = "An example"

    value: float
    many: tuple[float, ...] = (0.0, 1.0)

    def rows(self) -> list[tuple[str, Any, str]]:
        return [("value", self.value, "of the example")]


def example(**more: Any) -> Example:
    return Example(layer="GEQ", value=0.5, **more)


def test_text_has_numbers_assumptions_refusals_and_warnings() -> None:
    made = example(
        assumptions=(Assumption("‖W‖ < 1", False, "it is 2"), Assumption("D", None, "unseen")),
        warnings=("beware",),
        refused={"Eq 11": "no"},
    )
    text = str(made)
    assert text.startswith("An example: GEQ\n  value  0.5  of the example")
    assert "‖W‖ < 1: NO (it is 2)" in text
    assert "D: not checked (unseen)" in text
    assert "Eq 11: no" in text
    assert "beware" in text
    assert not made.checked
    told = json.loads(json.dumps(example(assumptions=(Assumption("a", True, "b"),)).to_dict()))
    assert told["title"] == "An example"
    assert told["many"] == [0.0, 1.0]
    assert told["assumptions"] == [{"name": "a", "holds": True, "how": "b"}]


def test_refusing_keeps_the_reason_of_an_assumption_only() -> None:
    kept: dict[str, str] = {}

    def refuse(x: float) -> float:
        raise AssumptionError(f"not for {x}")

    assert refusing(kept, "Eq 1", refuse, 3.0) is None
    assert kept == {"Eq 1": "not for 3.0"}
    assert refusing(kept, "Eq 2", lambda x: 2 * x, 3.0) == 6.0

    def wrong(x: float) -> float:
        raise ValueError("a mistake, not a premise")

    with pytest.raises(ValueError, match="mistake"):
        refusing(kept, "Eq 3", wrong, 1.0)


def test_positive_numbers_only() -> None:
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="gamma="):
            check_positive(gamma=value)
    with pytest.raises(TypeError, match="gamma="):
        check_positive(gamma=True)


def test_numbers_in_words() -> None:
    found = [number(v) for v in (None, math.inf, math.nan, 1.23456, 7, "x")]
    assert found == ["–", "–", "–", "1.235", "7", "x"]


def test_the_remarks() -> None:
    """Their printed numbers are those of the claims; here the words, and what is refused."""
    met, text = remark1(0.79, 0.95, 0.91)
    assert met
    assert "is met" in text
    assert not remark1(0.9, 0.95, 0.91)[0]
    assert "says nothing" in remark1(0.5, 1.0, 1.2)[1]
    # At the limit the second ratio is exactly 1.
    assert max(remark1_ratios(kerdeq_remark1(0.9), math.sqrt(0.9), 0.9)) == pytest.approx(1.0)
    assert remark3(3.61, 0.2, 0.0) == math.inf
    for formula in (lambda: remark1_ratios(0.5, 1.0, 1.0), lambda: kerdeq_remark1(1.0)):
        with pytest.raises(AssumptionError, match="m < 1"):
            formula()
    with pytest.raises(ValueError, match="log_d"):
        remark3(-1.0, 0.2, 1.0)
