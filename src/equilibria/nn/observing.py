"""Look at the solves of a model while it runs: steps, residuals, result codes, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from equilibria.engine.result import Solution

__all__ = ["Observed", "equilibrium_layers", "observe"]

_ACTIVE: ContextVar[tuple[Observed, ...]] = ContextVar("equilibria_observers", default=())


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
        """Forget what was seen so far."""
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

    ::

        with eq.nn.observe(model) as seen:
            model(x)
        seen.solutions["layer1"][0].stats.steps  # [B]

    Layers inside ``torch.compile`` are not seen: a compiled solve has no Solution to show.
    """
    seen = Observed({layer: name for name, layer in equilibrium_layers(model).items()})
    token = _ACTIVE.set((*_ACTIVE.get(), seen))
    try:
        yield seen
    finally:
        _ACTIVE.reset(token)


def report(layer: nn.Module, solution: Solution[Any]) -> None:
    """Called by every layer after its solve."""
    if torch.compiler.is_compiling():
        return
    for observer in _ACTIVE.get():
        observer.add(layer, solution.detach())
