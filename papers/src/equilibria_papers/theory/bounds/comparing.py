"""GEQ and OptEq side by side: every calculator on one pair of layers, or on each of a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine import ConvergenceWarning
from equilibria.nn import GEQ, NormBounded, OptEq, constrain, equilibrium_layers
from equilibria_papers.theory.checks import check_sizes, layers_with_inputs

from .feature_map import feature_map_report
from .lipschitz import lipschitz_report
from .margin import margin_report
from .report import PAPERS_LAYERS, Provable, Report
from .similarity import similarity_report

Progress = Callable[[str], None]  # Called with what is being done


@dataclass(frozen=True, eq=False)
class Demonstration:
    """A trained layer with its classifier, and the data that it was trained on."""

    layer: Provable
    head: nn.Linear
    x: Tensor
    labels: Tensor


def digit_vectors(split: str = "train", limit: int | None = None) -> tuple[Tensor, Tensor]:
    """The digits as vectors of mean 0 and length 1 (so B = 1), and their labels: [N, 64], [N]."""
    from equilibria.data import load  # needs scikit-learn, where the digits are

    data = load("digits", split, progress=False)
    images, targets = data.images[slice(0, limit)], data.targets[slice(0, limit)]
    x = images.flatten(1).float() / 255.0
    x = x - x.mean(dim=1, keepdim=True)  # each by itself: nothing is learned from the others
    return x / x.norm(dim=1, keepdim=True).clamp_min(1e-6), targets


def fresh_pair(
    width: int, *, bound: float = 0.85, gamma: float = 0.04, inputs: int = 64
) -> tuple[GEQ, OptEq]:
    """A GEQ and an OptEq with states of ``width``, W [width, width], U [width, inputs], no bias."""
    limit = NormBounded(bound=bound)
    shared: dict[str, Any] = {"in_channels": inputs, "constraint": limit, "bias": False}
    geq = GEQ(width, width, hidden=None, gamma=gamma, **shared)
    opteq = OptEq(width, width, form="hidden", **shared)
    for layer in (geq, opteq):
        constrain(layer.U, "weight", limit)
    return geq, opteq


def demonstration_pair(
    *,
    width: int = 32,
    bound: float = 0.85,
    gamma: float = 0.04,
    epochs: int = 20,
    samples: int | None = None,
    seed: int = 0,
) -> tuple[Demonstration, Demonstration]:
    """(GEQ, OptEq), each trained on the digits for ``epochs``; seconds on one core.

    x [B, 64], ‖x‖ ≤ 1 → layer → W_c z + b_c,   ‖W‖, ‖U‖, ‖W_c‖ ≤ bound < 1, no bias in the layer:
    within the premises of Proposition 2.
    """
    check_sizes("demonstration_pair", {"width": width, "epochs": epochs})
    if not 0.0 < bound < 1.0:
        raise ValueError(f"bound={bound!r}: the propositions need ‖W‖, ‖U‖ < 1.")
    x, labels = digit_vectors("train", samples)
    made = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in fresh_pair(width, bound=bound, gamma=gamma):
            head = constrain(nn.Linear(width, 10), "weight", NormBounded(bound=bound))
            assert isinstance(head, nn.Linear)
            _train(layer, head, x, labels, epochs)
            made.append(Demonstration(layer.eval(), head.eval(), x, labels))
    return made[0], made[1]


def _train(layer: Provable, head: nn.Linear, x: Tensor, labels: Tensor, epochs: int) -> None:
    parameters = [*layer.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for _ in range(epochs):
            for batch in torch.randperm(len(x)).split(128):
                optimizer.zero_grad()
                # Bounded weights give small logits: a fixed scale lets the loss tell them apart.
                scores = 40.0 * head(layer(x[batch]))
                nn.functional.cross_entropy(scores, labels[batch]).backward()
                optimizer.step()
    with torch.no_grad():
        # Each look moves the power iteration: the norms settle at their bound, which the last
        # steps of training had run ahead of.
        for _ in range(100):
            for part in (layer.W, layer.U, head):
                _ = part.weight


@dataclass(frozen=True, eq=False)
class Comparison:
    """Reports in the order in which they were made; ``print`` it, ``to_dict()`` for JSON."""

    reports: tuple[Report, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """(layers, rows): the layers in order, and for each number its name and a text a layer."""
        layers = list(dict.fromkeys(report.layer for report in self.reports))
        rows: dict[str, dict[str, str]] = {}
        for report in self.reports:
            for name, text in report.summary():
                rows.setdefault(name, {})[report.layer] = text
        return layers, [(name, [found.get(a, "–") for a in layers]) for name, found in rows.items()]

    def to_dict(self) -> dict[str, Any]:
        return {"reports": [r.to_dict() for r in self.reports], "notes": list(self.notes)}

    def __str__(self) -> str:
        parts = [str(report) for report in self.reports]
        return "\n\n".join([*parts, *(f"note: {note}" for note in self.notes)])


def _of_layer(
    layer: Provable,
    x: Tensor,
    name: str,
    pairs: int,
    draws: int,
    generator: torch.Generator,
    progress: Progress,
) -> list[Report]:
    """Propositions 3, 4 and 1; the similarity of the first ``pairs`` samples with the next ones."""
    count = min(pairs, len(x) // 2)
    if count < 1:
        raise ValueError(f"the output similarity needs two inputs or more, got {len(x)}.")
    how: dict[str, Any] = {"name": name, "generator": generator}
    progress(f"{name}: Lipschitz constants")
    made: list[Report] = [lipschitz_report(layer, x, **how)]
    progress(f"{name}: output similarity")
    made.append(similarity_report(layer, x[:count], x[count : 2 * count], draws=draws, **how))
    if isinstance(layer, GEQ):
        progress(f"{name}: feature map")
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
    progress: Progress = lambda _: None,
) -> Comparison:
    """Propositions 1 to 4 on layers with classifiers, such as ``demonstration_pair()``.

    Args:
        margin, delta: η and δ of Proposition 2.
        images: how many inputs the Lipschitz constants are measured on.
        pairs, draws: of inputs for the similarity, and how many U it draws.
        seed: of the draws and searches.
        progress: called with what is being done.
    """
    generator = torch.Generator().manual_seed(seed)
    made: list[Report] = []
    for one in pair:
        name = "GEQ" if isinstance(one.layer, GEQ) else "OptEq"
        progress(f"{name}: margin bound")
        how: dict[str, Any] = {"margin": margin, "delta": delta, "name": name}
        made.append(margin_report(one.layer, one.x, one.head, one.labels, **how))
        made += _of_layer(one.layer, one.x[:images], name, pairs, draws, generator, progress)
    return Comparison(tuple(made))


@torch.no_grad()
def layer_inputs(model: nn.Module, x: Tensor) -> dict[str, tuple[Provable, Tensor]]:
    """The GEQ and OptEq layers of ``model`` with the inputs that they get for x, by name.

    The model runs once in eval mode; branches of a MultiBranch are looked into. A layer that runs
    twice is taken at its first input.
    """
    return {
        name: (layer, given.detach())
        for name, (layer, given) in layers_with_inputs(model, x).items()
        if isinstance(layer, PAPERS_LAYERS)
    }


def network_bounds(
    model: nn.Module,
    x: Tensor,
    *,
    pairs: int = 4,
    draws: int = 64,
    seed: int = 0,
    progress: Progress = lambda _: None,
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
        named = name or type(layer).__name__
        made += _of_layer(layer, given, named, pairs, draws, generator, progress)
    note = (
        "Proposition 2 is about one layer between the input and a linear classifier; it says "
        "nothing of a layer inside a network"
    )
    return Comparison(tuple(made), (note,))
