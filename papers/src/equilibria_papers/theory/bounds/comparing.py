"""GEQ and OptEq side by side: every calculator on one pair of layers, or on each of a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine import ConvergenceWarning
from equilibria.nn import GEQ, MultiBranch, equilibrium_layers

from .demonstration import Demonstration
from .feature_map import feature_map_report
from .lipschitz import lipschitz_report
from .margin import margin_report
from .measuring import PAPERS_LAYERS, Provable
from .report import Report
from .similarity import similarity_report

__all__ = ["Comparison", "compare_bounds", "layer_inputs", "network_bounds", "opposite_halves"]

Told = Callable[[str], None]


def _silent(_: str) -> None:
    """No news."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Reports in the order in which they were made; ``print`` it, ``to_dict()`` for JSON."""

    reports: tuple[Report, ...]
    notes: tuple[str, ...] = ()

    def of(self, kind: type[Report]) -> list[Report]:
        """The reports of one kind."""
        return [report for report in self.reports if isinstance(report, kind)]

    def to_dict(self) -> dict[str, Any]:
        return {"reports": [r.to_dict() for r in self.reports], "notes": list(self.notes)}

    def __str__(self) -> str:
        parts = [str(report) for report in self.reports]
        return "\n\n".join([*parts, *(f"note: {note}" for note in self.notes)])


def opposite_halves(x: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """The first ``pairs`` samples beside the next ones."""
    count = min(pairs, len(x) // 2)
    if count < 1:
        raise ValueError(f"the output similarity needs two inputs or more, got {len(x)}.")
    return x[:count], x[count : 2 * count]


def _of_layer(
    layer: Provable,
    x: Tensor,
    name: str,
    *,
    pairs: int,
    draws: int,
    generator: torch.Generator,
    told: Told,
) -> list[Report]:
    made: list[Report] = []
    told(f"{name}: Lipschitz constants")
    made.append(lipschitz_report(layer, x, name=name, generator=generator))
    told(f"{name}: output similarity")
    first, second = opposite_halves(x, pairs)
    made.append(
        similarity_report(layer, first, second, draws=draws, generator=generator, name=name)
    )
    if isinstance(layer, GEQ):
        told(f"{name}: feature map")
        made.append(feature_map_report(layer, x, name=name))
    return made


def compare_bounds(
    pair: Sequence[Demonstration],
    *,
    margin: float = 0.05,
    delta: float = 0.05,
    images: int = 64,
    pairs: int = 4,
    draws: int = 256,
    seed: int = 0,
    told: Told = _silent,
) -> Comparison:
    """Propositions 1 to 4 on layers with classifiers, such as ``demonstration_pair()``.

    Args:
        pair: layers with their heads and training data.
        margin: η of Proposition 2.
        delta: its probability.
        images: how many inputs the Lipschitz constants are measured on.
        pairs: how many pairs of inputs the similarity is measured on.
        draws: how many U it draws.
        seed: of the draws and searches.
        told: is told what is being done.
    """
    generator = torch.Generator().manual_seed(seed)
    made: list[Report] = []
    for one in pair:
        name = "GEQ" if isinstance(one.layer, GEQ) else "OptEq"
        told(f"{name}: margin bound")
        made.append(
            margin_report(
                one.layer, one.x, one.head, one.labels, margin=margin, delta=delta, name=name
            )
        )
        x = one.x[:images]
        made += _of_layer(
            one.layer, x, name, pairs=pairs, draws=draws, generator=generator, told=told
        )
    return Comparison(tuple(made))


@torch.no_grad()
def layer_inputs(model: nn.Module, x: Tensor) -> dict[str, tuple[Provable, Tensor]]:
    """The GEQ and OptEq layers of ``model`` with the inputs that they get for x, by name.

    The model runs once in eval mode; branches of a MultiBranch are looked into. A layer that runs
    twice is taken at its first input.
    """
    found: dict[str, tuple[Provable, Tensor]] = {}
    hooks = []

    def keep(name: str, layer: nn.Module, x: Tensor) -> None:
        if name not in found and isinstance(layer, PAPERS_LAYERS):
            found[name] = (layer, x.detach())

    def caught(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not inputs:
                return
            if isinstance(module, MultiBranch):  # it solves its branches without calling them
                for i, given in enumerate(module.split(inputs[0])):
                    keep(f"{name}.branches.{i}", module.branches[i], given)
            else:
                keep(name, module, inputs[0])

        return hook

    was = model.training
    for name, module in model.named_modules():
        if isinstance(module, (*PAPERS_LAYERS, MultiBranch)):
            hooks.append(module.register_forward_pre_hook(caught(name)))
    try:
        model.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model(x)
    finally:
        model.train(was)
        for hook in hooks:
            hook.remove()
    return found


def network_bounds(
    model: nn.Module,
    x: Tensor,
    *,
    pairs: int = 4,
    draws: int = 64,
    seed: int = 0,
    told: Told = _silent,
) -> Comparison:
    """Propositions 1, 3 and 4 on every GEQ and OptEq of ``model``, at the inputs they get for x.

    Proposition 2 is about one layer between the input and a linear classifier, so it is left out.
    """
    layers = layer_inputs(model, x)
    if not layers:
        there = {type(layer).__name__ for layer in equilibrium_layers(model).values()}
        what = f"its equilibrium layers are {', '.join(sorted(there))}" if there else "it has none"
        raise ValueError(
            f"{type(model).__name__} ran no GEQ or OptEq layer ({what}): the propositions are "
            "about these two."
        )
    generator = torch.Generator().manual_seed(seed)
    made: list[Report] = []
    for name, (layer, given) in layers.items():
        made += _of_layer(
            layer,
            given,
            name or type(layer).__name__,
            pairs=pairs,
            draws=draws,
            generator=generator,
            told=told,
        )
    note = (
        "Proposition 2 is about one layer between the input and a linear classifier; it says "
        "nothing of a layer inside a network"
    )
    return Comparison(tuple(made), (note,))
