"""The layer of a network whose solve is looked at, its input, and other scales of its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from equilibria.nn import equilibrium_layers

__all__ = ["at_scale", "layer_input"]


class _Reached(Exception):
    """The layer was called: nothing after it is needed."""


def layer_input(model: nn.Module, x: Any, name: str | None = None) -> tuple[nn.Module, Any]:
    """(layer, what it is given) when ``model`` in eval mode is applied to x, without a graph.

    Args:
        model: a network, or an equilibrium layer itself.
        x: the network's input [B, ...].
        name: of the layer, as in ``eq.nn.equilibrium_layers(model)``; its first if not given.
    """
    layers = equilibrium_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no equilibrium layer, so there is no solver to follow: "
            "give a network with a layer of equilibria.nn (a DEQ, a GEQ, …)."
        )
    wanted = next(iter(layers)) if name is None else name
    if wanted not in layers:
        known = ", ".join(repr(n) for n in layers)
        raise ValueError(f"there is no equilibrium layer {wanted!r}; this network has: {known}.")
    layer = layers[wanted]
    if layer is model:
        return layer, x
    caught: list[Any] = []

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        caught.append(args[0])
        raise _Reached

    handle = layer.register_forward_pre_hook(stop)
    try:
        with torch.no_grad(), _eval_mode(model):
            model(x)
    except _Reached:
        pass
    finally:
        handle.remove()
    if not caught:
        raise ValueError(f"the network's forward did not reach its layer {wanted!r}.")
    return layer, caught[0]


def at_scale(model: nn.Module, std: float, *, seed: int = 0) -> nn.Module:
    """A copy whose equilibrium layers' kernels and matrices are drawn from N(0, std²) (§4.1.1).

    Vectors (biases, gains of norms) and all that lies outside of these layers stay as they are. In
    the thesis N(0, 0.01) means the standard deviation 0.01, as in the code that its block is from.
    """
    if not 0 < std < float("inf"):
        raise ValueError(f"std={std!r}: expected a positive number, such as 1.0 or 0.01.")
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    drawn = 0
    for layer in equilibrium_layers(made).values():
        for weight in layer.parameters():
            if weight.ndim >= 2:
                # On the CPU in float32: the same numbers on every device and in every precision.
                fresh = torch.randn(weight.shape, generator=generator) * std
                with torch.no_grad():
                    weight.copy_(fresh.to(weight))
                drawn += 1
    if not drawn:
        raise ValueError(f"{type(model).__name__} has no equilibrium layer with weights to draw.")
    return made


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def eval_copy(model: nn.Module) -> nn.Module:
    """A deep copy in eval mode, for looking without touching."""
    return copy.deepcopy(model).eval()
