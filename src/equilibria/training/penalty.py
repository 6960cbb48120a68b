"""Σ over layers of weight·mean ‖∂T/∂z‖²_F / n at the equilibrium, as a part of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine.spectral import jacobian_penalty
from equilibria.nn import EquilibriumLayer, MapLayer, equilibrium_layers
from equilibria.nn.observing import collect_penalties

__all__ = ["JacobianPenalty"]


class JacobianPenalty:
    """Σ_layers weight·mean_b ‖J(z*_b)‖²_F / n, with one random vector a layer (Hutchinson).

    Layers that take a ``jacobian_weight`` themselves (DEQ, MDEQ) penalize their own map, with the
    weight that they were made with or, where that is zero, with this one. For the others the map is
    evaluated once more at z*, which is taken as a constant (Bai et al. 2021).
    """

    def __init__(self, model: nn.Module, weight: float) -> None:
        self.weight = weight
        self._model = model
        layers = equilibrium_layers(model)
        own: list[Any] = [m for m in layers.values() if hasattr(m, "jacobian_weight")]
        if weight:
            for layer in own:
                layer.jacobian_weight = layer.jacobian_weight or weight
        self._others = [m for m in layers.values() if m not in own] if weight else []
        self._own = any(layer.jacobian_weight for layer in own)
        unknown = [m for m in self._others if not isinstance(m, (EquilibriumLayer, MapLayer))]
        if weight and (unknown or not layers):
            what = f"{type(unknown[0]).__name__} shows none" if unknown else "there is none"
            raise ValueError(
                f"jacobian_weight={weight} needs equilibrium layers whose map is known, and {what} "
                f"in {type(model).__name__}; leave jacobian_weight at 0."
            )

    @property
    def active(self) -> bool:
        """Whether there is anything to penalize."""
        return self._own or bool(self._others)

    @contextmanager
    def collect(self) -> Iterator[list[Tensor]]:
        """Run the model inside the block; after it the list holds one scalar for each layer."""
        found: list[Tensor] = []
        seen: list[tuple[nn.Module, Any, Any]] = []

        def note(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            seen.append((layer, inputs[0], output))

        handles = [layer.register_forward_hook(note) for layer in self._others]
        try:
            with collect_penalties(self._model) as own:
                yield found
        finally:
            for handle in handles:
                handle.remove()
        found += [self.weight * _penalty(*one).mean() for one in seen]
        if len(own):
            found.append(torch.as_tensor(own.total()))


def _penalty(layer: nn.Module, x: Tensor, z: Any) -> Tensor:
    if isinstance(layer, EquilibriumLayer):
        return jacobian_penalty(layer.problem(x).step, z)
    assert isinstance(layer, MapLayer)
    return jacobian_penalty(layer.step, z, layer.inject(x))
