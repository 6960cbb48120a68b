"""Pictures of landscapes: contours on one scale, surfaces, curves (Figures 4.4 and 4.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from equilibria_papers.theory.pictures import GRAY, SEQUENTIAL, look, new_figure, plain_ticks

from .surface import Surface

_FAILED = 0.5  # hatched where more than this share of the solves blew up
_LEVELS = 20
_DECADES = 4.0  # the log scale goes this far below its top, at most


def contour_figure(
    surfaces: Sequence[Surface], *, log: bool = True, top: float | None = None
) -> Any:
    """Filled contours of Φ(a, b), side by side, all on one color scale.

    Holes (a loss that is not finite) are gray. Where more than half of the solves blew up the
    plane is hatched.

    Args:
        surfaces: of two dimensions.
        log: whether levels are spaced evenly in log Φ.
        top: the highest level; what lies above has its color. The largest value if None.
    """
    given = _checked(surfaces, curve=False)
    edges = _levels(torch.cat([s.loss[torch.isfinite(s.loss)] for s in given]), log, top)
    columns = min(len(given), 4)
    rows = -(-len(given) // columns)
    figure = new_figure(2.6 * columns + 1.0, 2.5 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    drawn = None
    # The color bar's arrow says that something lies above the top, so only where it does.
    over = "max" if any(bool((s.loss > edges[-1]).any()) for s in given) else "neither"
    for axis, surface in zip(axes.flat, given, strict=False):
        drawn = _contours(axis, surface, edges, log, over)
        axis.set_title(surface.name)
        axis.set_facecolor(GRAY)
        axis.set_aspect("equal")
    for axis in axes.flat[len(given) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("along $d_2$")
    for axis in axes[-1]:
        axis.set_xlabel("along $d_1$")
    bar = figure.colorbar(drawn, ax=axes, label="loss")
    if log:
        low, high = math.log10(edges[0]), math.log10(edges[-1])
        ticks = [10.0**k for k in range(math.ceil(low), math.floor(high) + 1)]
        if len(ticks) < 2:
            ticks = [float(e) for e in edges[:: max(1, len(edges) // 5)]]
        bar.set_ticks(ticks, labels=[f"{t:.3g}" for t in ticks])
        bar.ax.minorticks_off()
    return figure


def surface_figure(surface: Surface, *, log: bool = False, top: float | None = None) -> Any:
    """Φ(a, b) as a surface in three dimensions; holes are left out.

    What lies above ``top`` (the largest value if None) is cut off there.
    """
    (given,) = _checked([surface], curve=False)
    grid = given.loss
    highest = float(grid[torch.isfinite(grid)].max()) if top is None else top
    shown = grid.clamp(max=highest)
    if log:
        shown = shown.clamp_min(highest * 10**-_DECADES).log10()
    a, b = torch.meshgrid(given.a, given.b, indexing="ij")
    figure = new_figure(5.2, 4.2)
    axis = figure.add_subplot(projection="3d")
    heights = numpy.ma.masked_invalid(shown.numpy())
    low, high = float(heights.min()), float(heights.max())
    drawn = axis.plot_surface(
        *(a.numpy(), b.numpy(), heights.filled(numpy.nan)),
        cmap=SEQUENTIAL,
        vmin=low,
        vmax=high if high > low else low + 1.0,
        rstride=1,
        cstride=1,
        linewidth=0.1,
        antialiased=True,
    )
    for part in (axis.xaxis, axis.yaxis):
        part.set_major_locator(MaxNLocator(5))
    axis.set_xlabel("along $d_1$")
    axis.set_ylabel("along $d_2$")
    label = "$\\log_{10}$ loss" if log else "loss"
    axis.set_zlabel(label)
    figure.colorbar(drawn, ax=axis, label=label, shrink=0.6, pad=0.12)
    axis.set_title(given.name)
    return figure


def curve_figure(surfaces: Sequence[Surface], *, log: bool = False) -> Any:
    """Loss and accuracy along one direction, one line per network."""
    given = _checked(surfaces, curve=True)
    figure = new_figure(7.2, 3.2)
    loss, accuracy = figure.subplots(1, 2)
    for i, surface in enumerate(given):
        marks = {"markevery": max(1, len(surface.a) // 10), "markersize": 4, "label": surface.name}
        loss.plot(surface.a.numpy(), surface.loss[:, 0].numpy(), **look(i), **marks)
        right = surface.values["accuracy"][:, 0]
        if bool(torch.isfinite(right).any()):
            accuracy.plot(surface.a.numpy(), 100 * right.numpy(), **look(i), **marks)
    if log:
        loss.set_yscale("log")
        plain_ticks(loss)
    loss.set_ylabel("loss")
    accuracy.set_ylabel("accuracy (%)")
    for axis in (loss, accuracy):
        axis.set_xlabel("along $d_1$")
    loss.legend(frameon=False)
    return figure


def _checked(surfaces: Sequence[Surface], *, curve: bool) -> list[Surface]:
    given = list(surfaces)
    if not given:
        raise ValueError("there is no landscape to draw: give one at least.")
    for surface in given:
        if surface.is_curve != curve:
            other = "curve_figure" if surface.is_curve else "contour_figure or surface_figure"
            raise ValueError(
                f"{surface.name} is a {'curve' if surface.is_curve else 'surface'}: use {other}."
            )
        if not bool(torch.isfinite(surface.loss).any()):
            raise ValueError(f"{surface.name} has no finite loss: there is nothing to draw.")
    return given


def _levels(values: Tensor, log: bool, top: float | None) -> Any:
    """Increasing edges of the levels for these finite values."""
    low, high = float(values.min()), float(values.max())
    high = high if top is None else float(top)
    if log and high > 0:
        low = max(low, high * 10**-_DECADES)
        if high <= low * 1.001:
            high = low * 1.1
        return numpy.geomspace(low, high, _LEVELS + 1)
    if high - low <= 1e-9 * max(abs(low), 1.0):
        high = low + max(abs(low), 1.0) * 0.1
    return numpy.linspace(low, high, _LEVELS + 1)


def _contours(axis: Any, surface: Surface, edges: Any, log: bool, over: str) -> Any:
    a, b = surface.a.numpy(), surface.b.numpy()
    # contourf takes [len(y), len(x)]: the first direction goes to the right.
    shown = numpy.ma.masked_invalid(surface.loss.T.numpy())
    shown = numpy.ma.clip(shown, edges[0], None)
    norm = (LogNorm if log else Normalize)(edges[0], edges[-1])
    filled = {"levels": edges, "norm": norm, "cmap": SEQUENTIAL, "extend": over, "zorder": 1}
    drawn = axis.contourf(a, b, shown, **filled)
    axis.contour(a, b, shown, levels=edges[1:-1:2], colors="white", linewidths=0.3, zorder=2)
    if "failed" in surface.values:
        measured = torch.where(surface.done.unsqueeze(1), surface.values["failed"], torch.nan)
        failed = torch.nan_to_num(measured, nan=0.0).T.numpy()
        if failed.max() > _FAILED:
            axis.contourf(a, b, failed, levels=[_FAILED, 1.1], colors="none", hatches=["///"])
    axis.plot(0, 0, marker="+", color="white", markersize=6, zorder=3)
    axis.set_xlim(a[0], a[-1])
    axis.set_ylim(b[0], b[-1])
    return drawn
