"""Which outputs of a model a tangent kernel is about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Choice", "Outputs", "choose_outputs"]

Choice: TypeAlias = str | int | Sequence[int]
"""``"all"``, ``"trace"``, ``"sum"``, an index of the flattened output, or several."""


@dataclass(frozen=True)
class Outputs:
    """A choice, resolved for a model with K outputs a sample."""

    choice: str
    total: int
    """K."""
    index: tuple[int, ...] | None = None
    """Chosen outputs; None: all K."""

    @property
    def traced(self) -> bool:
        """Whether the kernel is the mean over the outputs, tr(·)/K, one number a pair."""
        return self.choice == "trace"

    @property
    def pulled(self) -> int:
        """Gradients a sample: rows of the Jacobian that are computed."""
        if self.choice == "sum":
            return 1
        return self.total if self.index is None else len(self.index)

    @property
    def width(self) -> int:
        """k, rows of the kernel a sample."""
        return 1 if self.traced else self.pulled

    def take(self, out: Tensor) -> Tensor:
        """[..., K] → [..., pulled]: what is differentiated."""
        if self.choice == "sum":
            # Divided by √K, so that its kernel estimates the trace's (Mohamadi et al. 2023).
            return out.sum(-1, keepdim=True) / math.sqrt(self.total)
        if self.index is None:
            return out / math.sqrt(self.total) if self.traced else out
        return torch.stack([out[..., i] for i in self.index], dim=-1)


def choose_outputs(choice: Choice, total: int) -> Outputs:
    """Check the choice against the K = ``total`` outputs of a sample."""
    if isinstance(choice, str):
        if choice not in ("all", "trace", "sum"):
            raise ValueError(
                f"outputs={choice!r}: expected 'all', 'trace', 'sum', an index or several indices."
            )
        return Outputs(choice, total)
    indices = [choice] if isinstance(choice, int) else list(choice)
    wrong = [i for i in indices if isinstance(i, bool) or not isinstance(i, int)]
    if wrong or not indices:
        raise TypeError(
            f"outputs={choice!r}: expected 'all', 'trace', 'sum', an index or several indices."
        )
    for i in indices:
        if not -total <= i < total:
            raise ValueError(
                f"outputs={choice!r}: the model has {total} outputs, 0 to {total - 1}."
            )
    return Outputs("index", total, tuple(i % total for i in indices))
