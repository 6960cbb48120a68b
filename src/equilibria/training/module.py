"""The LightningModule: loss, metrics, optimizer, schedule, and statistics of the solvers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics.aggregation import SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from equilibria.engine.spectral import jacobian_penalty
from equilibria.nn import EquilibriumLayer, MapLayer, equilibrium_layers, observe
from equilibria.nn.observing import collect_penalties

from .config import TrainConfig, refuse
from .epoch_metrics import EpochMetrics, solver_numbers
from .graphed_model import GraphedModel
from .half_steps import HalfSteps
from .nonfinite import Guard, NonFiniteLoss, describe, examine
from .optimizer import make_optimizer, make_schedule

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

    With a trainer of your own the module logs train_loss, train_accuracy, val_loss, … with
    Lightning's ``log``; under ``fit`` the run does.
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
        self.model, self.config = model, config
        self.task, self.ignore_index = task, ignore_index
        self._ignored = -100 if ignore_index is None else ignore_index  # torch's own: no label
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.step = 0
        """Optimizer steps taken since the run began."""
        self.logs = True
        """Whether the module logs the means of an epoch; not under ``fit``, where the run does."""
        self.weighs = False
        """Whether processes count different numbers of labels: each loss then weighs by its own."""
        self.metrics = EpochMetrics()
        self.guard = Guard(deferred=False)
        self.on_nonfinite: Callable[[dict[str, Any]], NoReturn] = _raise
        self.validation: dict[str, float] = {}
        """What the latest validation found."""
        self._penalty = JacobianPenalty(model, config.jacobian_weight)
        self._half = HalfSteps(model, config)
        self._batch: tuple[Tensor, Tensor] | None = None
        self._trained = [p for p in model.parameters() if p.requires_grad]
        compiled: Any = GraphedModel(model) if config.cuda_graphs else None
        if config.compile:
            compiled = torch.compile(model, dynamic=False)
        # Not an attribute that torch registers: the compiled model is the model itself.
        self.__dict__["_compiled"] = compiled
        labels: dict[str, Any] = {"num_classes": num_classes, "ignore_index": ignore_index}
        labels["validate_args"] = False
        self._metrics: Any = nn.ModuleDict(
            {
                # Not a MeanMetric: without its test for NaN, which waits, it forgets the weights.
                "val_loss": SumMetric(nan_strategy="disable"),
                "val_count": SumMetric(nan_strategy="disable"),
                "val_accuracy": MulticlassAccuracy(average="micro", **labels),
            }
        )
        if task == "segmentation":
            self._metrics["val_miou"] = MulticlassJaccardIndex(**labels)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the name of every hook that it calls as an attribute, some fifty times a
        # step, and torch looks each time whether it is a parameter, a module or a buffer.
        if name in self.__dict__ and not isinstance(value, (nn.Module, nn.Parameter)):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

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
        return each.flatten(1).sum(1) / self._counted(y).flatten(1).sum(1).clamp_min(1)

    def loss(self, logits: Tensor, y: Tensor, smoothing: float) -> Tensor:
        """Cross entropy, averaged over the labels that count."""
        if self.ignore_index is None:
            return self._cross_entropy(logits, y, smoothing, "mean")
        # A batch in which nothing counts has the loss 0, not 0/0.
        total = self._cross_entropy(logits, y, smoothing, "sum")
        return total / self._counted(y).sum().clamp_min(1)

    def training_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """τ·CE((logits − margin·target)/τ), with label smoothing; plain at margin 0 and τ = 1."""
        margin, tau = self.config.margin, self.config.temperature
        if margin:
            target = y if y.is_floating_point() else self._one_hot(y, logits)
            logits = logits - margin * target
        loss = self.loss(logits if tau == 1.0 else logits / tau, y, self.config.label_smoothing)
        return loss if tau == 1.0 else tau * loss

    def _one_hot(self, y: Tensor, logits: Tensor) -> Tensor:
        """[B, K, ...], 1 at the label and 0 for labels that do not count."""
        known = y.clamp(0, logits.shape[1] - 1).unsqueeze(1)
        return torch.zeros_like(logits).scatter(1, known, self._counted(y).unsqueeze(1).to(logits))

    def _cross_entropy(self, logits: Tensor, y: Tensor, smoothing: float, reduction: str) -> Tensor:
        # In float32 or better whatever the precision: exponentials of bfloat16 logits are coarse.
        work = logits.to(torch.promote_types(logits.dtype, torch.float32))
        options: dict[str, Any] = {"ignore_index": self._ignored, "reduction": reduction}
        return nn.functional.cross_entropy(work, y, label_smoothing=smoothing, **options)

    def _counted(self, y: Tensor) -> Tensor:
        return y != self._ignored

    def on_fit_start(self) -> None:
        if self.config.cuda_graphs and self.device.type != "cuda":
            why = f"this run is on {self.device.type}, and CUDA graphs need a CUDA device"
            refuse("cuda_graphs", True, f"{why}; leave them out")

    @property
    def _epoch(self) -> int:
        """Since the run began, also where it was resumed: the trainer of ``fit`` counts anew."""
        return self.step // self.steps_per_epoch if self.steps_per_epoch else self.current_epoch

    def on_train_epoch_start(self) -> None:
        if self.config.cuda_graphs and 0 < self._half.epochs == self._epoch:
            # No more half steps: free their graphs, in whose memory the latest gradients lie, so
            # that all steps are captured. torch keeps a captured module in a cycle.
            self.__dict__["_compiled"] = GraphedModel(self.model)
            self.zero_grad()
            gc.collect()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = self._batch = batch
        # The first step of an epoch too: a short one would have no statistics otherwise.
        per_epoch = self.steps_per_epoch or self.config.log_every
        watched = self.step % self.config.log_every == 0 or self.step % per_epoch == 0
        with self._penalty.collect() as penalties, self._half.taken(self._epoch):
            logits = self._run(x, watched)
        loss = self.training_loss(logits, y)
        with torch.no_grad():
            labels = y.argmax(1) if y.is_floating_point() else y
            counted = self._counted(labels)
            right = (logits.argmax(1) == labels) & counted
            self.metrics.add(loss.detach(), right.sum(), counted.sum(), len(y))
        if self.weighs:  # Lightning takes the mean over processes: make it that over all labels
            mine = counted.sum().to(loss.dtype)
            total = mine.clone()
            torch.distributed.all_reduce(total)
            loss = loss * (mine * self.trainer.world_size / total.clamp_min(1))
        if penalties:
            loss = loss + torch.stack([part.float() for part in penalties]).sum()
        if self.guard.sees(loss, self.step):
            self._report("loss", loss)
        return loss

    def _run(self, x: Tensor, watched: bool) -> Tensor:
        if not watched:
            return self.forward(x)
        if self.__dict__["_compiled"] is None:
            with observe(self.model) as seen:
                logits = self.forward(x)
        else:
            logits = self.forward(x)
            # A compiled or replayed solve cannot be seen: solve a few samples again, in eval mode.
            modes = [(m, m.training) for m in self.model.modules()]
            self.model.eval()
            with torch.no_grad(), observe(self.model) as seen:
                self.model.forward(x[:_WATCHED])
            for module, mode in modes:
                module.training = mode
        self.metrics.add_solver(solver_numbers(seen))
        return logits

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.step += 1

    def on_train_epoch_end(self) -> None:
        if self.logs:
            row = self.metrics.row()
            means = {f"train_{name}": row.pop(name) for name in ("loss", "accuracy")}
            self.log_dict({**means, **row}, sync_dist=True)
            self.metrics = EpochMetrics()

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
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])
        self.metrics.gradient_norm = norm
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(self._trained, limit, norm)
        scaler: Any = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:  # infinite gradients are how it finds its size; it skips them itself
            if self.guard.deferred and limit is None:  # a fused optimizer unscales as it steps
                self.metrics.gradient_norm = norm / scaler.scale(torch.ones_like(norm))
            return
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
        with self._half.taken(self._epoch):
            return examine(self.model, x, y, self.losses)

    def on_validation_epoch_start(self) -> None:
        # A precision such as bf16-true rounds the sums too, until they grow no more.
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        for metric in self._metrics.values():
            metric.reset()
            if isinstance(metric, SumMetric):
                metric.set_dtype(wide)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self.forward(x)
        count = self._counted(y).sum()
        sums = {"val_loss": self.loss(logits, y, 0.0) * count, "val_count": count}
        for name, metric in self._metrics.items():
            metric.update(sums[name]) if name in sums else metric.update(logits, y)

    def on_validation_epoch_end(self) -> None:
        found = {name: float(m.compute()) for name, m in self._metrics.items()}
        found["val_loss"] /= max(found.pop("val_count"), 1.0)
        self.validation = found
        if self.logs:
            self.log_dict(self.validation, sync_dist=True)

    @property
    def defers(self) -> bool:
        """Whether NaN is looked for every ``log_every`` steps only, to keep the device busy."""
        return self.device.type == "cuda" and self.config.strategy != "fsdp"

    def configure_optimizers(self) -> Any:
        # Fused kernels: one launch for all parameters, and they can skip a step on the device.
        self.guard = Guard(deferred=self.defers)
        # The loss scaler and clipping cannot share a fused optimizer: it unscales by itself.
        unscaled = not (self.config.precision == "16-mixed" and self.config.clip is not None)
        optimizer = make_optimizer(self.model, self.config, fused=self.defers and unscaled)
        total = self.total_steps or int(self.trainer.estimated_stepping_batches)
        per_epoch = self.steps_per_epoch or max(1, total // max(1, self.trainer.max_epochs or 1))
        schedule = make_schedule(optimizer, self.config, total=total, per_epoch=per_epoch)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1},
        }


def _raise(report: dict[str, Any]) -> NoReturn:
    """Where nobody knows of epochs and folders."""
    full = {"epoch": "?", "batch": "?", "step": "?", "indices": [], **report}
    raise NonFiniteLoss(describe(full), full)


class JacobianPenalty:
    """Σ_layers weight·mean_b ‖J(z*_b)‖²_F / n, with one random vector a layer (Hutchinson).

    Layers that take a ``jacobian_weight`` themselves (DEQ, MDEQ) penalize their own map, with the
    weight that they were made with or, where that is zero, with this one. For the others the map is
    evaluated once more at z*, which is taken as a constant (Bai et al. 2021).
    """

    def __init__(self, model: nn.Module, weight: float) -> None:
        self.weight = weight
        self._model = model
        layers = equilibrium_layers(model)
        own: list[Any] = [m for m in layers.values() if hasattr(m, "jacobian_weight")]
        if weight:
            for layer in own:
                layer.jacobian_weight = layer.jacobian_weight or weight
        self._others = [m for m in layers.values() if m not in own] if weight else []
        unknown = [m for m in self._others if not isinstance(m, (EquilibriumLayer, MapLayer))]
        if weight and (unknown or not layers):
            what = f"{type(unknown[0]).__name__} shows none" if unknown else "there is none"
            why = f"it needs layers whose map is known, and {what} in {type(model).__name__}"
            refuse("jacobian_weight", weight, f"{why}; leave it at 0")
        self.active = bool(self._others) or any(layer.jacobian_weight for layer in own)
        """Whether there is anything to penalize."""

    @contextmanager
    def collect(self) -> Iterator[list[Tensor]]:
        """Run the model inside the block; after it the list holds one scalar for each layer."""
        found: list[Tensor] = []
        if not self.active:
            yield found
            return
        seen: list[tuple[nn.Module, Any, Any]] = []

        def note(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            seen.append((layer, inputs[0], output))

        with ExitStack() as hooks, collect_penalties(self._model) as own:
            for layer in self._others:
                hooks.enter_context(layer.register_forward_hook(note))
            yield found
        found += [self.weight * _penalty(*one).mean() for one in seen]
        if len(own):
            found.append(torch.as_tensor(own.total()))


def _penalty(layer: nn.Module, x: Tensor, z: Any) -> Tensor:
    if isinstance(layer, EquilibriumLayer):
        return jacobian_penalty(layer.problem(x).step, z)
    assert isinstance(layer, MapLayer)
    return jacobian_penalty(layer.step, z, layer.inject(x))
