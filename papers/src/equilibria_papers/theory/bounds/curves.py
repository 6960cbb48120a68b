"""Bounds and measurements along a line: over ‖W‖, over the angle of two inputs, over the width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.nn import GEQ, OptEq
from equilibria.problems import FixedGamma, dense_norm

from .lipschitz import lipschitz_report
from .margin import MarginReport, margin_report
from .measuring import Provable, double
from .similarity import similarity_report

__all__ = [
    "Curves",
    "Line",
    "lipschitz_curves",
    "margin_curves_norm",
    "margin_curves_width",
    "rescaled",
    "similarity_curves",
]

NORMS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.2, 1.3)
_EXCESS = r"excess over $\hat L_\eta$"
Told = Callable[[str], None]
Role = Literal["measured", "printed", "derived", "ours", "ours, other"]


@dataclass(frozen=True)
class Line:
    """One line of a picture: what it is, whose, and a value (None: refused) for each x."""

    label: str
    family: str
    role: Role
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Curves:
    """A panel: lines over one axis."""

    title: str
    axis: str
    unit: str
    x: tuple[float, ...]
    lines: tuple[Line, ...]

    def to_dict(self) -> dict[str, Any]:
        lines = [
            {"label": line.label, "layer": line.family, "role": line.role, "values": line.values}
            for line in self.lines
        ]
        return {
            "title": self.title,
            "axis": self.axis,
            "unit": self.unit,
            "x": self.x,
            "lines": lines,
        }


@torch.no_grad()
def rescaled(layer: Provable, w_norm: float) -> Provable:
    """A dense copy without constraints, its W scaled to ‖W‖₂ = w_norm, in float64."""
    exact = double(layer)
    if exact.convolutional:
        raise TypeError("rescaled takes dense layers; a convolution's norm depends on the map.")
    sizes: dict[str, Any] = {"in_channels": exact.in_channels, "prior": exact.prior}
    sizes["constraint"] = None
    bias: Any = exact.U.bias
    made: Provable
    if isinstance(exact, GEQ):
        if exact.hidden is not None or not isinstance(exact.gamma, FixedGamma):
            raise ValueError("rescaled takes a GEQ of Eq 6: hidden=None and a fixed γ.")
        made = GEQ(
            exact.channels,
            exact.mid,
            hidden=None,
            gamma=exact.gamma,
            bias=bias is not None,
            **sizes,
        )
    else:
        made = OptEq(
            exact.channels, exact.mid, form="hidden", nu=exact.nu, bias=bias is not None, **sizes
        )
    made = made.double().eval()
    weight: Any = exact.W.weight
    _set(made.W, weight * (w_norm / dense_norm(weight).estimate))
    u: Any = exact.U.weight
    _set(made.U, u, bias)
    return made


def _set(module: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    module.weight.copy_(weight)
    if bias is not None:
        module.bias.copy_(bias)


def _lines(
    family: str, rows: Sequence[dict[str, float | None]], roles: dict[str, Role]
) -> list[Line]:
    return [
        Line(f"{family}, {label}", family, role, tuple(row[label] for row in rows))
        for label, role in roles.items()
    ]


def lipschitz_curves(
    layers: Sequence[Provable],
    x: Tensor,
    norms: Sequence[float] = NORMS,
    *,
    seed: int = 0,
    told: Told = lambda _: None,
) -> Curves:
    """Proposition 3 over μ = ‖W‖: bounds and measured constants of each layer, W rescaled.

    ``seed`` is of the search for what is measured.
    """
    generator = torch.Generator().manual_seed(seed)
    lines: list[Line] = []
    for layer in layers:
        gaussian = isinstance(layer, GEQ)
        rows: list[dict[str, float | None]] = []
        for mu in norms:
            told(f"Lipschitz constants at ‖W‖ = {mu:.2f}")
            if not gaussian and mu >= 1.0:
                rows.append(dict.fromkeys(("measured", "Eq 12", "ours"), None))
                continue
            r = lipschitz_report(rescaled(layer, mu), x, generator=generator)
            if gaussian:
                row = {"measured": r.measured, "Eq 11": r.printed, "ours, Λ(μ)": r.fixed}
                rows.append({**row, "ours, at the data": r.at_data})
            else:
                rows.append({"measured": r.measured, "Eq 12": r.printed, "ours": r.ours})
        roles: dict[str, Role]
        if gaussian:
            roles = {"measured": "measured", "Eq 11": "printed", "ours, Λ(μ)": "ours"}
            roles["ours, at the data"] = "ours, other"
        else:
            roles = {"measured": "measured", "Eq 12": "printed", "ours": "ours"}
        lines += _lines("GEQ" if gaussian else "OptEq", rows, roles)
    return Curves(
        "Proposition 3", "‖W‖₂", "Lipschitz constant of x → z*", tuple(norms), tuple(lines)
    )


def _square(kind: Literal["GEQ", "OptEq"], w: Tensor, gamma: float) -> Provable:
    n = len(w)
    made: Provable
    if kind == "GEQ":
        made = GEQ(n, n, hidden=None, gamma=gamma, constraint=None, bias=False)
    else:
        made = OptEq(n, n, form="hidden", constraint=None, bias=False)
    made = made.double().eval()
    with torch.no_grad():
        _set(made.W, w if kind == "GEQ" else w.mT)
        _set(made.U, torch.full((n, n), 1.0 / math.sqrt(n), dtype=torch.float64))  # E[U²] = 1/n
    return made


def similarity_curves(
    w: Tensor,
    *,
    gamma: float = 0.5,
    size: float = 2.0,
    angles: int = 13,
    draws: int = 256,
    seed: int = 0,
    title: str = "Proposition 4",
) -> Curves:
    """Proposition 4 over the angle: κ of GEQ and OptEq with this W [n, n], E[U²] = 1/n.

    The two inputs have length ``size`` and lie in one plane; κ is measured over ``draws`` of U.
    """
    n = len(w)
    theta = torch.linspace(0.0, math.pi, angles, dtype=torch.float64)
    x1 = torch.zeros(angles, n, dtype=torch.float64)
    x1[:, 0] = size
    x2 = torch.zeros_like(x1)
    x2[:, 0], x2[:, 1] = size * theta.cos(), size * theta.sin()
    lines: list[Line] = []
    kinds: tuple[Literal["GEQ", "OptEq"], ...] = ("GEQ", "OptEq")
    for kind in kinds:
        generator = torch.Generator().manual_seed(seed)
        layer = _square(kind, w.double(), gamma)
        r = similarity_report(layer, x1, x2, draws=draws, variance=1.0 / n, generator=generator)
        equation = "Eq 14" if kind == "GEQ" else "Eq 15"
        lines += [
            Line(f"{kind}, measured κ", kind, "measured", r.kappa),
            Line(f"{kind}, {equation}", kind, "printed", r.printed),
            Line(f"{kind}, ours", kind, "ours", r.ours),
        ]
    axis = tuple((theta / math.pi).tolist())
    return Curves(title, "angle θ/π", "similarity κ per neuron", axis, tuple(lines))


def _margin_lines(rows: dict[str, list[MarginReport]]) -> tuple[Line, ...]:
    made: list[Line] = []
    for family, reports in rows.items():
        heuristic = ", heuristic" if family == "GEQ" else ""
        printed, derived, ours = (
            tuple(getattr(r, f"{which}_excess") for r in reports)
            for which in ("printed", "derived", "ours")
        )
        made += [
            Line(f"{family}, printed{heuristic}", family, "printed", printed),
            Line(f"{family}, derived{heuristic}", family, "derived", derived),
            Line(f"{family}, ours, proven", family, "ours", ours),
        ]
    return tuple(made)


def margin_curves_norm(
    layers: Sequence[tuple[Provable, nn.Linear]],
    x: Tensor,
    labels: Tensor,
    norms: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    *,
    margin: float = 0.05,
) -> Curves:
    """Proposition 2 over ‖W‖: the excess over the empirical margin loss, W rescaled."""
    rows: dict[str, list[MarginReport]] = {}
    for layer, head in layers:
        family = "GEQ" if isinstance(layer, GEQ) else "OptEq"
        rows[family] = [
            margin_report(rescaled(layer, mu), x, head, labels, margin=margin) for mu in norms
        ]
    return Curves("Proposition 2", "‖W‖₂", _EXCESS, tuple(norms), _margin_lines(rows))


def margin_curves_width(
    make: Callable[[int], Sequence[tuple[Provable, nn.Linear]]],
    x: Tensor,
    labels: Tensor,
    widths: Sequence[int] = (8, 16, 32, 64, 128),
    *,
    margin: float = 0.05,
) -> Curves:
    """Proposition 2 over the width: ``make(width)`` gives layers with their classifiers."""
    rows: dict[str, list[MarginReport]] = {}
    for width in widths:
        for layer, head in make(width):
            family = "GEQ" if isinstance(layer, GEQ) else "OptEq"
            rows.setdefault(family, []).append(margin_report(layer, x, head, labels, margin=margin))
    axis = tuple(float(width) for width in widths)
    return Curves("Proposition 2", "width", _EXCESS, axis, _margin_lines(rows))
