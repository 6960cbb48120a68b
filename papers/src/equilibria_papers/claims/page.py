"""The audit as a Markdown page: a table of all readings, then a section per claim."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .claim import FEW, Outcome, Record, Verdict, Worst

_WHY_NONE = (
    "the random trials already violate the reading or never met its premise, or it has no "
    "continuous parameter, or the ratio is one of rounding, which a search would only enlarge"
)
_MARKS = {"holds": "holds", "fails": "**fails**", "vacuous": "vacuous"}


def ratio_text(ratio: float) -> str:
    """Four digits; more where the distance from 1 is what matters."""
    if not math.isfinite(ratio):
        return str(ratio)
    if 0.999 < ratio < 1.001 and ratio != 1.0:
        return f"{ratio:.7f}"
    return f"{ratio:.4g}"


def audit_page(records: Sequence[Record], command: str) -> str:
    """The whole page, without a title: counts by paper, the table, the sections by paper."""
    trials = sum(outcome.trials for record in records for outcome in record.outcomes)
    papers = dict.fromkeys(record.paper for record in records)
    lines = [
        f"`{command}` wrote this: {len(records)} claims, {trials:,} trials.",
        "",
        *(_count(paper, [r for r in records if r.paper == paper]) for paper in papers),
        "",
        f"In the table, – under *adversarial* means none: {_WHY_NONE}. *Few trials* means fewer "
        f"than {FEW}; *proven*, that the section of the claim names a proof.",
        "",
        *_table(records),
    ]
    for paper in papers:
        lines += ["", f"## {paper}"]
        for record in records:
            if record.paper == paper:
                lines += ["", claim_section(record).rstrip()]
    return "\n".join(lines) + "\n"


def _count(paper: str, records: Sequence[Record]) -> str:
    """One line: of how many claims the first reading holds, a later one, none."""
    counts = Counter(record.verdict for record in records)
    parts: dict[Verdict, str] = {
        "holds": "hold as we state them" if paper == "ours" else "hold as printed",
        "holds under": "hold with a change",
        "fails": "fail in every reading",
        "vacuous": "premise met by no draw",
    }
    details = "; ".join(f"{text} {counts[key]}" for key, text in parts.items() if counts[key])
    return f"- **{paper}**, of {len(records)}: {details}."


def _table(records: Iterable[Record]) -> list[str]:
    lines = [
        "| paper | claim | reading | random | adversarial | worst ratio | verdict |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for record in records:
        link = f"[{_cell(record.where)}](#{_anchor(record)})"
        for number, outcome in enumerate(record.outcomes):
            first = number == 0
            worst = "–" if outcome.worst is None else ratio_text(outcome.worst.ratio)
            cells = [
                record.paper if first else "",
                link if first else "",
                _cell(outcome.name),
                f"{outcome.random:,}",
                f"{outcome.adversarial:,}" if outcome.adversarial else "–",
                worst,
                _verdict(outcome),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _verdict(outcome: Outcome) -> str:
    marks = ["few trials"] * outcome.few
    if outcome.proof and outcome.verdict == "holds":
        marks.append("proven")
    return _MARKS[outcome.verdict] + (f" ({', '.join(marks)})" if marks else "")


def _anchor(record: Record) -> str:
    return record.id.replace(".", "-").lower()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def claim_section(record: Record) -> str:
    """One claim: its statement, the verdict, every reading, the counterexample, the note."""
    lines = [
        f"### {record.where} {{#{_anchor(record)}}}",
        "",
        f"`{record.id}`. {record.statement}",
        "",
        f"**Verdict:** {record.sentence()}.",
        "",
    ]
    lines += [_reading(outcome) for outcome in record.outcomes]
    if record.note:
        lines += ["", record.note]
    worst = record.printed.worst
    if record.verdict in ("fails", "holds under") and worst is not None:
        lines += ["", *_counterexample(worst)]
    # Spaces next to the dollars of a formula would make it plain text.
    return re.sub(r"\$\s*([^$\n]+?)\s*\$", r"$\1$", "\n".join(lines)) + "\n"


def _reading(outcome: Outcome) -> str:
    needs = f" ({outcome.needs})" if outcome.needs else ""
    parts = [f"{outcome.random:,} random and {outcome.adversarial:,} adversarial trials"]
    if outcome.climbs:
        parts[0] += f" ({outcome.climbs:,} by hill climbing)"
    if outcome.vacuous:
        parts.append(f"{outcome.vacuous:,} draws outside the premise")
    if outcome.violations:
        parts.append(f"{outcome.violations:,} violated")
    if outcome.worst is not None:
        parts.append(f"worst ratio {ratio_text(outcome.worst.ratio)}")
    if outcome.few:
        parts.append("few trials")
    # A proof that a trial contradicts is no proof: the page must not call it one.
    proof = f" Proof: {outcome.proof}." if outcome.proof and not outcome.violations else ""
    return f"- *{outcome.name}*{needs}: {', '.join(parts)}.{proof}"


def _counterexample(worst: Worst) -> list[str]:
    which = f"{worst.source} trial {worst.index}"
    if worst.source == "climb":
        which = f"move {worst.index} of the climb from random trial {worst.start}"
    said = f"Counterexample ({which}, ratio {ratio_text(worst.ratio)}):"
    rows = [f"| {_cell(key)} | `{_value(item)}` |" for key, item in worst.case.items()]
    return [said, "", "| | |", "| --- | --- |", *rows]


def _value(item: Any) -> str:
    if isinstance(item, (bool, int)):
        return str(item)
    if isinstance(item, float):
        return f"{item:.8g}"
    if isinstance(item, (list, tuple)):
        return "[" + ", ".join(_value(each) for each in item) + "]"
    return _cell(str(item))
