"""A measured landscape: the grid, what was measured on it, the file that holds both, and pictures.

Contours on one scale (Figures 4.4 and 4.5).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import safetensors
import safetensors.torch
import torch
from matplotlib.colors import LogNorm, Normalize
from torch import Tensor

from equilibria.engine import write_bytes
from equilibria_papers.theory.pictures import GRAY, SEQUENTIAL, new_figure

_FORMAT = "equilibria-landscape-1"


class LandscapeFileError(ValueError):
    """A file that is no landscape, is damaged, or belongs to another one."""


@dataclass(frozen=True)
class Surface:
    """Φ(a, b) = L(θ* + a d₁ + b d₂) on a grid.

    ``values[channel]`` is [len(a), len(b)] in float64: "loss", "accuracy", and for networks with
    equilibrium layers "converged" and "failed" (shares of the samples) and "steps" (a sample's, all
    layers together). ``done`` [len(a)] says which rows are measured.
    """

    name: str
    a: Tensor
    b: Tensor
    values: dict[str, Tensor]
    done: Tensor
    about: Mapping[str, Any] = field(default_factory=dict)
    """What was measured: fingerprints of weights, data and directions, and settings."""

    @property
    def complete(self) -> bool:
        return bool(self.done.all())

    @property
    def loss(self) -> Tensor:
        """[len(a), len(b)], NaN where it is not measured or not finite."""
        found = self.values["loss"]
        return torch.where(torch.isfinite(found) & self.done.unsqueeze(1), found, torch.nan)

    @property
    def holes(self) -> Tensor:
        """[len(a), len(b)]: measured, and the loss was NaN or infinite."""
        return self.done.unsqueeze(1) & ~torch.isfinite(self.values["loss"])

    def _center(self) -> tuple[Tensor, Tensor]:
        """Of the grid point nearest to the origin."""
        return self.a.abs().argmin(), self.b.abs().argmin()

    def center_loss(self) -> float:
        """Φ at the grid point nearest to the origin."""
        return float(self.loss[self._center()])

    def small_loss_share(self, rise: float = 1.0) -> float:
        """The share of the grid with a loss within ``rise`` of the center's.

        The thesis' "small-loss neighborhood" (§4.2.1) as a number. Holes do not count as small.
        """
        small = self.loss <= self.center_loss() + rise
        return float(small.double().sum() / (self.done.sum() * len(self.b)))

    def summary(self) -> dict[str, Any]:
        """The numbers of a line in a table."""
        loss = self.loss[torch.isfinite(self.loss)]
        found: dict[str, Any] = {
            "name": self.name,
            "grid": f"{len(self.a)} × {len(self.b)}",
            "rows_done": int(self.done.sum()),
            "center_loss": self.center_loss(),
            "min_loss": float(loss.min()) if len(loss) else math.nan,
            "max_loss": float(loss.max()) if len(loss) else math.nan,
            "small_loss_share": self.small_loss_share(),
            "holes": int(self.holes.sum()),
        }
        for key in ("converged", "failed", "steps"):
            meant = key != "converged" or not self.about.get("fixed_steps", False)
            if key in self.values and meant:
                found[key] = float(self.values[key][self.done].mean())
        found["center_accuracy"] = float(self.values["accuracy"][self._center()])
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file with a JSON header: whole, or the older one stays."""
        place = Path(path)
        tensors = {f"values.{name}": value.contiguous() for name, value in self.values.items()}
        tensors |= {"a": self.a, "b": self.b, "done": self.done}
        about = json.dumps(dict(self.about), sort_keys=True)
        header = {"format": _FORMAT, "name": self.name, "about": about}
        write_bytes(place, safetensors.torch.save(tensors, header))
        return place

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Surface:
        """Read a file that ``save`` wrote; nothing is unpickled."""
        place = Path(path)
        if not place.is_file():
            raise FileNotFoundError(f"there is no landscape file {place}.")
        try:
            with safetensors.safe_open(place, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError) as error:
            raise LandscapeFileError(f"{place} cannot be read as a landscape: {error}.") from error
        if header.get("format") != _FORMAT:
            raise LandscapeFileError(
                f"{place} is no landscape of this library: its format is "
                f"{header.get('format')!r}, expected {_FORMAT!r}."
            )
        try:
            a, b, done = (tensors.pop(name) for name in ("a", "b", "done"))
            values = {name.removeprefix("values."): value for name, value in tensors.items()}
            about = json.loads(header["about"])
            made = cls(header["name"], a, b, values, done, about)
            shape = (len(a), len(b))
            if any(v.shape != shape for v in values.values()) or len(done) != shape[0]:
                raise KeyError("values of the grid's shape")
            if not {"loss", "accuracy"} <= set(values):
                raise KeyError("loss and accuracy")
        except (KeyError, json.JSONDecodeError) as error:
            raise LandscapeFileError(f"{place} is damaged: it lacks {error}.") from error
        return made


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
        surfaces: what ``measure_landscape`` gave.
        log: whether levels are spaced evenly in log Φ.
        top: the highest level; what lies above has its color. The largest value if None.
    """
    given = list(surfaces)
    if not given:
        raise ValueError("there is no landscape to draw: give one at least.")
    for surface in given:
        if not bool(torch.isfinite(surface.loss).any()):
            raise ValueError(f"{surface.name} has no finite loss: there is nothing to draw.")
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
