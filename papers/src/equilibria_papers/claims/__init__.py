"""The audit: every proposition of the papers, and our own facts, against thousands of trials.

``load_claims`` gathers the claims, ``run_audit`` tries them, ``audit_page`` writes what was found.
The verdict of a claim is computed from its trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
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


def load_claims(
    papers: Sequence[str] | None = None, only: Sequence[str] | None = None
) -> tuple[Claim, ...]:
    """The claims of these papers (all if None) whose id matches one of the patterns in ``only``.

    Patterns are those of a shell: ``opteq.lemma*``. An unknown paper, or a pattern that matches
    nothing, is an error that lists what there is.
    """
    asked = list(PAPERS) if papers is None else [_paper(name) for name in papers]
    found: list[Claim] = []
    for name in PAPERS:
        if name in asked:
            found.extend(_claims_of(name))
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


def _claims_of(paper: str) -> tuple[Claim, ...]:
    """In the order of the paper; imported where asked for: they import much of the library."""
    files: tuple[Any, ...]
    if paper == "GEQ":
        from . import geq_lipschitz, geq_margin, geq_problems, geq_similarity

        files = (geq_problems, geq_margin, geq_lipschitz, geq_similarity)
    elif paper == "KerDEQ":
        from . import kerdeq

        files = (kerdeq,)
    elif paper == "OptEq":
        from . import opteq_deep as deep
        from . import opteq_features as features
        from . import opteq_layer, opteq_networks, opteq_table1, opteq_training

        files = (opteq_layer, opteq_table1, opteq_networks, deep, features, opteq_training)
    elif paper == "NTK thesis":
        from . import thesis_background, thesis_bounds, thesis_calculus, thesis_training

        files = (thesis_background, thesis_calculus, thesis_bounds, thesis_training)
    else:
        from . import ours_errors, ours_gaussian, ours_kernels, ours_lipschitz

        files = (ours_gaussian, ours_errors, ours_lipschitz, ours_kernels)
    return tuple(claim for file in files for claim in file.CLAIMS)
