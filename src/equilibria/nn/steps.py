"""How many steps the layers of a network take."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from torch import nn

from equilibria.engine.solver import SolverOptions

__all__ = ["set_steps"]

Model = TypeVar("Model", bound=nn.Module)


def set_steps(model: Model, steps: int) -> Model:
    """Let every equilibrium layer with a fixed number of steps take ``steps``; the model itself.

    Weights, step sizes and gradients stay what they are. Layers whose solver stops by a tolerance
    (``rtol`` or ``atol`` above 0) have no number of steps to set: an error names them.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
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
