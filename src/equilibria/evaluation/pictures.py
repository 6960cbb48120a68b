"""The pictures of a report: colors of Okabe and Ito and viridis, safe for color-blind eyes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .calibration import Reliability
from .extras import matplotlib_figure
from .solver_statistics import SolverStatistics, layer_label

if TYPE_CHECKING:
    from .report import Report

__all__ = [
    "BLUE",
    "GRAY",
    "ORANGE",
    "save_confusion",
    "save_figure",
    "save_per_class",
    "save_reliability",
    "save_steps",
]

BLUE, ORANGE, GRAY = "#0072B2", "#E69F00", "#666666"
_NAMED = 40
"""Up to how many classes are named along an axis."""
_WRITTEN = 12
"""Up to how many classes have their numbers in the confusion matrix."""


def save_figure(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path


def save_reliability(reliability: Reliability, path: Path, title: str) -> Path:
    """Accuracy against confidence, bin by bin, over the histogram of confidences."""
    figure = matplotlib_figure(5.0, 5.6)
    top, low = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    edges, used = reliability.edges, reliability.count > 0
    width = edges.diff()
    left = edges[:-1][used].tolist()
    top.plot([0, 1], [0, 1], color=GRAY, linestyle="--", linewidth=1, label="perfect")
    top.bar(
        left,
        reliability.accuracy[used].tolist(),
        width[used].tolist(),
        align="edge",
        color=BLUE,
        edgecolor="white",
        linewidth=0.5,
        label="accuracy",
    )
    top.plot(
        reliability.confidence[used].tolist(),
        reliability.accuracy[used].tolist(),
        color=ORANGE,
        marker="o",
        markersize=4,
        linewidth=1.2,
        label="at the bin's mean confidence",
    )
    top.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy in the bin")
    top.set_title(f"{title}\nexpected calibration error {reliability.ece:.4f}", fontsize=10)
    top.legend(loc="upper left", fontsize=8)
    share = reliability.count.double() / reliability.count.sum().clamp_min(1)
    low.bar(edges[:-1].tolist(), share.tolist(), width.tolist(), align="edge", color=GRAY)
    low.set(xlabel="confidence of the prediction", ylabel="share of samples")
    return save_figure(figure, path)


def save_confusion(confusion: Tensor, classes: Sequence[str], path: Path, title: str) -> Path:
    """Share of each class (row) that was predicted as each class (column)."""
    count = len(classes)
    side = min(14.0, max(4.5, 2.2 + 0.42 * count))
    figure = matplotlib_figure(side + 1.0, side)
    axes = figure.subplots()
    share = confusion.double() / confusion.sum(1, keepdim=True)
    image = axes.imshow(share.tolist(), vmin=0, vmax=1, cmap="viridis")
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the class")
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(title, fontsize=10)
    if count <= _NAMED:
        axes.set_xticks(range(count), classes, rotation=90, fontsize=8)
        axes.set_yticks(range(count), classes, fontsize=8)
    if count <= _WRITTEN:
        for row in range(count):
            for column in range(count):
                value = float(share[row, column])
                if value == value and value > 0:
                    color = "black" if value > 0.6 else "white"
                    axes.text(
                        column,
                        row,
                        f"{100 * value:.0f}",
                        ha="center",
                        va="center",
                        color=color,
                        fontsize=7,
                    )
    return save_figure(figure, path)


def save_per_class(
    values: Tensor, classes: Sequence[str], what: str, path: Path, title: str
) -> Path:
    """Bars from the best class to the worst."""
    known = ~values.isnan()
    order = torch.where(known, values, -1.0).argsort(descending=True).tolist()
    order = [k for k in order if bool(known[k])]
    figure = matplotlib_figure(6.0, min(20.0, max(2.4, 1.2 + 0.22 * len(order))))
    axes = figure.subplots()
    places = list(range(len(order)))
    axes.barh(places, [float(values[k]) for k in order], color=BLUE)
    mean = float(values[known].mean()) if order else float("nan")
    axes.axvline(mean, color=ORANGE, linewidth=2)
    axes.set_yticks(places, [classes[k] for k in order], fontsize=8 if len(order) <= 40 else 6)
    axes.set(xlim=(0, 1.01), xlabel=f"{what} of the class", ylim=(len(order) - 0.4, -0.6))
    axes.set_title(f"{title}\nmean of the classes (line): {100 * mean:.1f}%", fontsize=10)
    return save_figure(figure, path)


def save_steps(report: Report, path: Path, title: str) -> Path:
    """Per layer: how many steps solves took, and the residuals that they ended with."""
    sets: list[tuple[str, str, Mapping[str, SolverStatistics]]] = [
        ("as it is", BLUE, report.statistics)
    ]
    if report.converged is not None:
        sets.append(("at equilibrium", ORANGE, report.converged.statistics))
    names = list(report.statistics)
    figure = matplotlib_figure(9.0, max(2.6, 1.4 + 0.36 * len(names) * len(sets)))
    left, right = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(sets)
    for number, (label, color, statistics) in enumerate(sets):
        for place, name in enumerate(names):
            part = statistics.get(name)
            if part is None:
                continue
            y = place + (number - (len(sets) - 1) / 2) * height
            steps = part.histogram.nonzero()[:, 0]
            share = part.histogram[steps].double() / part.solves
            # The area of a dot is the share of solves that took so many steps.
            left.scatter(
                steps.tolist(), [y] * len(steps), s=(12 + 120 * share).tolist(), color=color
            )
            ends = [max(float(value), 1e-17) for value in part.residual]
            right.plot([ends[1], ends[5]], [y, y], color=color, linewidth=4, alpha=0.45)
            right.plot(ends[3], y, "o", color=color, label=label if place == 0 else None)
    left.set_yticks(range(len(names)), [layer_label(n) for n in names], fontsize=8)
    left.set(xlabel="steps (area: share of solves)", ylim=(len(names) - 0.4, -0.6))
    most = max(part.max_steps for _, _, each in sets for part in each.values())
    left.set_xlim(0, 1.06 * most + 0.5)
    right.set_xscale("log")
    right.set_xlabel("relative residual: median, and 5% to 95%")
    if len(sets) > 1:
        right.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    return save_figure(figure, path)
