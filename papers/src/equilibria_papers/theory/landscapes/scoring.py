"""L(θ* + a d₁ + b d₂) and what else is seen there: accuracy, and how the solves ended."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.data import ImageData
from equilibria.engine import ConvergenceWarning, Result, Solver
from equilibria.nn import equilibrium_layers, observe
from equilibria.solvers import SplittingSolver
from equilibria_papers.theory.checks import check_sizes

from .directions import Direction

__all__ = ["CHANNELS", "Scorer", "cross_entropy", "squared_error", "with_solver"]

CHANNELS = ("loss", "accuracy", "converged", "failed", "steps")
"""What is measured at a point; the last three for networks with equilibrium layers."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [B, ...], targets [B, ...]) → the loss of each sample [B]."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(logits)[target] of each sample, [B]."""
    return F.cross_entropy(logits, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½‖output − target‖² of each sample, [B]."""
    return 0.5 * (outputs - targets).flatten(1).square().sum(1)


def with_solver(
    model: nn.Module, solver: Solver | None, *, keep_splittings: bool = True
) -> nn.Module:
    """A deep copy in eval mode; with another solver in every equilibrium layer if one is given.

    A layer that is solved by operator splitting keeps its splitting, with the tolerance and the
    step limit of ``solver``: its own map need not contract. ``keep_splittings=False`` replaces it.
    """
    made = copy.deepcopy(model).eval()
    if solver is None:
        return made
    if not isinstance(solver, Solver):
        raise TypeError(f"solver={solver!r}: expected a solver such as Anderson(rtol=1e-2).")
    for layer in equilibrium_layers(made).values():
        for module in layer.modules():
            own = getattr(module, "solver", None)
            if isinstance(own, Solver):
                keep = keep_splittings and isinstance(own, SplittingSolver)
                module.solver = _loosened(own, solver) if keep else solver  # type: ignore[assignment]
    return made


def _loosened(own: Solver, given: Solver) -> Solver:
    if isinstance(given, SplittingSolver):
        return given
    return dataclasses.replace(
        own, rtol=given.rtol, atol=given.atol, max_steps=given.max_steps, compact=given.compact
    )


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
        solver: Solver | None = None,
    ) -> None:
        check_sizes("landscape", {"batch_size": batch_size})
        self.model = with_solver(model, solver)
        self.loss = loss
        layers = equilibrium_layers(self.model).values()
        self.solves = bool(layers)
        # Solves of fixed steps (repeat-K) have no tolerance to meet.
        self.fixed_steps = self.solves and all(
            getattr(getattr(each, "solver", None), "fixed_steps", False) for each in layers
        )
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
        with _seen(self.model, self.solves) as seen:
            outputs = self.model(x)
        loss = self.loss(outputs, targets)
        if loss.shape != (len(x),):
            raise ValueError(
                f"the loss must give one number a sample, [{len(x)}], got shape "
                f"{tuple(loss.shape)}: use reduction='none'."
            )
        if targets.is_floating_point():
            right = torch.full_like(loss, torch.nan)
        else:
            right = (outputs.argmax(1) == targets).to(loss.dtype)
        sums = [loss.double().sum(), right.double().sum()]
        if seen is not None:
            sums += _solve_sums(seen, len(x))
        return torch.stack(sums)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Back to the center at the end, whatever happens."""
        try:
            yield
        finally:
            self._move([0.0] * len(self.directions))


@contextmanager
def _seen(model: nn.Module, wanted: bool) -> Iterator[Any]:
    if not wanted:
        yield None
        return
    with observe(model) as found:
        yield found


def _solve_sums(seen: Any, count: int) -> list[Tensor]:
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
