"""The layer of a network whose solve is looked at, its input, and other scales of its weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria.nn import equilibrium_layers

__all__ = ["at_scale", "clipped_stds", "layer_input"]

_CLIPPED = 0.9  # of the standard deviation that was asked for


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

    The numbers drawn are those of the weight that acts. Where a layer holds its norm within a bound
    (``NormBounded``), a larger draw is scaled back onto the bound: a warning says to what, and
    ``clipped_stds`` gives the numbers.
    """
    if not 0 < std < float("inf"):
        raise ValueError(f"std={std!r}: expected a positive number, such as 1.0 or 0.01.")
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    found = _matrices(made)
    if not found:
        raise ValueError(f"{type(model).__name__} has no equilibrium layer with weights to draw.")
    for owner, attribute in found.values():
        weight: Tensor = getattr(owner, attribute)
        # On the CPU in float32: the same numbers on every device and in every precision.
        fresh = (torch.randn(weight.shape, generator=generator) * std).to(weight)
        with torch.no_grad():
            if parametrize.is_parametrized(owner, attribute):
                # Assigned, not written into its raw parameter: what a constraint keeps about the
                # weight (the leading singular vector) is then that of the new one.
                setattr(owner, attribute, fresh)
            else:
                weight.copy_(fresh)
    clipped = clipped_stds(made, std)
    if clipped:
        told = ", ".join(f"{name} {value:.3g}" for name, value in clipped.items())
        warnings.warn(
            f"std={std:g} was asked for, and the norm bound of these weights holds them at a "
            f"smaller standard deviation: {told}. Build the layer with constraint=None to look at "
            "this scale.",
            stacklevel=2,
        )
    return made


@torch.no_grad()
def clipped_stds(model: nn.Module, std: float) -> dict[str, float]:
    """name → standard deviation √(Σw²/n) in effect, of weights that a constraint keeps below std.

    Of the equilibrium layers' constrained kernels and matrices in a model that ``at_scale`` made;
    empty if all have the scale that was asked for, within 10%.
    """
    found = {}
    for name, (owner, attribute) in _matrices(model).items():
        if parametrize.is_parametrized(owner, attribute):
            weight: Tensor = getattr(owner, attribute)
            effective = float(weight.double().square().mean().sqrt())
            if effective < _CLIPPED * std:
                found[name] = effective
    return found


def _matrices(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """name → (module, attribute) of the equilibrium layers' kernels and matrices, each once."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for prefix, layer in equilibrium_layers(model).items():
        for path, weight in layer.named_parameters():
            # W.parametrizations.weight.original, or original0, original1, is the weight of W.
            place, _, rest = path.partition("parametrizations.")
            owner, _, attribute = path.rpartition(".")
            if rest:
                owner, attribute = place.rstrip("."), rest.split(".")[0]
            if weight.ndim >= 2:
                name = ".".join(part for part in (prefix, owner, attribute) if part)
                found[name] = (layer.get_submodule(owner), attribute)
    return found


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
