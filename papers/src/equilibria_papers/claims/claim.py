"""A claim of a paper as something that can be tried: ratio = left side / right side ≤ 1.

A claim holds its statement, where it stands, and one or more readings (variants): the printed one
first, then repaired ones. A reading is a function that makes one random trial, and perhaps one
that makes adversarial trials (families, optimizer searches, known counterexamples); hill climbing
on the random trial's draws (climbing.py) comes on top. The verdict is computed from the trials
(records.py), never written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

__all__ = ["Adversary", "Claim", "Draw", "Trial", "Variant"]


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

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a variant needs a name, such as 'as printed'; got an empty one")
        if not self.cost > 0:
            raise ValueError(f"cost must be positive (1 for a usual trial); got {self.cost}")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must be 0 or more; got {self.tolerance}")


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

    def __post_init__(self) -> None:
        if not self.variants:
            raise ValueError(f"claim {self.id!r} has no variants; give the printed one at least")
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"claim {self.id!r} has variants of the same name: {names}")
        for variant in self.variants[1:]:
            if not variant.needs:
                raise ValueError(
                    f"variant {variant.name!r} of claim {self.id!r} must say in needs= what it adds"
                    " to the printed reading"
                )
