"""Look at the solves of a model while it runs, layer by layer: Solutions and Jacobian penalties."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from equilibria.engine.result import Solution

T = TypeVar("T")


class _Collected(Generic[T]):
    """What layers show while a block runs: a list for each layer of ``names``, in order."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._found: dict[str, list[T]] = {}

    def __len__(self) -> int:
        return sum(len(found) for found in self._found.values())

    def wants(self, layer: nn.Module) -> bool:
        return layer in self._names

    def add(self, layer: nn.Module, shown: T) -> None:
        if self.wants(layer):
            self._found.setdefault(self._names[layer], []).append(shown)

    def clear(self) -> None:
        self._found.clear()


class Observed(_Collected[Solution[Any]]):
    """What was seen: ``solutions[name]`` lists the Solutions of the layer ``name``, in order.

    Values are detached; reading a number from them makes a GPU wait, keeping them does not.
    """

    @property
    def solutions(self) -> dict[str, list[Solution[Any]]]:
        return self._found


class Penalties(_Collected[Tensor]):
    """``parts[name]`` lists jacobian_weight·mean ‖J‖²_F/n of the layer ``name``, call by call."""

    @property
    def parts(self) -> dict[str, list[Tensor]]:
        return self._found

    def total(self) -> Tensor | float:
        """The sum to add to the loss; 0.0 where no layer has a weight."""
        found = [t for group in self.parts.values() for t in group]
        return torch.stack(found).sum() if found else 0.0


_ACTIVE: ContextVar[tuple[_Collected[Any], ...]] = ContextVar("equilibria_collectors", default=())
Kind = TypeVar("Kind", bound=_Collected[Any])


@contextmanager
def _collecting(found: Kind) -> Iterator[Kind]:
    _ACTIVE.set((*_ACTIVE.get(), found))
    try:
        yield found
    finally:  # of this one alone: blocks may end in another order than they began
        _ACTIVE.set(tuple(c for c in _ACTIVE.get() if c is not found))


def collectors(layer: nn.Module, kind: type[Kind]) -> list[Kind]:
    """Who wants this of the layer, here and now."""
    return [c for c in _ACTIVE.get() if isinstance(c, kind) and c.wants(layer)]


def equilibrium_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of ``model`` that solve for an equilibrium, by name, outermost only.

    A layer is one that says ``is_equilibrium = True``, as every layer of ``equilibria.nn`` does. A
    model that is such a layer itself has the name "", a layer in several places that of the first.
    """
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, name: str) -> None:
        if getattr(module, "is_equilibrium", False):
            found.setdefault(module, name)
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(model, "")
    return {name: layer for layer, name in found.items()}


def observe(model: nn.Module) -> AbstractContextManager[Observed]:
    """Collect the Solution of every equilibrium layer of ``model`` that runs inside the block.

        with eq.nn.observe(model) as seen:
            model(x)
        seen.solutions["layer1"][0].stats.steps  # [B]

    Layers inside ``torch.compile`` are not seen: a compiled solve has no Solution to show.
    """
    layers = equilibrium_layers(model)
    return _collecting(Observed({layer: name for name, layer in layers.items()}))


def report(layer: nn.Module, solution: Solution[Any]) -> None:
    """Called by every layer after its solve."""
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return
    for observer in collectors(layer, Observed):
        observer.add(layer, solution.detach())


def collect_penalties(model: nn.Module) -> AbstractContextManager[Penalties]:
    """Σ over layers of jacobian_weight·mean_b ‖J(z*_b)‖²_F/n, for the solves inside the block.

        with eq.nn.collect_penalties(model) as found:
            loss = criterion(model(x), y)
        (loss + found.total()).backward()

    Layers with ``jacobian_weight = 0`` cost nothing. The penalty is taken at the same map as the
    solve (the same dropout masks, the same statistics). Layers inside ``torch.compile`` are left
    out: the penalty needs the autograd graph.
    """
    return _collecting(Penalties({module: name for name, module in model.named_modules()}))
