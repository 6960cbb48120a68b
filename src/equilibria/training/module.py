"""The LightningModule: loss, metrics, optimizer, schedule, and the watch over the solvers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equilibria.engine.optional import needs
from equilibria.nn import observe

from .config import TrainConfig
from .epoch_metrics import EpochMetrics, solver_numbers
from .graphed_model import GraphedModel
from .nonfinite import Guard, NonFiniteLoss, describe, examine
from .optimizer import gradient_norm, make_optimizer, make_schedule
from .penalty import JacobianPenalty

__all__ = ["EquilibriumModule"]

_WATCHED = 64  # samples that are solved once more where the compiled solve cannot be seen


class EquilibriumModule(pl.LightningModule):
    """Trains ``model``: x [B, C, H, W] → logits [B, K] or [B, K, H, W].

    The loss is cross entropy with label smoothing (and, if asked for, the Jacobian penalty);
    validation reports plain cross entropy, accuracy and, for segmentation, the mean intersection
    over union. No number is read from the device in a step: ``metrics`` sums them there.

    Args:
        model: the network; its weights are the only state of this module.
        config: optimizer, schedule, loss.
        num_classes: K.
        task: "classification" or "segmentation".
        ignore_index: label of pixels that do not count.
        total_steps, steps_per_epoch: for the schedule; None: what the trainer plans.

    Under ``fit`` the run counts, reads and logs. With a trainer of your own the module does so
    itself and logs train_loss, train_accuracy, val_loss, … with Lightning's ``log``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        num_classes: int,
        task: str = "classification",
        ignore_index: int | None = None,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.task = task
        self.ignore_index = ignore_index
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.step = 0
        """Optimizer steps taken since the run began."""
        self.counts = True
        """Whether the module counts its steps and logs; not under ``fit``, where the run does."""
        self.metrics = EpochMetrics()
        self.guard = Guard(deferred=False)
        self.on_nonfinite: Callable[[dict[str, Any]], NoReturn] = _raise
        self.validation: dict[str, float] = {}
        """What the latest validation found."""
        self._penalty = JacobianPenalty(model, config.jacobian_weight)
        self._batch: tuple[Tensor, Tensor] | None = None
        self._trained = [p for p in model.parameters() if p.requires_grad]
        # Not an attribute that torch registers: the compiled model is the model itself.
        self.__dict__["_compiled"] = _made_fast(model, config)
        with needs("torchmetrics", "training"):
            from torchmetrics.aggregation import MeanMetric
            from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
        labels = {"num_classes": num_classes, "ignore_index": ignore_index, "validate_args": False}
        self.val_accuracy = MulticlassAccuracy(average="micro", **labels)
        self.val_iou = MulticlassJaccardIndex(**labels) if task == "segmentation" else None
        self.val_loss = MeanMetric(nan_strategy="disable")

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the name of every hook that it calls as an attribute, some fifty times a
        # step, and torch looks each time whether it is a parameter, a module or a buffer.
        if name in self.__dict__ and not isinstance(value, (nn.Module, nn.Parameter)):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # ------------------------------------------------------------------ forward and loss

    def forward(self, x: Tensor) -> Tensor:
        # Steps of training alone: validation would compile a graph without gradients, and one
        # more for its last, shorter batch, each of which takes as long as the first.
        compiled = self.__dict__["_compiled"] if self.model.training else None
        found: Tensor = self.model(x) if compiled is None else compiled(x)
        return found

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Cross entropy of each sample, [B]; of an image the mean over its pixels that count."""
        each = self._cross_entropy(logits, y, 0.0, "none")
        if each.ndim == 1:
            return each
        count = self._counted(y).flatten(1).sum(1)
        return each.flatten(1).sum(1) / count.clamp_min(1)

    def loss(self, logits: Tensor, y: Tensor, smoothing: float) -> Tensor:
        """Cross entropy, averaged over the labels that count."""
        if self.ignore_index is None:
            return self._cross_entropy(logits, y, smoothing, "mean")
        # A batch in which nothing counts has the loss 0, not 0/0.
        total = self._cross_entropy(logits, y, smoothing, "sum")
        return total / self._counted(y).sum().clamp_min(1)

    def _cross_entropy(self, logits: Tensor, y: Tensor, smoothing: float, reduction: str) -> Tensor:
        ignored = -100 if self.ignore_index is None else self.ignore_index
        # In float32 or better whatever the precision: exponentials of bfloat16 logits are coarse.
        work = torch.promote_types(logits.dtype, torch.float32)
        return nn.functional.cross_entropy(
            logits.to(work),
            y,
            label_smoothing=smoothing,
            ignore_index=ignored,
            reduction=reduction,
        )

    def _counted(self, y: Tensor) -> Tensor:
        return (
            torch.ones_like(y, dtype=torch.bool)
            if self.ignore_index is None
            else (y != self.ignore_index)
        )

    # ------------------------------------------------------------------ training

    def on_fit_start(self) -> None:
        if self.config.cuda_graphs and self.device.type != "cuda":
            raise ValueError(
                f"TrainConfig(cuda_graphs=True): this run is on {self.device.type}, and CUDA "
                "graphs need a CUDA device; leave cuda_graphs out."
            )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self._batch = batch
        # The first step of an epoch too: a short one would have no statistics otherwise.
        per_epoch = self.steps_per_epoch or self.config.log_every
        watched = self.step % self.config.log_every == 0 or self.step % per_epoch == 0
        penalty: Tensor | None = None
        if self._penalty.active:
            with self._penalty.collect() as found:
                logits = self._run(x, watched)
            penalty = torch.stack([part.float() for part in found]).sum()
        else:
            logits = self._run(x, watched)
        loss = self.loss(logits, y, self.config.label_smoothing)
        total = loss if penalty is None else loss + penalty
        with torch.no_grad():
            mixed = y.is_floating_point()
            right = logits.argmax(1) == (y.argmax(1) if mixed else y)
            count: Tensor | int = right.numel()
            if self.ignore_index is not None:
                counted = self._counted(y)
                right, count = right & counted, counted.sum()
            self.metrics.add(loss.detach(), right.sum(), count)
        if self.guard.sees(total, self.step):
            self._report("loss", total)
        return total

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self.counts:
            self.step += 1

    def on_train_epoch_end(self) -> None:
        if self.counts:
            row = self.metrics.row()
            means = {f"train_{name}": row.pop(name) for name in ("loss", "accuracy")}
            self.log_dict({**means, **row}, sync_dist=True)
            self.metrics = EpochMetrics()

    def _run(self, x: Tensor, watched: bool) -> Tensor:
        if not watched:
            return self.forward(x)
        if self.__dict__["_compiled"] is not None:
            logits = self.forward(x)
            self._watch_apart(x[:_WATCHED])
            return logits
        with observe(self.model) as seen:
            logits = self.forward(x)
        self.metrics.add_solver(solver_numbers(self.model, seen))
        return logits

    @torch.no_grad()
    def _watch_apart(self, x: Tensor) -> None:
        """A compiled or replayed solve cannot be seen: solve a few samples again, in eval mode."""
        modes = [(m, m.training) for m in self.model.modules()]
        self.model.eval()
        try:
            with observe(self.model) as seen:
                self.model.forward(x)
        finally:
            for module, mode in modes:
                module.training = mode
        self.metrics.add_solver(solver_numbers(self.model, seen))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Between backward and the optimizer's step: the norm of the gradient, once, for all."""
        limit = self.config.clip
        if self.config.strategy == "fsdp":  # gradients are shards: their norm is Lightning's affair
            if limit is not None:
                self.clip_gradients(optimizer, limit, "norm")
            return
        norm = gradient_norm(self._trained)
        if norm is None:
            return
        self.metrics.gradient_norm = norm
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(self._trained, limit, norm)
        if self.config.precision.startswith("16"):
            return  # infinite gradients are how the loss scale finds its size; it skips them itself
        if self.guard.sees(norm, self.step):
            self._report("norm of the gradient", norm)
        if self.guard.deferred:
            inner = getattr(optimizer, "optimizer", optimizer)
            self.guard.protect(inner, shared=self.trainer.world_size > 1)

    def _report(self, what: str, value: Tensor) -> NoReturn:
        assert self._batch is not None
        found = {"what": what, "value": str(float(value.detach())), **self.examine(*self._batch)}
        self.on_nonfinite(found)

    def examine(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """What a batch does in the model as it is now, for the report of a NaN."""
        return examine(self.model, x, y, self.losses)

    # ------------------------------------------------------------------ validation

    def on_validation_epoch_start(self) -> None:
        for metric in (self.val_loss, self.val_accuracy, self.val_iou):
            if metric is not None:
                metric.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self.forward(x).float()
        count = len(y) if self.ignore_index is None else self._counted(y).sum()
        self.val_loss.update(self.loss(logits, y, 0.0), count)
        self.val_accuracy.update(logits, y)
        if self.val_iou is not None:
            self.val_iou.update(logits, y)

    def on_validation_epoch_end(self) -> None:
        self.validation = {
            "val_loss": float(self.val_loss.compute()),
            "val_accuracy": float(self.val_accuracy.compute()),
        }
        if self.val_iou is not None:
            self.validation["val_miou"] = float(self.val_iou.compute())
        if self.counts:
            self.log_dict(self.validation, sync_dist=True)

    # ------------------------------------------------------------------ optimization

    @property
    def defers(self) -> bool:
        """Whether NaN is looked for every ``log_every`` steps only, to keep the device busy."""
        return self.device.type == "cuda" and self.config.strategy != "fsdp"

    def configure_optimizers(self) -> Any:
        # Fused kernels: one launch for all parameters, and they can skip a step on the device.
        deferred = self.defers
        self.guard = Guard(deferred=deferred)
        # The loss scaler and clipping cannot share a fused optimizer: it unscales by itself.
        unscaled = not (self.config.precision.startswith("16") and self.config.clip is not None)
        optimizer = make_optimizer(self.model, self.config, fused=deferred and unscaled)
        total = self.total_steps
        if total is None:
            total = int(self.trainer.estimated_stepping_batches)
        per_epoch = self.steps_per_epoch
        if per_epoch is None:
            per_epoch = max(1, total // max(1, self.trainer.max_epochs or 1))
        schedule = make_schedule(optimizer, self.config, total=total, per_epoch=per_epoch)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1},
        }


def _made_fast(model: nn.Module, config: TrainConfig) -> Callable[[Tensor], Tensor] | None:
    """The model as training steps call it, if not as it is."""
    if config.cuda_graphs:
        return GraphedModel(model)
    if config.compile:
        compiled: Callable[[Tensor], Tensor] = torch.compile(model, dynamic=False)
        return compiled
    return None


def _raise(report: dict[str, Any]) -> NoReturn:
    """Where nobody knows of epochs and folders."""
    full = {"epoch": "?", "batch": "?", "step": "?", "indices": [], **report}
    raise NonFiniteLoss(describe(full), full)
