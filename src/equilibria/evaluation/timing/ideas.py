"""What a rule looks at, and what it answers with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .probes import Edit, Probe, contraction, probe, tolerant_layers
from .report import PassProfile, Suggestion
from .timeline import MAP, SOLVER
from .workload import Workload

__all__ = ["GAIN", "SHARE", "Case", "Idea"]

SHARE = 0.3
"""Overhead above this share of the pass is worth a word."""
GAIN = 1.05
"""A predicted gain below this is not worth a suggestion."""


@dataclass(frozen=True, eq=False)
class Idea:
    """A suggestion, and how to try it: an edit of a copy, or other settings of the run."""

    said: Suggestion
    edit: Edit | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def can_be_tried(self) -> bool:
        return self.edit is not None or bool(self.settings)


@dataclass(eq=False)
class Case:
    """What the rules look at. Probes are run when first asked for, and kept."""

    work: Workload
    main: PassProfile

    @cached_property
    def tolerant(self) -> dict[str, Any]:
        return tolerant_layers(self.work.model)

    @cached_property
    def base(self) -> Probe:
        return probe(self.work, None)

    @cached_property
    def contraction(self) -> float | None:
        return contraction(self.work)

    def without(self, seconds: float) -> float:
        """Times as fast if so many seconds of the marked pass were saved."""
        total = self.main.total
        return total / max(total - seconds, 1e-3 * total)

    def with_evaluations(self, ratio: float, *, overhead: float = 1.0) -> float:
        """Times as fast if the solves took ``ratio`` of the evaluations, each at equal cost."""
        parts = self.main.parts
        saved = (1.0 - ratio) * parts[MAP] + (1.0 - ratio * overhead) * parts[SOLVER]
        return self.without(saved)
