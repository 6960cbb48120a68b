"""Certificates of layers that are maps or made of several parts, without a hidden problem.

A map with the Lipschitz factor ρ < 1 has one fixed point, and ‖z − z*‖ ≤ ‖z − T(z)‖/(1 − ρ). A
monotone layer (I − W ⪰ mI) has one whatever its norm. Parts compose: all must hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equilibria.problems.certificate_text import either, guarantee_rows, lines, spread
from equilibria.problems.guarantee import Guarantee, Guaranteed

__all__ = ["CompositeCertificate", "MapCertificate"]


@dataclass(frozen=True, eq=False)
class MapCertificate(Guaranteed):
    """What is proven for a batch of fixed points z* = T(z*); [B] tensors are float64."""

    kinds: tuple[Guarantee, ...]
    """The guarantee of each sample; ``kind`` is the weakest."""
    residual: Tensor
    """‖z − T(z)‖ as computed in float64, [B]."""
    error_bound: Tensor
    """‖z − z*‖ is at most this, rounding included; inf where nothing is proven. [B]."""
    rounding: Tensor
    """The exact residual is within this of ``residual``; ``error_bound`` has it paid for. [B]."""
    contraction: float | Tensor | None
    """ρ, a Lipschitz constant of T for all z; None where none is known."""
    modulus: float | Tensor | None
    """m with I − W ⪰ mI, rounded down (monotone layers); None elsewhere."""
    lipschitz: float | None
    """A Lipschitz constant of x → z* for all inputs, or None; ``lipschitz_note`` says why."""
    lipschitz_note: str
    solver: str
    """What made z, and how it ended."""
    rigorous: bool
    """Whether every bound is proven; False where an estimate had to be used (see ``notes``)."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """What the bounds were made of, name by name, in words."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        known, factor = self.lipschitz, self.contraction
        rows = [
            *guarantee_rows(self),
            ("unique", _unique(self)),
            (
                "contraction ρ",
                "not known" if factor is None else either(factor),
            ),
        ]
        if self.modulus is not None:
            rows.append(("modulus m", either(self.modulus)))
        rows += [
            ("residual", spread(self.residual)),
            ("‖z − z*‖ ≤", spread(self.error_bound)),
            ("rounding", f"{spread(self.rounding)} (of the residual; paid for in the bound)"),
            (
                "Lipschitz in x",
                f"{'none' if known is None else f'{known:.4g}'} ({self.lipschitz_note})",
            ),
            *self.numbers.items(),
            ("solver", self.solver),
            *(("note", note) for note in self.notes),
        ]
        return lines(self, rows, rigorous=self.rigorous)


@dataclass(frozen=True, eq=False)
class CompositeCertificate(Guaranteed, Mapping[str, Guaranteed]):
    """The certificates of several parts (branches, layers of a model), by name, and their sum.

    A sample is as well off as its worst part; the error of the whole state (all parts beside each
    other) is the root of the sum of squares.
    """

    parts: Mapping[str, Guaranteed]
    note: str = ""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("CompositeCertificate needs at least one part.")
        sizes = {name: len(part.kinds) for name, part in self.parts.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the parts certify batches of different sizes: {sizes}.")

    def __getitem__(self, name: str) -> Guaranteed:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def kinds(self) -> tuple[Guarantee, ...]:  # type: ignore[override]
        """The weakest guarantee of each sample over the parts."""
        order = list(Guarantee)
        columns = zip(*(part.kinds for part in self.parts.values()), strict=True)
        return tuple(max(column, key=order.index) for column in columns)

    @property
    def residual(self) -> Tensor:  # type: ignore[override]
        return _together([part.residual for part in self.parts.values()])

    @property
    def error_bound(self) -> Tensor:
        """A bound on the distance of all states together, [B]; inf where a part has none."""
        found = [getattr(part, "error_bound", None) for part in self.parts.values()]
        if any(t is None for t in found):
            return torch.full_like(self.residual, math.inf)
        return _together([t for t in found if t is not None])

    @property
    def rigorous(self) -> bool:
        return all(bool(getattr(part, "rigorous", False)) for part in self.parts.values())

    def __str__(self) -> str:
        rows = [
            *guarantee_rows(self),
            ("unique", _unique(self)),
            ("residual", spread(self.residual)),
            ("‖z − z*‖ ≤", spread(self.error_bound)),
        ]
        rows += [("note", self.note)] if self.note else []
        text = [lines(self, rows, rigorous=self.rigorous)]
        for name, part in self.parts.items():
            body = str(part).splitlines()
            text.append(f"  {name}: {body[0]}")
            text += [f"    {line}" for line in body[1:]]
        return "\n".join(text)


def _unique(certificate: Guaranteed) -> str:
    if certificate.unique:
        return "yes"
    return f"certified for {int(certificate.certified.sum())} of {len(certificate.kinds)} samples"


def _together(parts: list[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack([p.double().cpu() for p in parts]), dim=0)
    return norm
