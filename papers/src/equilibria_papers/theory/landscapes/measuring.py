"""Measure a landscape row by row, keep what is done, go on where it stopped.

Directions in weight space that can be compared between networks: d_i ← d_i ‖w_i‖ / ‖d_i‖, filter
normalization (Li et al. 2018). Every filter of a random direction gets the norm of the weights'
filter at the same place, so that a step of 1 changes each filter by its own size, however the
network is scaled. A weight with a norm bound (``NormBounded``) is moved by its raw parameter and
then scaled back onto the bound, so there the step that acts is not the filter's norm.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.data import ImageData
from equilibria.engine import ConvergenceWarning, Result, SolverOptions, check_number, options
from equilibria.evaluation import replaced
from equilibria.nn import equilibrium_layers, observe
from equilibria.solvers import Picard, SplittingSolver
from equilibria_papers.theory.checks import check_sizes
from equilibria_papers.theory.progress import progress_bar

from .surface import LandscapeFileError, Surface

Direction = dict[str, Tensor]
"""name of a parameter → step of its shape; parameters that stay where they are do not appear."""

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def filter_dims(model: nn.Module) -> dict[str, int]:
    """name → the dimension that counts filters, of every parameter that a direction moves.

    A filter is what makes one output: a kernel of a convolution, a row of a matrix. Vectors
    (biases, gains of norms) are left out, as by Li et al., and so are parameters that do not train.
    """
    transposed = {id(m.weight) for m in model.modules() if isinstance(m, _TRANSPOSED)}
    found = {
        name: 1 if id(weight) in transposed else 0
        for name, weight in model.named_parameters()
        if weight.ndim >= 2 and weight.is_floating_point() and weight.requires_grad
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no parameter of two or more dimensions to move."
        )
    return found


def random_directions(model: nn.Module, count: int = 2, *, seed: int = 0) -> tuple[Direction, ...]:
    """``count`` Gaussian directions, each filter with the norm of the weights' own.

    Args:
        model: whose weights are the center; its parameters are only read.
        count: how many.
        seed: the same seed gives the same directions on every device.
    """
    check_sizes("random_directions", {"count": count})
    dims = filter_dims(model)
    weights = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(seed)

    def draw(weight: Tensor, dim: int) -> Tensor:
        # On the CPU in float64: the same numbers on every device and in every precision.
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        drawn = drawn.to(weight.device)
        scale = _filter_norms(weight, dim) / _filter_norms(drawn, dim).clamp_min(1e-300)
        return (drawn * scale).to(weight.dtype)

    return tuple({name: draw(weights[name], d) for name, d in dims.items()} for _ in range(count))


def _filter_norms(weight: Tensor, dim: int) -> Tensor:
    """‖w_i‖ of each filter i in float64, shaped to multiply the weight."""
    others = [d for d in range(weight.ndim) if d != dim]
    norms: Tensor = torch.linalg.vector_norm(weight.detach().double(), dim=others, keepdim=True)
    return norms


CHANNELS = ("loss", "accuracy", "converged", "failed", "steps")
"""What is measured at a point; the last three for networks with equilibrium layers."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [B, ...], targets [B, ...]) → the loss of each sample [B]."""


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits of the SHA-256 of names, dtypes, shapes and bytes, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(logits)[target] of each sample, [B]."""
    return F.cross_entropy(logits, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½‖output − target‖² of each sample, [B]."""
    return 0.5 * (outputs - targets).flatten(1).square().sum(1)


def with_solver(model: nn.Module, solver: SolverOptions | None) -> nn.Module:
    """A deep copy in eval mode; with another solver in every equilibrium layer if one is given.

    A layer that is solved by operator splitting keeps its splitting, with the tolerance and the
    step limit of ``solver``: its own map need not contract.
    """
    if solver is None:
        return copy.deepcopy(model).eval()
    made = replaced(model, solver=solver).eval()
    taken = {k: getattr(solver, k) for k in ("rtol", "atol", "max_steps", "compact")}
    for before, after in zip(model.modules(), made.modules(), strict=True):
        own: Any = getattr(before, "solver", None)
        if isinstance(own, SplittingSolver) and not isinstance(solver, SplittingSolver):
            after.solver = dataclasses.replace(own, **taken)  # type: ignore[assignment]
    return made


