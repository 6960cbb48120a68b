"""The network of an estimator: an equilibrium layer on vectors and a linear head, y = Vz* + a."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria.adjoints import Phantom
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions
from equilibria.nn import GEQ, DeepOptEq, NormBounded, OperatorNorm, OptEq
from equilibria.solvers import Auto

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LAYERS", "Network", "build", "settle", "training_solver"]

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
        layer = _layer(choice, features, hidden, bound, solver, adjoint)
        return Network(layer, hidden, outputs)


def _layer(
    choice: LayerChoice,
    features: int,
    hidden: int,
    bound: float,
    solver: SolverOptions | None,
    adjoint: Adjoint | None,
) -> nn.Module:
    if callable(choice):
        made = choice(features, hidden)
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"layer(in_features={features}, hidden={hidden}) must return an nn.Module, got "
                f"{type(made).__name__}."
            )
        return made
    common: dict[str, Any] = {
        "in_channels": features,
        "constraint": NormBounded(bound=bound, steps=POWER_ITERATIONS),
        "solver": PREDICTION_SOLVER if solver is None else solver,
        "adjoint": ADJOINT if adjoint is None else adjoint,
    }
    match choice:
        case "geq":
            return GEQ(hidden, hidden, hidden=None, **common)
        case "opteq":
            return OptEq(hidden, hidden, **common)
        case "deep_opteq":
            return DeepOptEq(hidden, (hidden, hidden), **common)
        case "explicit":
            # As many weights as the others: U and W one after the other, no equilibrium.
            second = nn.Linear(hidden, hidden, bias=False)
            return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), second, nn.ReLU())
    raise ValueError(
        f"layer={choice!r}: expected one of {', '.join(map(repr, LAYERS))}, or a callable "
        "(in_features, hidden) -> nn.Module."
    )


@torch.no_grad()
def settle(network: Network) -> None:
    """Converge the power iterations of all norm constraints on the present weights."""
    for module in network.modules():
        if not parametrize.is_parametrized(module):
            continue
        for steps in module.parametrizations.values():  # type: ignore[operator]
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
        settle(network)
        if ours:
            layer.solver = PREDICTION_SOLVER  # type: ignore[assignment]
