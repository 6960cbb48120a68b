"""Look at the solves of a model while it runs, layer by layer: Solutions and Jacobian penalties."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine.result import Solution

__all__ = ["Observed", "Penalties", "collect_penalties", "equilibrium_layers", "observe"]

_OBSERVERS: ContextVar[tuple[Observed, ...]] = ContextVar("equilibria_observers", default=())
_COLLECTORS: ContextVar[tuple[Penalties, ...]] = ContextVar("equilibria_penalties", default=())


class Observed:
    """What was seen: ``solutions[name]`` lists the Solutions of the layer ``name``, in order.

    Values are detached; reading a number from them makes a GPU wait, keeping them does not.
    """

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self.solutions: dict[str, list[Solution[Any]]] = {}

    def __len__(self) -> int:
        return sum(len(found) for found in self.solutions.values())

    def add(self, layer: nn.Module, solution: Solution[Any]) -> None:
        name = self._names.get(layer)
        if name is not None:
            self.solutions.setdefault(name, []).append(solution)

    def clear(self) -> None:
        self.solutions.clear()


def equilibrium_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of ``model`` that solve for an equilibrium, by name, outermost only.

    A layer is one that says ``is_equilibrium = True``, as every layer of ``equilibria.nn`` does. A
    model that is such a layer itself has the name "".
    """
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> None:
        if getattr(module, "is_equilibrium", False):
            found[name] = module
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(model, "")
    return found


@contextmanager
def observe(model: nn.Module) -> Iterator[Observed]:
    """Collect the Solution of every equilibrium layer of ``model`` that runs inside the block.

        with eq.nn.observe(model) as seen:
            model(x)
        seen.solutions["layer1"][0].stats.steps  # [B]

    Layers inside ``torch.compile`` are not seen: a compiled solve has no Solution to show.
    """
    seen = Observed({layer: name for name, layer in equilibrium_layers(model).items()})
    token = _OBSERVERS.set((*_OBSERVERS.get(), seen))
    try:
        yield seen
    finally:
        _OBSERVERS.reset(token)


def report(layer: nn.Module, solution: Solution[Any]) -> None:
    """Called by every layer after its solve."""
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return
    for observer in _OBSERVERS.get():
        observer.add(layer, solution.detach())


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

        with eq.nn.collect_penalties(model) as found:
            loss = criterion(model(x), y)
        (loss + found.total()).backward()

    Layers with ``jacobian_weight = 0`` cost nothing. The penalty is taken at the same map as the
    solve (the same dropout masks, the same statistics). Layers inside ``torch.compile`` are left
    out: the penalty needs the autograd graph.
    """
    found = Penalties({module: name for name, module in model.named_modules()})
    token = _COLLECTORS.set((*_COLLECTORS.get(), found))
    try:
        yield found
    finally:
        _COLLECTORS.reset(token)


def collectors(layer: nn.Module) -> list[Penalties]:
    """Who wants the penalty of this layer."""
    if torch.compiler.is_compiling():
        return []
    return [found for found in _COLLECTORS.get() if found.wants(layer)]
