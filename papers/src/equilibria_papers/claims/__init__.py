"""The audit: every proposition of the papers, and our own facts, against thousands of trials.

``load_claims`` gathers the claims, ``run_audit`` tries them, ``audit_page`` writes what was found.
What is claimed stands in a TOML file for each paper, how it is tried in the modules beside it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from .audit import Progress, rerun, run_audit, run_claim
from .claim import (
    PAPERS,
    Claim,
    Outcome,
    Record,
    Settings,
    Trial,
    Variant,
    Worst,
    read_records,
    write_records,
)
from .page import audit_page, claim_section

__all__ = [
    "PAPERS",
    "Claim",
    "Outcome",
    "Progress",
    "Record",
    "Settings",
    "Trial",
    "Variant",
    "Worst",
    "audit_page",
    "claim_section",
    "load_claims",
    "read_records",
    "rerun",
    "run_audit",
    "run_claim",
    "write_records",
]


_MODULES = {
    "geq": "geq_layer geq_margin geq_lipschitz geq_similarity",
    "kerdeq": "kerdeq",
    "opteq": "opteq_layer opteq_networks opteq_deep opteq_features opteq_training",
    "thesis": "thesis_background thesis_calculus thesis_bounds thesis_training",
    "ours": "ours_gaussian ours_lipschitz ours_kernels",
}


def load_claims(
    papers: Sequence[str] | None = None, only: Sequence[str] | None = None
) -> tuple[Claim, ...]:
    """The claims of these papers (all if None) whose id matches one of the patterns in ``only``.

    Patterns are those of a shell: ``opteq.lemma*``. An unknown paper, or a pattern that matches
    nothing, is an error that lists what there is.
    """
    asked = list(PAPERS) if papers is None else [_paper(name) for name in papers]
    found = [claim for name in PAPERS if name in asked for claim in _claims_of(name)]
    if only is None:
        return tuple(found)
    for pattern in only:
        if not any(fnmatchcase(claim.id, pattern) for claim in found):
            raise ValueError(f"no claim matches {pattern!r}; there are: {[c.id for c in found]}.")
    return tuple(c for c in found if any(fnmatchcase(c.id, pattern) for pattern in only))


def _paper(name: str) -> str:
    for known, file in PAPERS.items():
        if name.casefold() in (known.casefold(), file):
            return known
    raise ValueError(f"there is no paper {name!r} here; there are: {list(PAPERS)}.")


def _claims_of(paper: str) -> list[Claim]:
    """In the order of the TOML file. The trials import much of the library: only those needed."""
    folder, short = Path(__file__).parent, PAPERS[paper]
    words = tomllib.loads((folder / f"{short}.toml").read_text("utf-8"))
    trials: dict[str, Any] = {}
    for module in _MODULES[short].split():
        trials |= import_module(f".{module}", __name__).TRIALS
    if set(words) != set(trials):
        raise ValueError(
            f"{short}.toml and the trials differ in {sorted(set(words) ^ set(trials))}."
        )
    return [_claim(key, paper, text, trials[key]) for key, text in words.items()]


def _claim(
    key: str, paper: str, text: Mapping[str, Any], ways: Variant | Mapping[str, Variant]
) -> Claim:
    readings = text.get("readings", [{"name": "as printed"}])
    if isinstance(ways, Variant):  # the only reading
        ways = {readings[0]["name"]: ways}
    if [each["name"] for each in readings] != list(ways):
        raise ValueError(f"{key}: its readings are {readings}, the trials {list(ways)}.")
    variants = tuple(replace(ways[each["name"]], **each) for each in readings)
    return Claim(
        id=key,
        paper=paper,
        where=text["where"],
        statement=text["statement"],
        note=text.get("note", ""),
        variants=variants,
    )
