"""Kinds of guarantee, what every certificate can say, and how it is written: aligned lines."""

from __future__ import annotations

import enum
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.result import ConvergenceWarning, Solution

Rows = list[tuple[str, str]]


class Guarantee(enum.StrEnum):
    """What is proven about a sample's equilibrium, strongest first; ``words`` says it."""

    contraction = "contraction"
    strong_convexity = "strong convexity"
    strong_monotonicity = "strong monotonicity"
    local = "local"
    none = "none"

    @property
    def words(self) -> str:
        return _WORDS[self]

    @property
    def means_unique(self) -> bool:
        """Whether exactly one equilibrium is proven to exist."""
        return self not in (Guarantee.local, Guarantee.none)


_WORDS = {
    Guarantee.contraction: "one equilibrium, and plain iteration converges to it",
    Guarantee.strong_convexity: "one equilibrium (G is strongly convex)",
    Guarantee.strong_monotonicity: "one equilibrium (I − W is strongly monotone)",
    Guarantee.local: "one equilibrium within the bound below, a strict local minimizer; others may "
    "exist",
    Guarantee.none: "nothing is proven",
}


SAMPLED = (
    "the prox of the prior was checked at samples alone; that it is one everywhere, and its "
    "rounding, are assumed"
)


class Guaranteed:
    """A certificate: the guarantee of each sample in ``kinds``, and what follows from them."""

    kinds: tuple[Guarantee, ...]
    residual: Tensor
    error_bound: Tensor
    rigorous: bool

    @property
    def certified(self) -> Tensor:
        """Which samples have exactly one equilibrium, [B] bool."""
        return torch.tensor([k.means_unique for k in self.kinds], device=self.residual.device)

    @property
    def unique(self) -> bool:
        """Whether every sample is certified to have exactly one equilibrium."""
        return bool(self.certified.all())

    @property
    def kind(self) -> Guarantee:
        """The weakest guarantee in the batch."""
        order = list(Guarantee)
        return max(self.kinds, key=order.index) if self.kinds else Guarantee.none

    def written(self, rows: Rows) -> str:
        """A heading, the guarantees in words, and rows of (name, text), aligned."""
        total = len(self.kinds)
        head: Rows = []
        for kind in Guarantee:
            count = self.kinds.count(kind)
            if count:
                share = "" if count == total else f" ({count} of {total} samples)"
                head.append(("" if head else "guarantee", f"{kind}: {kind.words}{share}"))
        certain = f"certified for {int(self.certified.sum())} of {total} samples"
        rows = [*head, ("unique", "yes" if self.unique else certain), *rows]
        samples = "1 sample" if total == 1 else f"{total} samples"
        status = "proven, in float64" if self.rigorous else "partly estimated, see the notes"
        return aligned(f"Certificate for {samples}: {status}", rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class Proven(Guaranteed):
    """What every certificate of one layer or problem holds; [B] tensors are float64."""

    kinds: tuple[Guarantee, ...]
    """The guarantee of each sample; ``kind`` is the weakest."""
    residual: Tensor
    """‖z − T(z)‖ as computed in float64, [B]."""
    error_bound: Tensor
    """‖z − z*‖ is at most this, rounding included; inf where nothing is proven. [B]."""
    rounding: Tensor
    """The exact residual is within this of ``residual``; ``error_bound`` includes it. [B]."""
    lipschitz: float | None
    """A Lipschitz constant of x → z* for all inputs, or None; ``lipschitz_note`` says why."""
    lipschitz_note: str
    solver: str
    """What made z, and how it ended."""
    rigorous: bool
    """Whether every bound is proven; False where an estimate had to be used (see ``notes``)."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            *self.first_rows(),
            ("residual", spread(self.residual)),
            ("‖z − z*‖ ≤", spread(self.error_bound)),
            *self.last_rows(),
            ("solver", self.solver),
            *(("note", note) for note in self.notes),
        ]
        return self.written(rows)

    @abstractmethod
    def first_rows(self) -> Rows:
        """What is written before the residual and the error bound."""

    def last_rows(self, of: str = "x") -> Rows:
        """What is written after them."""
        lipschitz = "none" if self.lipschitz is None else number(self.lipschitz)
        return [
            ("rounding", f"{spread(self.rounding)} (of the residual; included in the bound)"),
            (f"Lipschitz in {of}", f"{lipschitz} ({self.lipschitz_note})"),
        ]


def aligned(heading: str, rows: Rows) -> str:
    width = max(len(name) for name, _ in rows)
    made = [f"  {name:<{width}}  {text}".rstrip() for name, text in rows]
    return "\n".join([heading, *made])


def where_known(known: Tensor, kind: Guarantee) -> tuple[Guarantee, ...]:
    """``kind`` for the samples of ``known`` [B], none for the others."""
    return tuple(kind if one else Guarantee.none for one in known.tolist())


def number(value: float) -> str:
    return f"{value:.4g}"


def spread(values: float | Tensor) -> str:
    """One number, or min, median and max; NaN samples are counted apart."""
    if not isinstance(values, Tensor):
        return number(values)
    flat = values.detach().flatten().double().cpu()
    known = flat[~flat.isnan()]
    if flat.numel() == 1 or known.numel() == 0:
        return number(float(flat[0])) if flat.numel() else "no samples"
    least, largest = float(known.min()), float(known.max())
    lost = flat.numel() - known.numel()
    text = f"min {number(least)}, median {number(float(known.median()))}, max {number(largest)}"
    if least == largest:
        text = number(least)
    return f"{text} ({lost} NaN)" if lost else text


def solved(run: Callable[[], Solution[Any]], z: Any = None) -> tuple[Any, str]:
    """z itself, or the solver's answer, and a line that says so; its warnings become that line."""
    if z is not None:
        return z, "z was given"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = run()
    return found.value, "; ".join(part for part in (found.choice, found.summary()) if part)
