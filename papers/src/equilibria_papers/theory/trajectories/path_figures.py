"""Pictures of a solver's way: residual curves (4.1), paths in a plane (4.2), training (4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equilibria_papers.theory.pictures import COLORS, GRAY, MARKERS, STYLES, new_figure

from .recording import SolverPath
from .training_path import PCA, TrainingPath, principal_components

# A moment whose states are this much larger than those of the middle one has diverged.
_FLUNG = 10.0
# Ten classes need ten looks: eight colors, two of them again with another marker.
_TEN = (*COLORS[:6], "#999999", "#000000", "#8B4513", "#F0E442")


def residual_figure(groups: Mapping[str, Mapping[str, SolverPath]]) -> Any:
    """The relative residual of Eq 4.2 over the steps, a panel for each group (Figure 4.1).

    ``groups["N(0, 1)"]["Anderson"]`` is a path. The line is the mean over the samples, the band
    goes from the 10% to the 90% quantile, the dotted line is the tolerance.
    """
    panels = _panels(groups)
    figure = new_figure(3.0 * len(panels) + 0.8, 3.0)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, paths) in zip(axes, panels.items(), strict=True):
        for i, (name, path) in enumerate(paths.items()):
            _residuals(axis, name, path, i)
        limit = max(path.tolerance for path in paths.values())
        if limit > 0:
            axis.axhline(limit, color=GRAY, linestyle=":", linewidth=0.8, label="tolerance")
        axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel("evaluations of $f$")
    axes[0].set_ylabel("$\\|f(z) - z\\| \\,/\\, \\|f(z)\\|$")
    axes[-1].legend(frameon=False, fontsize=8)
    return figure


def _residuals(axis: Any, name: str, path: SolverPath, i: int) -> None:
    steps = range(1, path.steps + 1)
    color = COLORS[i % len(COLORS)]
    curve = _positive(path.mean_curve())
    low, high = (_positive(path.quantile_curve(q)) for q in (0.1, 0.9))
    look = {
        "color": color,
        "linestyle": STYLES[i % len(STYLES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 3,
        "markevery": max(1, path.steps // 10),
    }
    axis.plot(steps, curve.numpy(), label=name, **look)
    axis.fill_between(steps, low.numpy(), high.numpy(), color=color, alpha=0.15, linewidth=0)


def _positive(curve: Tensor) -> Tensor:
    """Zero and infinity have no place on a logarithmic axis."""
    return torch.where(torch.isfinite(curve) & (curve > 0), curve, torch.nan)


def path_figure(groups: Mapping[str, SolverPath], *, samples: int = 8) -> Any:
    """z^[0], z^[1], … in the plane of its two principal components, a panel each (Figure 4.2).

    Every panel has its own plane. A line is a sample; it starts at the circle, ends at the cross.
    """
    panels = _panels(groups)
    figure = new_figure(3.2 * len(panels), 3.1)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, path) in zip(axes, panels.items(), strict=True):
        states = _kept(path)[:, :samples]
        plane = principal_components(states)
        _ways(axis, plane.project(states), [_TEN[i % len(_TEN)] for i in range(states.shape[1])])
        axis.set_title(title)
        _label(axis, plane)
    _path_legend(figure)
    return figure


def _path_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    looks: dict[str, dict[str, Any]] = {
        "start": {"marker": "o", "markerfacecolor": "white", "linestyle": "none"},
        "end": {"marker": "x", "linestyle": "none"},
        "one color a sample": {"marker": ".", "markersize": 3},
    }
    handles = [Line2D([], [], color=GRAY, label=text, **look) for text, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def class_figure(training: TrainingPath, *, names: Mapping[int, str] | None = None) -> Any:
    """z* of every sample by class, with the class means drawn as a path through training.

    Small points are the samples at the last moment; the line joins the means of a class over the
    moments, from the open circle to the filled marker.
    """
    plane = training.plane()
    points = plane.project(training.equilibria)
    means = training.class_means(points)
    figure = new_figure(5.2, 4.2)
    axis = figure.subplots()
    for i, label in enumerate(training.classes):
        color, marker = _TEN[i % len(_TEN)], MARKERS[i % len(MARKERS)]
        mine = points[-1, training.labels == label]
        axis.scatter(*mine.T.numpy(), s=6, color=color, alpha=0.35, linewidths=0)
        way = means[:, i].numpy()
        axis.plot(way[:, 0], way[:, 1], color=color, linewidth=1.2)
        axis.plot(*way[0], marker="o", color=color, markerfacecolor="white", markersize=5)
        text = str(label) if names is None else names.get(label, str(label))
        axis.plot(*way[-1], marker=marker, color=color, markersize=6, linestyle="", label=text)
    _label(axis, plane)
    axis.set_title(f"$z^*$ from {training.moments[0]} to {training.moments[-1]}")
    axis.legend(
        frameon=False, fontsize=8, title="class", loc="center left", bbox_to_anchor=(1, 0.5)
    )
    return figure


def training_figure(training: TrainingPath, *, panels: int = 6, columns: int = 3) -> Any:
    """The mean way of every class through the solver, a panel for each moment (Figure 4.3).

    All panels share one plane and one frame, of all iterates of all moments; a moment whose states
    are more than ten times as large as those of the middle one (a training that diverged) counts
    for neither, and its panel says that it leaves the frame. Thin lines are samples.
    """
    count = len(training.paths)
    wanted = min(panels, count)
    # Evenly spread, the first and the last among them.
    shown = [round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)]
    steady = _steady(training)
    kept = [path for path, calm in zip(training.paths, steady, strict=True) if calm]
    plane = principal_components(torch.cat([_kept(path) for path in kept]))
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    figure = new_figure(2.6 * columns + 0.8, 2.5 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis, index in zip(axes.flat, shown, strict=False):
        ways = plane.project(_kept(training.paths[index]))
        colors = {label: _TEN[i % len(_TEN)] for i, label in enumerate(training.classes)}
        _ways(axis, ways, [colors[int(c)] for c in training.labels], faint=True)
        means = training.class_means(ways)
        for i, label in enumerate(training.classes):
            look = {"color": colors[label], "marker": MARKERS[i % len(MARKERS)], "markersize": 2.5}
            axis.plot(*means[:, i].T.numpy(), linewidth=1.2, label=str(label), **look)
        beyond = "" if steady[index] else ", leaves the frame"
        axis.set_title(f"after {training.moments[index]}{beyond}", fontsize=9)
    _frame(axes.flat[0], plane, [training.paths[i] for i in shown if steady[i]])
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel(_share(plane, 1))
    for axis in axes[-1]:
        axis.set_xlabel(_share(plane, 0))
    handles, texts = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside right center", frameon=False, title="class")
    return figure


def _steady(training: TrainingPath) -> list[bool]:
    """Of each moment: whether its finite states are of the size of most others."""
    sizes = []
    for path in training.paths:
        size = torch.linalg.vector_norm(_kept(path).double(), dim=-1)
        finite = size[torch.isfinite(size)]
        sizes.append(float(finite.max()) if len(finite) else float("inf"))
    middle = sorted(sizes)[(len(sizes) - 1) // 2]
    return [size <= _FLUNG * middle or middle == 0.0 for size in sizes]


def _frame(axis: Any, plane: PCA, paths: list[SolverPath]) -> None:
    """The limits of axes that are shared: the box of these ways, with a margin."""
    points = [plane.project(_kept(path)).reshape(-1, 2) for path in paths]
    if not points:
        return
    found = torch.cat(points)
    found = found[torch.isfinite(found).all(1)]
    if not len(found):
        return
    low, high = found.amin(0), found.amax(0)
    margin = torch.where(high > low, 0.05 * (high - low), 1.0)
    axis.set_xlim(float(low[0] - margin[0]), float(high[0] + margin[0]))
    axis.set_ylim(float(low[1] - margin[1]), float(high[1] + margin[1]))


def _ways(axis: Any, ways: Tensor, colors: list[str], *, faint: bool = False) -> None:
    """Lines through [K, B, 2]; samples with points that are not finite end there."""
    for i, color in enumerate(colors):
        way = ways[:, i].numpy()
        axis.plot(
            *(way[:, 0], way[:, 1]),
            color=color,
            linewidth=0.4 if faint else 1.0,
            alpha=0.3 if faint else 0.9,
            marker=None if faint else ".",
            markersize=3,
        )
        if not faint:
            axis.plot(*way[0], marker="o", color=color, markerfacecolor="white", markersize=5)
            axis.plot(*way[-1], marker="x", color=color, markersize=6)


def _label(axis: Any, plane: PCA) -> None:
    axis.set_xlabel(_share(plane, 0))
    axis.set_ylabel(_share(plane, 1))


def _share(plane: PCA, i: int) -> str:
    return f"component {i + 1} ({100 * float(plane.explained[i]):.0f}%)"


def _kept(path: SolverPath) -> Tensor:
    if path.states is None:
        raise ValueError("this path was recorded without states: use keep_states=True.")
    return path.states


def _panels(groups: Mapping[str, Any]) -> Mapping[str, Any]:
    if not groups:
        raise ValueError("there is no path to draw: give one at least.")
    return groups
