"""The audit: every proposition of the papers, and our own facts, against thousands of trials.

``load_claims`` gathers the claims, ``run_audit`` tries them, ``audit_page`` writes what was found.
A TOML file for each paper says what is claimed and by which functions of the modules beside it each
reading is tried.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
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
from .numerics import Random
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
    words = tomllib.loads(Path(__file__).with_name(f"{PAPERS[paper]}.toml").read_text("utf-8"))
    return [
        Claim(id=key, paper=paper, variants=tuple(map(_variant, text.pop("readings"))), **text)
        for key, text in words.items()
    ]


def _variant(reading: dict[str, Any]) -> Variant:
    """A reading of a TOML file: its functions by name, called with what is given to both."""
    given = reading.pop("given", {})
    given |= {key: _named(name) for key, name in reading.pop("functions", {}).items()}
    trial, adversary = _named(reading.pop("trial")), reading.pop("adversary", None)
    search = None if adversary is None else _drawing(_named(adversary), given)
    return Variant(random=_drawing(trial, given), adversarial=search, **reading)


def _named(name: str) -> Any:
    """``geq_layer._eq4``: a function of one of the modules beside."""
    module, _, function = name.partition(".")
    return getattr(import_module(f".{module}", __name__), function)


def _drawing(function: Any, given: Mapping[str, Any]) -> Any:
    return lambda generator: function(Random(generator), **given)
