"""EMA: the running average of the weights, which is what is validated and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria.nn import OperatorNorm

__all__ = ["Average", "WeightAverage", "settle_norms"]


@torch.no_grad()
def settle_norms(model: nn.Module) -> None:
    """Converge the singular vectors of all norm-bounded weights on the weights as they are now.

    A weight that was averaged or written has another leading vector than the one that training left
    behind, and its norm would be underestimated: the bound would not hold.
    """
    for module in model.modules():
        settle = getattr(module, "settle", None)
        if callable(settle):  # a module with a bound of its own kind
            settle()
        elif isinstance(module, parametrize.ParametrizationList):
            bounded = module[0]
            if isinstance(bounded, OperatorNorm):
                bounded.right_inverse(module.original)


class Average:
    """w̄ ← d·w̄ + (1 − d)·w after every step t = 1, 2, …, with d = min(decay, (1 + t)/(10 + t)).

    The small d at first forgets the random start. Floating buffers (the statistics of batch norms)
    are averaged alike; the singular vectors of norm bounds are not averaged but found again for w̄
    (``settle_norms``); integers stay as they are. Weights below float32 are averaged in float32.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._live, self._copied = self._tensors(model)
        self._mean = [
            t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True)
            for t in self._live
        ]
        self._model = model
        self._aside: list[Tensor] | None = None

    @staticmethod
    def _tensors(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """What is averaged, and what is put aside unaveraged while the average is in place."""
        vectors = {id(m.v) for m in model.modules() if isinstance(m, OperatorNorm)}
        buffers = list(model.buffers())
        averaged: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
        averaged += [b for b in buffers if b.is_floating_point() and id(b) not in vectors]
        return averaged, [b for b in buffers if id(b) in vectors]

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        live = [t.detach().to(m.dtype) for t, m in zip(self._live, self._mean, strict=True)]
        torch._foreach_lerp_(self._mean, live, 1.0 - decay)

    @property
    def applied(self) -> bool:
        """Whether the model holds the average now."""
        return self._aside is not None

    @torch.no_grad()
    def apply(self) -> None:
        """Put the average into the model, in place, and keep its own weights aside."""
        if self._aside is None:
            self._aside = [t.detach().clone() for t in (*self._live, *self._copied)]
            torch._foreach_copy_(self._live, self._mean)
            settle_norms(self._model)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model its own weights back, bit for bit."""
        if self._aside is not None:
            torch._foreach_copy_([*self._live, *self._copied], self._aside)
            self._aside = None

    def state_dict(self) -> dict[str, Any]:
        """The averages in the order of the model's tensors, and the count of updates."""
        return {"updates": self.updates, "mean": list(self._mean)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        given = state["mean"]
        found = [t.to(m) for t, m in zip(given, self._mean, strict=True)]
        torch._foreach_copy_(self._mean, found)
        self.updates = int(state["updates"])


class WeightAverage(pl.Callback):
    """Keeps an ``Average`` of ``module.model``; puts it in place while the model is validated."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: Average | None = None
        self._loaded: dict[str, Any] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Here the model is on its device; a checkpoint's state came before.
        self.average = Average(_model(pl_module), self.decay)
        if self._loaded is not None:
            self.average.load_state_dict(self._loaded)
            self._loaded = None

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self.average is not None:
            self.average.update()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.average is not None:
            self.average.apply()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.average is not None:
            self.average.restore()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the average inside the block."""
        if self.average is None or self.average.applied:
            yield
            return
        self.average.apply()
        try:
            yield
        finally:
            self.average.restore()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.average is None else self.average.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict


def _model(module: pl.LightningModule) -> nn.Module:
    model = module.model
    assert isinstance(model, nn.Module)
    return model
