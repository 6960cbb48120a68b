"""Measure a landscape row by row, keep what is done, go on where it stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.data import ImageData
from equilibria.engine import Solver, check_number, options

from .directions import Direction, TrainingPlane, random_directions
from .fingerprints import fingerprint, text_fingerprint
from .scoring import Loss, Scorer, cross_entropy
from .surface import LandscapeFileError, Surface

__all__ = ["Grid", "measure_landscape"]


@options
class Grid:
    """Where Φ is measured: ``points`` in each direction, from −radius to radius."""

    points: int = 51
    """In each direction; odd, so that the center is among them."""
    radius: float = 1.0
    """How far to go, in units of the directions."""
    dims: int = 2
    """2 for a surface, 1 for a curve."""

    def __post_init__(self) -> None:
        check_number(self, "points", low=3, high=10_001, integer=True)
        check_number(self, "radius", low=0.0, low_open=True)
        check_number(self, "dims", low=1, high=2, integer=True)
        if self.points % 2 == 0:
            raise ValueError(
                f"Grid(points={self.points}): expected an odd number, so that the center is one of "
                f"the points; take {self.points + 1}."
            )

    def axes(self) -> tuple[Tensor, Tensor]:
        """(a, b) in float64; b is [0] for a curve."""
        half = self.points // 2
        # −half … half over half: exactly symmetric, with an exact zero.
        axis = torch.arange(-half, half + 1, dtype=torch.float64) * (self.radius / half)
        return axis, axis.clone() if self.dims == 2 else torch.zeros(1, dtype=torch.float64)


def measure_landscape(
    model: nn.Module,
    data: ImageData | tuple[Tensor, Tensor],
    directions: Sequence[Direction] | TrainingPlane | None = None,
    *,
    grid: Grid | None = None,
    name: str = "",
    seed: int = 0,
    loss: Loss = cross_entropy,
    solver: Solver | None = None,
    batch_size: int = 256,
    file: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
    on_row: Callable[[Surface], None] | None = None,
) -> Surface:
    """Φ(a, b) = (1/N) Σ loss(f(xᵢ; θ* + a d₁ + b d₂), yᵢ) on a grid around the model's weights θ*.

    The model is copied and evaluated in eval mode, its buffers (running statistics) as they are. A
    loss that is NaN or infinite is a hole of the surface. Where a solver does not converge the
    value is what the network gives, and the shares of samples that converged and that blew up are
    kept beside it.

    With ``file`` every row is saved as soon as it is measured, and a second call goes on where the
    first ended, provided weights, data, directions, grid and solver are the same.

    Args:
        model: the network; weights θ*.
        data: images with classes, or a pair (x [N, ...], targets [N, ...]) as the model takes them.
        directions: one or two, as from ``random_directions``, or a ``TrainingPlane``; filter-
            normalized random ones of ``seed`` if not given.
        grid: 51 × 51 over [−1, 1]² if not given.
        name: for legends; the model's own if empty.
        seed: of random directions.
        loss: (outputs, targets) → one number a sample.
        solver: in place of every equilibrium layer's own, such as ``Anderson(rtol=1e-2)``.
        batch_size: samples at a time.
        file: where to keep the surface (safetensors).
        overwrite: whether a file that holds another landscape may be replaced.
        progress: show a bar on stderr where it is a terminal.
        on_row: called with the surface so far after every row.
    """
    chosen = Grid() if grid is None else grid
    path = directions.path if isinstance(directions, TrainingPlane) else None
    steps = _directions(model, directions, chosen, seed)
    scorer = Scorer(model, data, steps, loss=loss, batch_size=batch_size, solver=solver)
    surface = _fresh(model, scorer, chosen, name or model_name(model), loss, path)
    place = None if file is None else Path(file)
    if place is not None:
        surface = _resumed(surface, place, overwrite)
    with _bar(len(surface.a), int(surface.done.sum()), surface.name, progress) as advance:
        for row in range(len(surface.a)):
            if bool(surface.done[row]):
                continue
            found = _measure_row(scorer, surface, row)
            for channel, values in zip(scorer.channels, found, strict=True):
                surface.values[channel][row] = values
            surface.done[row] = True
            if place is not None:
                surface.save(place)
            if on_row is not None:
                on_row(surface)
            advance()
    return surface


def model_name(model: nn.Module) -> str:
    """The name that it was created by, or its class."""
    return str(getattr(getattr(model, "config", None), "name", type(model).__name__))


def _directions(
    model: nn.Module,
    given: Sequence[Direction] | TrainingPlane | None,
    grid: Grid,
    seed: int,
) -> tuple[Direction, ...]:
    if given is None:
        return random_directions(model, grid.dims, seed=seed)
    found = given.directions if isinstance(given, TrainingPlane) else tuple(given)
    if len(found) < grid.dims:
        raise ValueError(f"{len(found)} direction(s) were given for a grid of {grid.dims} dims.")
    return tuple(found[: grid.dims])


def _fresh(
    model: nn.Module,
    scorer: Scorer,
    grid: Grid,
    name: str,
    loss: Loss,
    path: Tensor | None,
) -> Surface:
    a, b = grid.axes()
    steps = {f"{i}.{n}": t for i, d in enumerate(scorer.directions) for n, t in d.items()}
    about: dict[str, Any] = {
        "model": model_name(model),
        "weights": fingerprint(model.state_dict()),
        # Its text names depths, solvers and their tolerances, which are no weights.
        "network": text_fingerprint(repr(scorer.model)),
        "data": fingerprint({"x": scorer.x, "targets": scorer.targets}),
        "directions": fingerprint(steps),
        "points": grid.points,
        "radius": grid.radius,
        "dims": grid.dims,
        "loss": getattr(loss, "__name__", type(loss).__name__),
        "samples": len(scorer.x),
        "fixed_steps": scorer.fixed_steps,
    }
    nothing = torch.full((len(a), len(b)), torch.nan, dtype=torch.float64)
    values = {channel: nothing.clone() for channel in scorer.channels}
    done = torch.zeros(len(a), dtype=torch.bool)
    return Surface(name, a, b, values, done, about, path)


def _resumed(fresh: Surface, place: Path, overwrite: bool) -> Surface:
    """What the file holds of this very landscape; the fresh one where there is no file."""
    if place.is_dir() or not place.parent.is_dir():
        what = "is a folder" if place.is_dir() else f"lies in no folder ({place.parent})"
        raise FileNotFoundError(f"file={place} {what}; give a file in an existing folder.")
    if not place.exists():
        return fresh
    try:
        held = Surface.load(place)
    except LandscapeFileError:
        if overwrite:
            return fresh
        raise
    differ = [k for k, value in fresh.about.items() if held.about.get(k) != value]
    differ += ["channels"] if set(held.values) != set(fresh.values) else []
    if differ and overwrite:
        return fresh
    if differ:
        parts = [f"{k} ({held.about.get(k)!r} there, {fresh.about.get(k)!r} here)" for k in differ]
        raise LandscapeFileError(
            f"{place} holds another landscape: {', '.join(parts)}. Give another file, or "
            "overwrite=True to replace it."
        )
    return dataclasses.replace(held, name=fresh.name, path=fresh.path)


def _measure_row(scorer: Scorer, surface: Surface, row: int) -> Tensor:
    """[channels, len(b)] on the CPU: the device is read once a row."""
    first = float(surface.a[row])
    flat = len(scorer.directions) == 1
    with scorer.restored():
        columns = [scorer.at(first) if flat else scorer.at(first, float(b)) for b in surface.b]
    return torch.stack(columns, 1).cpu()


@contextmanager
def _bar(total: int, done: int, text: str, shown: bool) -> Iterator[Callable[[], None]]:
    """A function that moves a bar by one row; silent if not shown, or where rich is not there."""
    console: Any = None
    if shown:
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            pass
        else:
            console = Console(stderr=True)
    if console is None or not console.is_terminal:
        yield lambda: None
        return
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("rows"),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(text, total=total, completed=done)
        yield lambda: bar.update(task, advance=1)
