"""What is measured at a point of training: the PL* ratio, λ_min and λ_max of K, the drift of K.

PL* with μ:             ½‖∇L‖² ≥ μL
uniform conditioning:   λ_min(K(θ)) ≥ μ for all θ in a ball; then PL* holds there for L = ½‖f − y‖²

For any loss of the outputs ∇L = Jᵀg with g = ∂L/∂f, so ‖∇L‖² = gᵀKg ≥ λ_min(K)‖g‖²; for the
squared loss ‖g‖² = 2L and the bound on ‖∇L‖²/(2L) is λ_min itself (Liu, Zhu and Belkin 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from equilibria.evaluation import evaluating
from equilibria_papers.theory.checks import check_sizes
from equilibria_papers.theory.ntk.kernel import (
    Choice,
    Filter,
    Method,
    TangentKernel,
    empirical_ntk,
    flat_outputs,
    select_parameters,
)
from equilibria_papers.theory.ntk.spectrum import (
    kernel_distance,
    kernel_drift,
    label_alignment,
    spectrum,
)

__all__ = ["KernelMonitor", "KernelProbe"]

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [N, K], targets) ↦ a number


def squared_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """½‖f − y‖²; classes are taken as one-hot vectors."""
    if not targets.is_floating_point():
        targets = nn.functional.one_hot(targets, outputs.shape[1])
    return 0.5 * (outputs - targets.reshape(outputs.shape)).square().sum()


class KernelProbe:
    """A fixed batch on which a model is measured again and again; the first time is the start.

    Args:
        x: the batch, [N, …].
        targets: classes [N] or values; None: no loss, no alignment.
        loss: (outputs [N, K], targets) ↦ a number; the theory is about ½‖f − y‖², the default.
        outputs, parameters, method: as in ``empirical_ntk``. The bound on the PL* ratio needs
            outputs="all".
    """

    def __init__(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        loss: Loss = squared_loss,
        outputs: Choice = "all",
        parameters: Filter = None,
        method: Method = "auto",
    ) -> None:
        if targets is not None and len(targets) != len(x):
            raise ValueError(f"{len(x)} samples and {len(targets)} targets: expected one each.")
        self.x, self.targets, self.loss, self.parameters = x, targets, loss, parameters
        self.options: dict[str, Any]
        self.options = {"outputs": outputs, "parameters": parameters, "method": method}
        self.start_kernel: Tensor | None = None
        """K_0, on the CPU."""
        self.start: list[Tensor] = []
        """θ_0, on the CPU."""

    @property
    def bounds(self) -> bool:
        """Whether λ_min of the kernel that is computed bounds the PL* ratio."""
        return bool(self.options["outputs"] == "all")

    def measure(self, model: nn.Module) -> dict[str, float]:
        """λ_min, λ_max, drift, distance from the start and, with targets, loss and PL* ratio."""
        chosen = list(select_parameters(model, self.parameters).values())
        self.x = self.x.to(chosen[0].device)
        if self.x.is_floating_point():
            self.x = self.x.to(chosen[0].dtype)
        kernel = empirical_ntk(model, self.x, **self.options)
        now = [p.detach().cpu() for p in chosen]
        if self.start_kernel is None:
            self.start_kernel = kernel.matrix.cpu()
            self.start = [p.clone() for p in now]
        pairs = zip(now, self.start, strict=True)
        found = spectrum(kernel)
        row = {
            "lambda_min": found.smallest,
            "lambda_max": found.largest,
            "condition": found.condition,
            "effective_rank": found.effective_rank,
            "trace": found.trace,
            "drift": kernel_drift(kernel.matrix.cpu(), self.start_kernel),
            "kernel_distance": kernel_distance(kernel.matrix.cpu(), self.start_kernel),
            "moved": math.sqrt(sum(float((a - b).double().square().sum()) for a, b in pairs)),
        }
        if self.targets is not None:
            self.targets = self.targets.to(self.x.device)
            row |= self._losses(model, chosen, self.targets, kernel, found.smallest)
        return row

    def _losses(
        self,
        model: nn.Module,
        parameters: list[Tensor],
        targets: Tensor,
        kernel: TangentKernel,
        low: float,
    ) -> dict[str, float]:
        with evaluating(model, warn=True), torch.enable_grad():
            outputs = flat_outputs(model, self.x)
            loss = self.loss(outputs, targets)
            at_outputs = torch.autograd.grad(loss, outputs, retain_graph=True)[0]
            given = torch.autograd.grad(loss, parameters, materialize_grads=True)
        slope = sum([float(g.square().sum()) for g in given], 0.0)
        value = float(loss.detach())

        def over_loss(squared: float) -> float:
            return squared / (2 * value) if value > 0 else math.nan

        row = {"loss": value, "gradient_squared": slope, "pl_ratio": over_loss(slope)}
        if self.bounds:
            row["pl_bound"] = over_loss(low * float(at_outputs.square().sum()))
        if targets.ndim == 1 or (targets.ndim == 2 and targets.is_floating_point()):
            row["alignment"] = label_alignment(kernel, targets)
        return row

    def state_dict(self) -> dict[str, Any]:
        """The start, to go on measuring after a pause."""
        return {"kernel": self.start_kernel, "parameters": list(self.start)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start_kernel = state["kernel"]
        self.start = list(state["parameters"])


class KernelMonitor(pl.Callback):
    """Measure ``module.model``, or the module itself, at the start and after every so many epochs.

    ``rows`` holds what was found. Each number also goes to the trainer's loggers, as ``name/…``.
    The run itself is not changed: the model is measured in eval mode, on its own, and no random
    number is drawn.

    Args:
        probe: the batch, and what is computed on it.
        every: measure every so many epochs.
        name: before the names of the logged numbers; two monitors of a run need two names.
    """

    def __init__(self, probe: KernelProbe, *, every: int = 1, name: str = "ntk") -> None:
        check_sizes("KernelMonitor", {"every": every})
        self.probe, self.every, self.name = probe, every, name
        self.rows: list[dict[str, float]] = []
        self.epoch = 0

    @property
    def state_key(self) -> str:
        return f"KernelMonitor{{{self.name}}}"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if "FSDP" in type(trainer.strategy).__name__:
            raise ValueError("KernelMonitor needs all parameters in one place: use strategy 'ddp'.")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.rows:
            self._measure(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epoch += 1
        if self.epoch % self.every == 0:
            self._measure(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        rows = [dict(row) for row in self.rows]
        return {"rows": rows, "epoch": self.epoch, "probe": self.probe.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [dict(row) for row in state_dict["rows"]]
        self.epoch = state_dict["epoch"]
        self.probe.load_state_dict(state_dict["probe"])

    def _measure(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A row; on the first process only, as all hold the same weights."""
        if not trainer.is_global_zero:
            return
        inner = getattr(pl_module, "model", None)
        found = self.probe.measure(inner if isinstance(inner, nn.Module) else pl_module)
        self.rows.append({"epoch": self.epoch, **found})
        named = {f"{self.name}/{key}": value for key, value in found.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)
