"""Bounds and measurements along a line: over ‖W‖, over the angle of two inputs, over the width."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from matplotlib.transforms import ScaledTranslation
from torch import Tensor, nn

from equilibria.nn import GEQ, OptEq
from equilibria.problems import FixedGamma, dense_norm
from equilibria_papers.theory.pictures import COLORS, MARKERS, new_figure, on_log_axis, plain_ticks

from .comparing import Demonstration, Progress, fresh_pair
from .lipschitz import LipschitzReport, lipschitz_report
from .margin import MarginReport, margin_report
from .report import Provable, Report, double
from .similarity import similarity_report

NORMS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.2, 1.3)
_WIDTHS = (8, 16, 32, 64, 128)
_WIDTH = 32  # of the layers whose similarity is drawn
_STYLE = {"printed": "--", "derived": ":", "ours": "-", "ours, other": "-."}
_FAMILY = {"GEQ": 0, "OptEq": 4}
Role = Literal["measured", "printed", "derived", "ours", "ours, other"]
Wanted = Mapping[str, tuple[Role, str]]  # Label of a line: its role, and the field of the reports

_LIPSCHITZ: dict[str, Wanted] = {
    "GEQ": {
        "measured": ("measured", "measured"),
        "Eq 11": ("printed", "printed"),
        "ours, Λ(μ)": ("ours", "fixed"),
        "ours, at the data": ("ours, other", "at_data"),
    },
    "OptEq": {
        "measured": ("measured", "measured"),
        "Eq 12": ("printed", "printed"),
        "ours": ("ours", "ours"),
    },
}


@dataclass(frozen=True)
class Line:
    """One line of a picture: what it is, whose, and a value (None: refused) for each x."""

    label: str
    layer: str  # "GEQ" or "OptEq"
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
        return asdict(self)


def _family(layer: Provable) -> str:
    return "GEQ" if isinstance(layer, GEQ) else "OptEq"


def _lines(family: str, reports: Sequence[Report | None], wanted: Wanted) -> list[Line]:
    """A line for each label; a gap where there is no report."""
    return [
        Line(f"{family}, {label}", family, role, tuple(getattr(r, name, None) for r in reports))
        for label, (role, name) in wanted.items()
    ]


@torch.no_grad()
def rescaled(layer: Provable, w_norm: float) -> Provable:
    """A dense copy without constraints, its W scaled to ‖W‖₂ = w_norm, in float64."""
    exact: Any = double(layer)
    if exact.convolutional:
        raise TypeError("rescaled takes dense layers; a convolution's norm depends on the map.")
    shared: dict[str, Any] = {"in_channels": exact.in_channels, "prior": exact.prior}
    shared["bias"] = exact.U.bias is not None
    if isinstance(exact, OptEq):
        shared["nu"] = exact.nu
    elif exact.hidden is None and isinstance(exact.gamma, FixedGamma):
        shared["gamma"] = exact.gamma
    else:
        raise ValueError("rescaled takes a GEQ of Eq 6: hidden=None and a fixed γ.")
    made = _plain(exact.channels, exact.mid, **shared)
    weights = {"W.weight": exact.W.weight * (w_norm / dense_norm(exact.W.weight).estimate)}
    weights["U.weight"] = exact.U.weight
    if exact.U.bias is not None:
        weights["U.bias"] = exact.U.bias
    made.load_state_dict(weights)
    return made


def _plain(channels: int, mid: int, gamma: Any = None, **options: Any) -> Provable:
    """A layer of Eq 6 with this γ, or of Eq 4 without one; no constraint, float64, in eval mode."""
    if gamma is None:
        return OptEq(channels, mid, form="hidden", constraint=None, **options).double().eval()
    return GEQ(channels, mid, hidden=None, gamma=gamma, constraint=None, **options).double().eval()


def lipschitz_curves(
    layers: Sequence[Provable],
    x: Tensor,
    norms: Sequence[float] = NORMS,
    *,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Curves:
    """Proposition 3 over μ = ‖W‖: bounds and measured constants of each layer, W rescaled.

    ``seed`` is of the search for what is measured.
    """
    generator = torch.Generator().manual_seed(seed)
    lines: list[Line] = []
    for layer in layers:
        reports: list[LipschitzReport | None] = []
        for mu in norms:
            progress(f"Lipschitz constants at ‖W‖ = {mu:.2f}")
            if isinstance(layer, GEQ) or mu < 1.0:
                reports.append(lipschitz_report(rescaled(layer, mu), x, generator=generator))
            else:
                reports.append(None)
        lines += _lines(_family(layer), reports, _LIPSCHITZ[_family(layer)])
    unit = "Lipschitz constant of x → z*"
    return Curves("Proposition 3", "‖W‖₂", unit, tuple(norms), tuple(lines))


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
    for kind, equation in (("GEQ", "Eq 14"), ("OptEq", "Eq 15")):
        generator = torch.Generator().manual_seed(seed)
        layer: Any = _plain(n, n, gamma if kind == "GEQ" else None, bias=False)
        with torch.no_grad():
            layer.W.weight.copy_(w if kind == "GEQ" else w.mT)
            layer.U.weight.fill_(1.0 / math.sqrt(n))  # E[U²] = 1/n
        r = similarity_report(layer, x1, x2, draws=draws, variance=1.0 / n, generator=generator)
        lines += [
            Line(f"{kind}, measured κ", kind, "measured", r.kappa),
            Line(f"{kind}, {equation}", kind, "printed", r.printed),
            Line(f"{kind}, ours", kind, "ours", r.ours),
        ]
    axis = tuple((theta / math.pi).tolist())
    return Curves(title, "angle θ/π", "similarity κ per neuron", axis, tuple(lines))


def margin_curves(
    axis: str,
    values: Sequence[float],
    make: Callable[[float], Sequence[tuple[Provable, nn.Linear]]],
    data: Demonstration,
    margin: float = 0.05,
) -> Curves:
    """Proposition 2: the excess over the empirical margin loss, of the layers of ``make``."""
    rows: dict[str, list[MarginReport]] = {}
    for value in values:
        for layer, head in make(value):
            found = margin_report(layer, data.x, head, data.labels, margin=margin)
            rows.setdefault(_family(layer), []).append(found)
    lines: list[Line] = []
    for family, reports in rows.items():
        heuristic = ", heuristic" if family == "GEQ" else ""
        wanted: Wanted = {
            f"printed{heuristic}": ("printed", "printed_excess"),
            f"derived{heuristic}": ("derived", "derived_excess"),
            "ours, proven": ("ours", "ours_excess"),
        }
        lines += _lines(family, reports, wanted)
    unit = r"excess over $\hat L_\eta$"
    return Curves("Proposition 2", axis, unit, tuple(map(float, values)), tuple(lines))


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
            values = on_log_axis(line.values)
            if not all(math.isnan(v) for v in values):
                axes.plot(panel.x, values, linewidth=1.4, label=line.label, **_look(line))
        axes.set_yscale("log")
        plain_ticks(axes)
        _zeros(axes, panel)
        axes.set(xlabel=panel.axis, ylabel=panel.unit)
        axes.set_title(panel.title, fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.5)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        axes.legend(fontsize=7, frameon=False, ncols=2, **below)
    return figure


def _look(line: Line) -> dict[str, Any]:
    """One color a layer, one line style a kind of number; what is measured has markers."""
    number = _FAMILY.get(line.layer, 2)
    if line.role == "measured":
        marker = MARKERS[number % len(MARKERS)]
        return {"color": COLORS[number], "linestyle": "none", "marker": marker, "markersize": 4}
    return {"color": COLORS[number], "linestyle": _STYLE[line.role]}


def _zeros(axes: Any, panel: Curves) -> None:
    """Marks at the bottom where a line is zero; several at one place stand side by side."""
    if not any(value == 0.0 for line in panel.lines for value in line.values):
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** 0.12, high)  # room below all points
    taken: Counter[float] = Counter()
    for line in panel.lines:
        look = {"marker": "v", "markerfacecolor": "white", "markersize": 6, **_look(line)}
        if line.role == "measured":
            look["markerfacecolor"] = look["color"]
        look["linestyle"] = "none"
        for x in (x for x, value in zip(panel.x, line.values, strict=True) if value == 0.0):
            # In points from the place itself: the size of the panel does not matter.
            aside = ScaledTranslation(-10 * taken[x] / 72, 4 / 72, axes.figure.dpi_scale_trans)
            at = axes.get_xaxis_transform() + aside
            taken[x] += 1
            axes.plot([x], [0.0], transform=at, **look)
            above = {"xycoords": at, "xytext": (0, 4), "textcoords": "offset points"}
            words = {"ha": "center", "va": "bottom", "fontsize": 7, "color": look["color"]}
            axes.annotate("0", (x, 0.0), **above, **words)


def demonstration_curves(
    pair: Sequence[Demonstration],
    *,
    images: int = 32,
    draws: int = 128,
    margin: float = 0.05,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> dict[str, list[Curves]]:
    """{"lipschitz", "similarity", "margin"}: the panels of each picture."""
    x = pair[0].x[:images]
    lipschitz = lipschitz_curves([one.layer for one in pair], x, seed=seed, progress=progress)
    progress("similarity over the angle")
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(_WIDTH, _WIDTH, generator=generator, dtype=torch.float64)
    random *= 0.9 / float(torch.linalg.matrix_norm(random, 2))
    mean = torch.full((_WIDTH, _WIDTH), 0.9 / _WIDTH, dtype=torch.float64)
    mean_title = r"W = 0.9 $\mathbf{1}\,\mathbf{1}^\top$/n"
    similarity = [
        similarity_curves(w, draws=draws, seed=seed, title=title)
        for w, title in ((random, "W random, ‖W‖ = 0.9"), (mean, mean_title))
    ]
    progress("margin bounds")

    def of_norm(mu: float) -> list[tuple[Provable, nn.Linear]]:
        return [(rescaled(one.layer, mu), one.head) for one in pair]

    def of_width(width: float) -> list[tuple[Provable, nn.Linear]]:
        made: list[tuple[Provable, nn.Linear]] = []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for layer in fresh_pair(int(width)):
                # Norms as those of the pair, so that the width alone changes.
                head = nn.Linear(int(width), 10)
                head.weight *= 0.85 / float(torch.linalg.matrix_norm(head.weight, 2))
                made.append((rescaled(layer, 0.85), head))
        return made

    margins = [
        margin_curves("‖W‖₂", [mu for mu in NORMS if mu < 1.0], of_norm, pair[0], margin),
        margin_curves("width", _WIDTHS, of_width, pair[0], margin),
    ]
    return {"lipschitz": [lipschitz], "similarity": similarity, "margin": margins}
