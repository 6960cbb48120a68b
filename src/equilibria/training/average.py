"""The running average of the weights, which is what is validated and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from equilibria.nn import OperatorNorm
from equilibria.nn.constraints import settle_norms


class WeightAverage(pl.Callback):
    """w̄ ← d·w̄ + (1 − d)·w after every step t = 1, 2, …, with d = min(decay, (1 + t)/(10 + t)).

    The small d at first forgets the random start. Floating buffers of ``module.model`` (the
    statistics of batch norms) are averaged alike; the singular vectors of norm bounds are not
    averaged but found again for w̄ (``settle_norms``); integers, and masks that hold −∞, stay as
    they are. Weights below float32 are averaged in float32; validation sees the average.

    Lightning's EMAWeightAveraging averages singular vectors too, rounds to the weights' dtype at
    each validation, and waits for the device at each step.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._model: nn.Module | None = None
        self._mean: list[Tensor] = []
        self._aside: list[Tensor] = []
        self._loaded: dict[str, Any] = {}

    def follow(self, model: nn.Module) -> None:
        """Begin with the weights of ``model``, or with those of a checkpoint that was loaded."""
        vectors = {id(m.v) for m in model.modules() if isinstance(m, OperatorNorm)}
        vectors |= {id(t) for t in model.buffers() if not bool(t.isfinite().all())}
        tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        self._model = model
        self._live = [t for t in tensors if t.is_floating_point() and id(t) not in vectors]
        self._vectors = [t for t in tensors if id(t) in vectors]
        given = self._loaded.get("mean", self._live)
        wide = [torch.promote_types(t.dtype, torch.float32) for t in self._live]
        self._mean = [
            g.detach().to(t.device, w, copy=True)
            for g, t, w in zip(given, self._live, wide, strict=True)
        ]
        self.updates = int(self._loaded.get("updates", 0))

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        live = [t.detach().to(m.dtype) for t, m in zip(self._live, self._mean, strict=True)]
        torch._foreach_lerp_(self._mean, live, 1.0 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Put the average into the model, in place, and keep its own weights aside."""
        if self._model is not None and not self._aside:
            self._aside = [t.detach().clone() for t in (*self._live, *self._vectors)]
            torch._foreach_copy_(self._live, self._mean)
            settle_norms(self._model)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model its own weights back, bit for bit."""
        if self._aside:
            torch._foreach_copy_([*self._live, *self._vectors], self._aside)
            self._aside = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the average inside the block."""
        self.apply()
        try:
            yield
        finally:
            self.restore()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = pl_module.model  # on its device now; a checkpoint's state came before
        assert isinstance(model, nn.Module)
        self.follow(model)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.update()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.apply()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.restore()

    def state_dict(self) -> dict[str, Any]:
        """The averages in the order of the model's tensors, and the count of updates."""
        return {"updates": self.updates, "mean": list(self._mean)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
