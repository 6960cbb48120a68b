"""The training loop: weighted mini-batches, AdamW, a cosine of the learning rate, when to stop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .network import Network

__all__ = ["Fitting", "Plateau", "Rows"]

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rows:
    """Standardized inputs, targets and weights (of mean 1) on the device."""

    x: Tensor
    y: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass
class Plateau:
    """Counts epochs since a number last fell (or rose) by more than ``tol``."""

    tol: float
    patience: int
    best: float = math.inf
    waited: int = 0

    def update(self, value: float) -> bool:
        """Whether ``value`` is the best so far; ``over`` tells when to stop."""
        self.waited = 0 if value < self.best - self.tol else self.waited + 1
        better = value < self.best
        self.best = min(self.best, value)
        return better

    @property
    def over(self) -> bool:
        return self.waited >= self.patience


@dataclass
class Fitting:
    """One network being trained. ``loss(output, target)`` gives one number a row, [B]."""

    network: Network
    loss: Loss
    lr: float
    weight_decay: float
    batch_size: int
    generator: torch.Generator
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=self.lr, weight_decay=self.weight_decay
        )

    def resume(self, state: dict[str, Any] | None) -> None:
        """Go on with the moments of an earlier optimizer on the same network."""
        if state is not None:
            self.optimizer.load_state_dict(copy.deepcopy(state))
            for group in self.optimizer.param_groups:
                group.update(lr=self.lr, weight_decay=self.weight_decay)

    def epoch(self, rows: Rows, rates: Callable[[float], float] | None = None) -> float:
        """One pass over the rows in random batches; the mean loss.

        ``rates`` maps the share of the epoch that is done to a factor of the learning rate. All
        rows in one batch are not shuffled: then a row of weight 2 is the same as two rows.
        """
        batches = self._batches(len(rows))
        total = rows.weight.new_zeros(())
        self.network.train()
        for number, index in enumerate(batches):
            if rates is not None:
                factor = rates(number / len(batches))
                for group in self.optimizer.param_groups:
                    group["lr"] = self.lr * factor
            x, y, weight = rows.x, rows.y, rows.weight
            if index is not None:
                x, y, weight = x[index], y[index], weight[index]
            self.optimizer.zero_grad(set_to_none=True)
            loss = (weight * self.loss(self.network(x), y)).sum() / len(x)
            loss.backward()
            self.optimizer.step()
            total += loss.detach() * (len(x) / len(rows))
        self.network.eval()
        return float(total)

    def _batches(self, count: int) -> list[Tensor | None]:
        if count <= self.batch_size:
            return [None]
        # Equal parts, so that no step is made from a handful of rows that were left over.
        order = torch.randperm(count, generator=self.generator)
        return list(order.tensor_split(-(-count // self.batch_size)))


def cosine(progress: float) -> float:
    """½(1 + cos πt): from 1 to 0 over the training, t in [0, 1]."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))
