"""The network of an estimator: an equilibrium layer on vectors and a linear head, y = Vz* + a."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria.adjoints import Phantom
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions
from equilibria.nn import GEQ, DeepOptEq, NormBounded, OperatorNorm, OptEq
from equilibria.solvers import Auto

LAYERS = ("geq", "opteq", "deep_opteq", "explicit")
LayerChoice = str | Callable[[int, int], nn.Module]

# Training follows the equilibrium closely enough; what is predicted is solved to what the dtype can
# reach (1e-8 in float64), so that it does not show how the solver got there.
TRAINING_SOLVER = Auto(rtol=1e-3, max_steps=500, block=2)
PREDICTION_SOLVER = Auto(max_steps=2000)
# The papers' kind of gradient. Its cost is known beforehand, and it cannot fail to converge.
ADJOINT = Phantom(steps=3)
# AdamW moves every entry of a small W by lr in one step, more than one power iteration follows:
# with one, norms up to 1.38 were seen under a bound of 0.95 (iris), and solves that diverged;
# with ten 1.02.
POWER_ITERATIONS = 10


class Network(nn.Module):
    """y = V·layer(x) + a. x [B, features] → y [B, outputs]."""

    def __init__(self, layer: nn.Module, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x))
        return y


def build(
    choice: LayerChoice,
    features: int,
    hidden: int,
    outputs: int,
    *,
    bound: float,
    solver: SolverOptions | None,
    adjoint: Adjoint | None,
    seed: int,
) -> Network:
    """A network on the CPU in float32, its weights drawn from ``seed`` alone.

    torch's layers draw from the global generator; it is lent to them and put back.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        common: dict[str, Any] = {
            "in_channels": features,
            "constraint": NormBounded(bound=bound, steps=POWER_ITERATIONS),
            "solver": PREDICTION_SOLVER if solver is None else solver,
            "adjoint": ADJOINT if adjoint is None else adjoint,
        }
        layer: Any
        if callable(choice):
            layer = choice(features, hidden)
        elif choice == "geq":
            layer = GEQ(hidden, hidden, hidden=None, **common)
        elif choice == "opteq":
            layer = OptEq(hidden, hidden, **common)
        elif choice == "deep_opteq":
            layer = DeepOptEq(hidden, (hidden, hidden), **common)
        else:  # As many weights as the others: U and W one after the other, no equilibrium.
            second = nn.Linear(hidden, hidden, bias=False)
            layer = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), second, nn.ReLU())
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"layer(in_features={features}, hidden={hidden}) must return an nn.Module, got "
                f"{type(layer).__name__}."
            )
        return Network(layer, hidden, outputs)


@torch.no_grad()
def _settle(network: Network) -> None:
    """Converge the power iterations of all norm constraints on the present weights."""
    held = [m for m in network.modules() if isinstance(m, parametrize.ParametrizationList)]
    for steps in held:
        for step in steps:
            if isinstance(step, OperatorNorm):
                step.right_inverse(steps.original)


@contextmanager
def training_solver(network: Network, solver: SolverOptions | None) -> Iterator[None]:
    """Within it, a layer with our default solver solves as closely as training needs.

    At its end the norm constraints are brought up to date.
    """
    layer = network.layer
    ours = solver is None and getattr(layer, "solver", None) == PREDICTION_SOLVER
    if ours:
        layer.solver = TRAINING_SOLVER  # type: ignore[assignment]
    try:
        yield
    finally:
        _settle(network)
        if ours:
            layer.solver = PREDICTION_SOLVER  # type: ignore[assignment]