class Scorer:
    """Moves a copy of the weights along directions and measures on fixed data, without a graph."""

    def __init__(
        self,
        model: nn.Module,
        data: ImageData | tuple[Tensor, Tensor],
        directions: Sequence[Direction],
        *,
        loss: Loss = cross_entropy,
        batch_size: int = 256,
        solver: SolverOptions | None = None,
    ) -> None:
        check_sizes("landscape", {"batch_size": batch_size})
        self.model = with_solver(model, solver)
        self.loss = loss
        self.solves = bool(equilibrium_layers(self.model))
        # Solves of fixed steps (repeat-K) have no tolerance to meet, nor have branches of them.
        found = [getattr(module, "solver", None) for module in self.model.modules()]
        solvers = [one for one in found if isinstance(one, SolverOptions)]
        self.fixed_steps = bool(solvers) and all(one.fixed_steps for one in solvers)
        self.x, self.targets = _on_device(self.model, data)
        self.batch_size = batch_size
        weights = dict(self.model.named_parameters())
        for number, direction in enumerate(directions, 1):
            _check_direction(number, direction, weights)
        self.names = sorted({name for direction in directions for name in direction})
        self.center = {name: weights[name].detach().clone() for name in self.names}
        self.directions = [
            {name: step.to(weights[name]) for name, step in direction.items()}
            for direction in directions
        ]
        self._weights = weights

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of what ``at`` measures, in its order."""
        return CHANNELS if self.solves else CHANNELS[:2]

    def at(self, *steps: float) -> Tensor:
        """The channels at θ* + Σ stepᵢ dᵢ, float64 on the device: nothing is read from it."""
        self._move(steps)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            parts = [
                self._part(self.x[i : i + self.batch_size], self.targets[i : i + self.batch_size])
                for i in range(0, len(self.x), self.batch_size)
            ]
        return torch.stack(parts).sum(0) / len(self.x)

    def _move(self, steps: Sequence[float]) -> None:
        with torch.no_grad():
            for name in self.names:
                weight = self._weights[name]
                weight.copy_(self.center[name])
                for size, direction in zip(steps, self.directions, strict=True):
                    if name in direction and size != 0.0:
                        weight.add_(direction[name], alpha=size)

    def _part(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sums over the samples of a batch."""
        with observe(self.model) if self.solves else nullcontext() as seen:
            outputs = self.model(x)
        loss = self.loss(outputs, targets)
        if loss.shape != (len(x),):
            raise ValueError(
                f"the loss must give one number per sample, [{len(x)}], got shape "
                f"{tuple(loss.shape)}: use reduction='none'."
            )
        if targets.is_floating_point():
            right = torch.full_like(loss, torch.nan)
        else:
            right = (outputs.argmax(1) == targets).to(loss.dtype)
        sums = [loss.double().sum(), right.double().sum()]
        if seen is not None:
            sums += _solve_sums(seen)
        return torch.stack(sums)


def _solve_sums(seen: Any) -> list[Tensor]:
    """Samples of which every layer converged; of which some layer blew up; steps of all layers."""
    solutions = [s for found in seen.solutions.values() for s in found]
    codes = torch.stack([s.result for s in solutions])
    converged = (codes == int(Result.converged)).all(0).double().sum()
    blown = (codes == int(Result.diverged)) | (codes == int(Result.nonfinite))
    steps = torch.stack([s.stats.steps for s in solutions]).double().sum()
    return [converged, blown.any(0).double().sum(), steps]


