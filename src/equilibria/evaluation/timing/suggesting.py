"""What would help: rules that read measured numbers, each with its reason and predicted gain."""

from __future__ import annotations

from .ideas import Case, Idea
from .machine_rules import MACHINE_RULES
from .report import PassProfile
from .solver_rules import SOLVER_RULES
from .workload import Workload

__all__ = ["suggest"]


def suggest(work: Workload, main: PassProfile) -> list[Idea]:
    """Every rule's answer, the largest predicted gain first."""
    case = Case(work, main)
    found = [
        idea
        for rule in (*SOLVER_RULES, *MACHINE_RULES)
        for idea in [rule(case)]
        if idea is not None
    ]
    return sorted(found, key=lambda idea: -(idea.said.predicted or 1.0))
