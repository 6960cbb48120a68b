"""How many steps the layers of a network take, and of which length."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from equilibria.engine.result import Solution
from equilibria.engine.solver import SolverOptions
from equilibria.engine.tree import sample_norm
from equilibria.problems import HiddenProblem
from equilibria.problems.solving import choice_for
from equilibria.solvers import Picard, ProximalGradient

from .layer import EquilibriumLayer

__all__ = ["calibrate_steps", "set_steps"]

Model = TypeVar("Model", bound=nn.Module)


def set_steps(model: Model, steps: int) -> Model:
    """Let every equilibrium layer with a fixed number of steps take ``steps``; the model itself.

    Weights, step sizes and gradients stay what they are. Layers whose solver stops by a tolerance
    (``rtol`` or ``atol`` above 0) have no number of steps to set: an error names them.
    """
    given: Any = steps
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"steps={steps!r}: expected an integer of at least 1.")
    layers = {
        name or "(the model)": module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "solver", None), SolverOptions)
    }
    if not layers:
        raise ValueError(f"{type(model).__name__} has no equilibrium layers.")
    for name, layer in layers.items():
        own = layer.solver
        if not own.fixed_steps:
            raise ValueError(
                f"steps={steps}: layer {name} stops by a tolerance ({own!r}); give its solver "
                "rtol=0, atol=0 first."
            )
    for layer in layers.values():
        layer.solver = replace(layer.solver, max_steps=steps)
    return model


@torch.no_grad()
def calibrate_steps(
    model: Model, x: Tensor, steps: int, *, taus: Sequence[float] | None = None
) -> tuple[Model, float]:
    """Let every layer take ``steps`` steps of the length τ that ends nearest to the equilibria.

    The step τ = 2/(m + L) of the certificate is the best against the worst direction, and too
    short for most: with few steps a longer one ends nearer. One pass over x [B, ...], a sample of
    inputs without labels, in evaluation mode: each layer is solved with each τ, at the input that
    it sees, and τ is the one with the least mean relative distance over all layers. It is the
    same for all of them, so that a configuration holds it; a certificate judges any answer, so
    those of this step too. Returns the model itself, changed, and τ.

    Args:
        model: its layers have ``ProximalGradient(rtol=0, atol=0, accelerate=False)`` or
            ``Picard(rtol=0, atol=0)``, which becomes ``ProximalGradient``.
        x: as the model takes it.
        steps: how many each layer takes.
        taus: what to try; None: 0.4 to 1.6 times the present step, which the layers share.
    """
    set_steps(model, steps)
    layers = [m for m in model.modules() if isinstance(getattr(m, "solver", None), SolverOptions)]
    for layer in layers:
        if not isinstance(layer, EquilibriumLayer) or not isinstance(
            layer.solver, (Picard, ProximalGradient)
        ):
            raise ValueError(
                f"calibrate_steps: {type(layer).__name__} with {layer.solver!r} has no step τ; "
                "expected a layer of a hidden problem with ProximalGradient or Picard."
            )
    trial = _Trial(steps, taus)
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        if isinstance(module, EquilibriumLayer):
            module.solve_posed = partial(trial.solve, module)  # type: ignore[method-assign]
    copied(x)
    tau = trial.best()
    for layer in layers:
        layer.solver = trial.solver(tau)  # type: ignore[assignment]
    return model, tau


class _Trial:
    """The mean relative distance of each τ, layer by layer."""

    def __init__(self, steps: int, taus: Sequence[float] | None) -> None:
        self.steps, self.taus = steps, None if taus is None else list(taus)
        self.distances: list[list[float]] = []

    def solver(self, tau: float | None, times: int = 1) -> ProximalGradient:
        steps = times * self.steps
        return ProximalGradient(rtol=0.0, atol=0.0, max_steps=steps, accelerate=False, tau=tau)

    def solve(
        self, layer: EquilibriumLayer, problem: HiddenProblem, start: Tensor, **options: Any
    ) -> Solution[Tensor]:
        run = partial(type(layer).solve_posed, layer, problem, start, **options)
        goal = run(solver=self.solver(None, times=8))
        if self.taus is None:
            bounds = partial(layer.nominal_bounds, problem)
            own = choice_for(problem, self.solver(None), bounds).tau
            own = float(own.mean()) if isinstance(own, Tensor) else own
            self.taus = [own * (0.4 + 0.05 * i) for i in range(25)]
        scale = sample_norm([goal.value]).clamp_min(1e-30)
        row = []
        for tau in self.taus:
            off = sample_norm([run(solver=self.solver(tau)).value - goal.value])
            row.append(float((off / scale).mean()))
        self.distances.append(row)
        return goal

    def best(self) -> float:
        assert self.taus is not None
        means = [sum(column) for column in zip(*self.distances, strict=True)]
        return self.taus[min(range(len(means)), key=means.__getitem__)]
