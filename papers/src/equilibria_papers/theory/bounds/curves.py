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
from equilibria_papers.theory.pictures import COLORS, MARKERS, new_figure, plain_ticks

from .comparing import Comparison, Demonstration, fresh_pair
from .layer_numbers import Provable, double
from .lipschitz import LipschitzReport, lipschitz_report
from .margin import MarginReport, margin_report
from .similarity import similarity_report

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


# Curves as a picture: one panel each, one color a layer, one line style a kind of number.


_STYLE = {"printed": "--", "derived": ":", "ours": "-", "ours, other": "-."}
_FAMILY = {"GEQ": 0, "OptEq": 4}


def draw_curves(panels: Sequence[Curves], *, width: float = 5.2, height: float = 4.4) -> Any:
    """A figure with one panel a ``Curves``, values on a logarithmic axis; a legend below each.

    A value of zero, which such an axis lacks, stands at its bottom, marked "0": a bound's as a
    hollow ▽, a measured one as the line's own marker.
    """
    if not panels:
        raise ValueError("draw_curves needs one panel or more.")
    figure = new_figure(width * len(panels), height)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for line in panel.lines:
            number = _FAMILY.get(line.family, 2)
            values = [_drawn(v) for v in line.values]
            if all(math.isnan(v) for v in values):
                continue
            measured = line.role == "measured"
            axes.plot(
                panel.x,
                values,
                color=COLORS[number],
                linestyle="none" if measured else _STYLE[line.role],
                marker=MARKERS[number % len(MARKERS)] if measured else None,
                markersize=4,
                linewidth=1.4,
                label=line.label,
            )
        axes.set_yscale("log")
        plain_ticks(axes)
        _zeros(axes, panel)
        axes.set_xlabel(panel.axis)
        axes.set_ylabel(panel.unit)
        axes.set_title(panel.title, fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.legend(
            fontsize=7, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2)
        )
    return figure


def _zeros(axes: Any, panel: Curves) -> None:
    """Marks at the bottom where a line is zero; several at one place stand side by side."""
    from matplotlib.transforms import ScaledTranslation

    if not any(value == 0.0 for line in panel.lines for value in line.values):
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** 0.12, high)  # room below all points
    taken: dict[float, int] = {}
    for line in panel.lines:
        number = _FAMILY.get(line.family, 2)
        color = COLORS[number]
        measured = line.role == "measured"
        look: dict[str, Any] = {
            "color": color,
            "marker": MARKERS[number % len(MARKERS)] if measured else "v",
            "markerfacecolor": color if measured else "white",
            "markersize": 4 if measured else 6,
            "linestyle": "none",
        }
        for x, value in zip(panel.x, line.values, strict=True):
            if value != 0.0:
                continue
            place = taken.setdefault(x, 0)
            taken[x] += 1
            # In points from the place itself: the size of the panel does not matter.
            aside = ScaledTranslation(-10 * place / 72, 4 / 72, axes.figure.dpi_scale_trans)
            at = axes.get_xaxis_transform() + aside
            axes.plot([x], [0.0], transform=at, **look)
            words = {"ha": "center", "va": "bottom", "fontsize": 7, "color": color}
            axes.annotate(
                "0", (x, 0.0), xycoords=at, xytext=(0, 4), textcoords="offset points", **words
            )


def _drawn(value: float | None) -> float:
    """NaN where there is no number, or none that a logarithm has."""
    return math.nan if value is None or not math.isfinite(value) or value <= 0.0 else value


# The pictures of ``equilibria theory bounds``: which curves stand in which.


_WIDTH = 32  # of the layers whose similarity is drawn


def demonstration_curves(
    pair: Sequence[Demonstration],
    *,
    images: int = 32,
    draws: int = 128,
    margin: float = 0.05,
    seed: int = 0,
    told: Told = lambda _: None,
) -> dict[str, list[Curves]]:
    """{"lipschitz", "similarity", "margin"}: the panels of each picture."""
    first = pair[0]
    x = first.x[:images]
    lipschitz = lipschitz_curves([one.layer for one in pair], x, seed=seed, told=told)
    told("similarity over the angle")
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(_WIDTH, _WIDTH, generator=generator, dtype=torch.float64)
    random *= 0.9 / float(torch.linalg.matrix_norm(random, 2))
    mean = torch.full((_WIDTH, _WIDTH), 0.9 / _WIDTH, dtype=torch.float64)
    similarity = [
        similarity_curves(random, draws=draws, seed=seed, title="W random, ‖W‖ = 0.9"),
        similarity_curves(
            mean, draws=draws, seed=seed, title=r"W = 0.9 $\mathbf{1}\,\mathbf{1}^\top$/n"
        ),
    ]
    told("margin bounds")

    def make(width: int) -> list[tuple[Provable, nn.Linear]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = fresh_pair(width)
            made: list[tuple[Provable, nn.Linear]] = []
            for layer in layers:
                # Norms as those of the pair, so that the width alone changes.
                head = nn.Linear(width, 10)
                with torch.no_grad():
                    head.weight *= 0.85 / float(torch.linalg.matrix_norm(head.weight, 2))
                made.append((rescaled(layer, 0.85), head))
        return made

    heads = [(one.layer, one.head) for one in pair]
    return {
        "lipschitz": [lipschitz],
        "similarity": similarity,
        "margin": [
            margin_curves_norm(heads, first.x, first.labels, margin=margin),
            margin_curves_width(make, first.x, first.labels, margin=margin),
        ],
    }


def network_curves(found: Comparison) -> dict[str, list[Curves]]:
    """{"lipschitz"}: printed, ours and measured over the layers of a network, in their order."""
    reports = [r for r in found.reports if isinstance(r, LipschitzReport)]
    lines: list[Line] = []
    for family, gaussian in (("GEQ", True), ("OptEq", False)):
        own: list[Any] = [r if (r.gamma is not None) == gaussian else None for r in reports]
        if not any(own):
            continue
        values = {
            "measured": [None if r is None else r.measured for r in own],
            "Eq 11" if gaussian else "Eq 12": [None if r is None else r.printed for r in own],
            "ours": [None if r is None else r.ours for r in own],
            "ours, local": [None if r is None else r.local for r in own],
        }
        roles = ("measured", "printed", "ours", "ours, other")
        for (label, numbers), role in zip(values.items(), roles, strict=True):
            lines.append(Line(f"{family}, {label}", family, role, tuple(numbers)))  # type: ignore[arg-type]
    axis = tuple(float(i + 1) for i in range(len(reports)))
    title = "Proposition 3, layer by layer"
    return {
        "lipschitz": [Curves(title, "layer", "Lipschitz constant of x → z*", axis, tuple(lines))]
    }
