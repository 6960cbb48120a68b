"""A GEQ and an OptEq of equal size, trained on the digits within the premises of Proposition 2.

x [B, 64], ‖x‖ ≤ 1 → layer → W_c z + b_c,   ‖W‖, ‖U‖, ‖W_c‖ ≤ bound < 1, no bias in the layer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria.engine import ConvergenceWarning
from equilibria.nn import GEQ, NormBounded, OptEq, constrain

from .measuring import Provable

__all__ = ["Demonstration", "demonstration_pair", "digit_vectors", "fresh_pair"]


@dataclass(frozen=True, eq=False)
class Demonstration:
    """A trained layer with its classifier, and the data that it was trained on."""

    layer: Provable
    head: nn.Linear
    x: Tensor
    labels: Tensor

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """W_c z*(x) + b_c, [B, 10]."""
        found: Tensor = self.head(self.layer(x))
        return found


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
    geq = GEQ(
        width, width, in_channels=inputs, hidden=None, gamma=gamma, constraint=limit, bias=False
    )
    opteq = OptEq(width, width, in_channels=inputs, form="hidden", constraint=limit, bias=False)
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
    """(GEQ, OptEq), each trained on the digits for ``epochs``; seconds on one core."""
    for name, value in {"width": width, "epochs": epochs}.items():
        if value < 1:
            raise ValueError(f"{name}={value!r}: expected an integer of at least 1.")
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
