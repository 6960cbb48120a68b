"""Collect the Jacobian penalties of a model's layers while it runs, to add them to a loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

__all__ = ["Penalties", "collect_penalties"]

_ACTIVE: ContextVar[tuple[Penalties, ...]] = ContextVar("equilibria_penalties", default=())


class Penalties:
    """``parts[name]`` lists jacobian_weight·mean ‖J‖²_F/n of the layer ``name``, call by call."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self.parts: dict[str, list[Tensor]] = {}

    def __len__(self) -> int:
        return sum(len(found) for found in self.parts.values())

    def wants(self, layer: nn.Module) -> bool:
        return layer in self._names

    def add(self, layer: nn.Module, penalty: Tensor) -> None:
        self.parts.setdefault(self._names[layer], []).append(penalty)

    def total(self) -> Tensor | float:
        """The sum to add to the loss; 0.0 where no layer has a weight."""
        found = [t for group in self.parts.values() for t in group]
        return torch.stack(found).sum() if found else 0.0


@contextmanager
def collect_penalties(model: nn.Module) -> Iterator[Penalties]:
    """Σ over layers of jacobian_weight·mean_b ‖J(z*_b)‖²_F/n, for the solves inside the block.

    ::

        with eq.nn.collect_penalties(model) as found:
            loss = criterion(model(x), y)
        (loss + found.total()).backward()

    Layers with ``jacobian_weight = 0`` cost nothing. The penalty is taken at the same map as the
    solve (the same dropout masks, the same statistics). Layers inside ``torch.compile`` are left
    out: the penalty needs the autograd graph.
    """
    found = Penalties({module: name for name, module in model.named_modules()})
    token = _ACTIVE.set((*_ACTIVE.get(), found))
    try:
        yield found
    finally:
        _ACTIVE.reset(token)


def collectors(layer: nn.Module) -> list[Penalties]:
    """Who wants the penalty of this layer."""
    if torch.compiler.is_compiling():
        return []
    return [found for found in _ACTIVE.get() if found.wants(layer)]
