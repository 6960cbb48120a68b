"""Kinds of guarantee, what every certificate can say, and how it is written: aligned lines."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.result import ConvergenceWarning, Solution

__all__ = [
    "Guarantee",
    "Guaranteed",
    "either",
    "guarantee_rows",
    "lines",
    "number",
    "solved",
    "spread",
]

_WORDS = {
    "contraction": "one equilibrium, and plain iteration converges to it",
    "strong convexity": "one equilibrium (G is strongly convex)",
    "strong monotonicity": "one equilibrium (I − W is strongly monotone)",
    "local": "one equilibrium within the bound below, a strict local minimizer; others may exist",
    "none": "nothing is proven",
}


class Guarantee(enum.StrEnum):
    """What is proven about a sample's equilibrium, strongest first."""

    contraction = "contraction"
    """One equilibrium; plain iteration z ← T(z) converges to it at the rate ρ < 1."""
    strong_convexity = "strong convexity"
    """One equilibrium; T_τ with τ = 2/(m + L) converges to it."""
    strong_monotonicity = "strong monotonicity"
    """One equilibrium; operator splitting with a step from m and L converges to it."""
    local = "local"
    """Exactly one equilibrium within the error bound of z, a strict local minimizer; there may be
    others elsewhere."""
    none = "none"
    """Nothing is proven."""

    @property
    def means_unique(self) -> bool:
        """Whether exactly one equilibrium is proven to exist."""
        return self not in (Guarantee.local, Guarantee.none)


class Guaranteed:
    """A certificate: the guarantee of each sample in ``kinds``, and what follows from them."""

    kinds: tuple[Guarantee, ...]
    residual: Tensor

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


def number(value: float) -> str:
    return f"{value:.4g}"


def spread(values: Tensor) -> str:
    """One number, or min, median and max; NaN samples are counted apart."""
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


def either(value: float | Tensor) -> str:
    return spread(value) if isinstance(value, Tensor) else number(value)


def guarantee_rows(certificate: Guaranteed) -> list[tuple[str, str]]:
    """The guarantees in words, and whether every sample has exactly one equilibrium."""
    counts = {str(kind): 0 for kind in certificate.kinds}
    for kind in certificate.kinds:
        counts[str(kind)] += 1
    total = len(certificate.kinds)
    rows: list[tuple[str, str]] = []
    for name, words in _WORDS.items():
        if name in counts:
            share = "" if counts[name] == total else f" ({counts[name]} of {total} samples)"
            rows.append(("guarantee" if not rows else "", f"{name}: {words}{share}"))
    certain = f"certified for {int(certificate.certified.sum())} of {total} samples"
    return [*rows, ("unique", "yes" if certificate.unique else certain)]


def lines(certificate: Guaranteed, rows: list[tuple[str, str]], *, rigorous: bool) -> str:
    """A heading and aligned rows of (name, text)."""
    total = len(certificate.kinds)
    width = max(len(name) for name, _ in rows)
    samples = "1 sample" if total == 1 else f"{total} samples"
    status = "proven, in float64" if rigorous else "partly estimated, see the notes"
    made = [f"Certificate for {samples}: {status}"]
    made += [f"  {name:<{width}}  {text}".rstrip() for name, text in rows]
    return "\n".join(made)


def solved(run: Callable[[], Solution[Any]], z: Any = None) -> tuple[Any, str]:
    """z itself, or the solver's answer, and a line that says so; its warnings become that line."""
    if z is not None:
        return z, "z was given"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = run()
    return found.value, "; ".join(part for part in (found.choice, found.summary()) if part)
