"""Half of the steps in the first epochs: early in training an answer needs no accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

from torch import nn

from equilibria.adjoints import Phantom
from equilibria.nn.steps import solver_layers

from .config import TrainConfig, refuse


class HalfSteps:
    """⌈K/2⌉ of the K steps in the first ⌊half_steps·epochs⌋ epochs, for layers of fixed steps.

    A ``Phantom`` adjoint takes half of its terms, too. Layers that stop by a tolerance stay as they
    are. The layers are changed inside ``taken`` alone: what is validated or saved has all steps.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        # In decimal digits: 0.29 of 100 epochs are 29, and in floating point 28.
        self.epochs = math.floor(Fraction(str(config.half_steps)) * config.epochs)
        """How many epochs have half of the steps."""
        self._halves = list(_halves(model)) if config.half_steps else []
        if config.half_steps and not self._halves:
            none = f"there is no layer with a fixed number of steps in {type(model).__name__}"
            why = f"{none}; give their solvers rtol=0, atol=0, or leave it at 0"
            refuse("half_steps", config.half_steps, why)

    @contextmanager
    def taken(self, epoch: int) -> Iterator[None]:
        """Run the model inside the block: with half of the steps if ``epoch`` is an early one."""
        halves = self._halves if epoch < self.epochs else []
        own = [(layer, name, getattr(layer, name)) for layer, name, _ in halves]
        try:
            for change in halves:
                setattr(*change)
            yield
        finally:
            for change in own:
                setattr(*change)


def _halves(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """What is changed: layer, attribute, value. Made once: compiled code knows them again."""
    for layer in solver_layers(model).values():
        solver, adjoint = layer.solver, getattr(layer, "adjoint", None)
        if solver.fixed_steps:
            yield layer, "solver", replace(solver, max_steps=-(-solver.max_steps // 2))
            if isinstance(adjoint, Phantom):
                yield layer, "adjoint", replace(adjoint, steps=-(-adjoint.steps // 2))
