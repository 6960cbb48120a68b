"""What several packages of the theory share: sizes that a caller gives, inputs that layers get."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from equilibria.evaluation import evaluating
from equilibria.nn import MultiBranch, equilibrium_layers


def check_sizes(owner: str, sizes: Mapping[str, object]) -> None:
    """Raise unless every size is an integer of at least 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{owner}({name}={value!r}): expected an integer of at least 1.")


@torch.no_grad()
def layers_with_inputs(model: nn.Module, x: Any) -> dict[str, tuple[nn.Module, Any]]:
    """The equilibrium layers that run when ``model`` in eval mode is applied to x, by name, with
    what each gets first. A MultiBranch is looked into: its branches are at "name.branches.0", …
    """
    layers = equilibrium_layers(model)
    found: dict[str, Any] = {}

    def reached(name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs:
            found.setdefault(name, inputs[0])

    with ExitStack() as hooks, evaluating(model):
        for name, each in layers.items():
            hooks.enter_context(each.register_forward_pre_hook(partial(reached, name)))
        model(x)
    made: dict[str, tuple[nn.Module, Any]] = {}
    for name, given in found.items():
        layer = layers[name]
        if isinstance(layer, MultiBranch):  # it solves its branches without calling them
            start = f"{name}.branches." if name else "branches."
            pairs = zip(layer.branches, layer.inputs(given), strict=True)
            made |= {f"{start}{i}": pair for i, pair in enumerate(pairs)}
        else:
            made[name] = (layer, given)
    return made