def _on_device(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    """Inputs as the model takes them and targets, on its device."""
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is None:
        raise ValueError(f"{type(model).__name__} has no weights: there is no landscape.")
    if isinstance(data, ImageData):
        if data.task != "classification":
            raise ValueError(f"a landscape takes images with classes; {data.name} is {data.task}.")
        x, targets = data.normalize(data.images[:].cpu()), data.targets[:]
    elif isinstance(data, (tuple, list)) and len(data) == 2:
        x, targets = data
    else:
        raise TypeError(
            f"data must be ImageData (equilibria.data.load) or a pair (x, targets) of tensors, "
            f"got {type(data).__name__}."
        )
    if len(x) != len(targets) or len(x) == 0:
        raise ValueError(f"{len(x)} inputs and {len(targets)} targets: expected as many, not none.")
    return x.to(like.device, like.dtype), targets.to(like.device)


def _check_direction(number: int, direction: Direction, weights: dict[str, Any]) -> None:
    for name, step in direction.items():
        if name not in weights:
            raise ValueError(f"direction {number} moves {name!r}, which the model does not have.")
        if step.shape != weights[name].shape:
            raise ValueError(
                f"direction {number}: {name} has shape {tuple(weights[name].shape)} in the model "
                f"and {tuple(step.shape)} in the direction."
            )


@options
class Grid:
    """Where Φ is measured: ``points`` in each direction, from −radius to radius."""

    points: int = 51  # In each direction; odd, so that the center is among them
    radius: float = 1.0  # How far to go, in units of the directions

    def __post_init__(self) -> None:
        check_number(self, "points", low=3, high=10_001, integer=True)
        check_number(self, "radius", low=0.0, low_open=True)
        if self.points % 2 == 0:
            raise ValueError(
                f"Grid(points={self.points}): expected an odd number, so that the center is one of "
                f"the points; take {self.points + 1}."
            )

    def axis(self) -> Tensor:
        """The points of both directions, in float64."""
        half = self.points // 2
        # −half … half over half: exactly symmetric, with an exact zero.
        return torch.arange(-half, half + 1, dtype=torch.float64) * (self.radius / half)


def measure_landscape(
    model: nn.Module,
    data: ImageData | tuple[Tensor, Tensor],
    directions: Sequence[Direction] | None = None,
    *,
    grid: Grid | None = None,
    name: str = "",
    seed: int = 0,
    loss: Loss = cross_entropy,
    solver: SolverOptions | None = None,
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
    kept beside it. With ``file`` every row is saved as soon as it is measured, and a second call
    goes on where the first ended, provided weights, data, directions, grid and solver are the same.

    Args:
        data: images with classes, or a pair (x [N, ...], targets [N, ...]) as the model takes them.
        directions: two; filter-normalized random ones of ``seed`` if not given.
        grid: 51 × 51 over [−1, 1]² if not given.
        name: for legends; the model's own if empty.
        loss: (outputs, targets) → one number per sample.
        solver: in place of every equilibrium layer's own, such as ``Anderson(rtol=1e-2)``.
        file: where to keep the surface (safetensors).
        overwrite: whether a file that holds another landscape may be replaced.
        progress: show a bar on stderr where it is a terminal.
        on_row: called with the surface so far after every row.
    """
    chosen = Grid() if grid is None else grid
    if directions is None:
        directions = random_directions(model, seed=seed)
    if len(directions) != 2:
        raise ValueError(f"{len(directions)} direction(s) were given for a grid in a plane.")
    scorer = Scorer(model, data, directions, loss=loss, batch_size=batch_size, solver=solver)
    surface = _fresh(model, scorer, chosen, name or model_name(model))
    place = None if file is None else Path(file)
    if place is not None:
        surface = _resumed(surface, place, overwrite)
    with progress_bar(surface.name, progress) as update:
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
            update(int(surface.done.sum()), len(surface.a))
    return surface


def model_name(model: nn.Module) -> str:
    """The name that it was created by, or its class."""
    return str(getattr(getattr(model, "config", None), "name", type(model).__name__))


def _fresh(model: nn.Module, scorer: Scorer, grid: Grid, name: str) -> Surface:
    a = grid.axis()
    loss = scorer.loss
    steps = {f"{i}.{n}": t for i, d in enumerate(scorer.directions) for n, t in d.items()}
    about: dict[str, Any] = {
        "model": model_name(model),
        "weights": fingerprint(model.state_dict()),
        # Its text names depths, solvers and their tolerances, which are no weights.
        "network": hashlib.sha256(repr(scorer.model).encode()).hexdigest()[:16],
        "data": fingerprint({"x": scorer.x, "targets": scorer.targets}),
        "directions": fingerprint(steps),
        "points": grid.points,
        "radius": grid.radius,
        "dims": 2,
        "loss": getattr(loss, "__name__", type(loss).__name__),
        "samples": len(scorer.x),
        "fixed_steps": scorer.fixed_steps,
    }
    nothing = torch.full((len(a), len(a)), torch.nan, dtype=torch.float64)
    values = {channel: nothing.clone() for channel in scorer.channels}
    done = torch.zeros(len(a), dtype=torch.bool)
    return Surface(name, a, a.clone(), values, done, about)


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
            "overwrite=True (--overwrite) to replace it."
        )
    return dataclasses.replace(held, name=fresh.name)


def _measure_row(scorer: Scorer, surface: Surface, row: int) -> Tensor:
    """[channels, len(b)] on the CPU: the device is read once a row."""
    first = float(surface.a[row])
    columns = [scorer.at(first, float(b)) for b in surface.b]
    return torch.stack(columns, 1).cpu()


def repeated(model: nn.Module, repeats: int) -> nn.Module:
    """repeat-K: a copy in eval mode whose equilibrium layers take exactly ``repeats`` plain steps.

    K steps of Picard from the layer's start are the explicit network that repeats the layer's map
    K times; of a DEQ this is ``deq.repeated(K)``, with the same weights.
    """
    if not equilibrium_layers(model):
        raise ValueError(
            f"{type(model).__name__} has no equilibrium layer to repeat: give a network with a "
            "layer of equilibria.nn (a DEQ, a GEQ, …)."
        )
    check_sizes("repeated", {"repeats": repeats})
    plain = Picard(rtol=0.0, atol=0.0, max_steps=repeats)
    return replaced(model, solver=plain).eval()
