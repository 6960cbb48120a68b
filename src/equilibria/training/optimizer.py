"""Optimizers and schedules: which parameters decay, SGD and AdamW, the rate of every step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from equilibria.nn.constraints import RowNorm

from .config import TrainConfig

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights, which decay, and the norms, biases and scales, which do not.

    A scale is every parameter of at most one dimension (γ of a Gaussian layer too) and g of
    W = g·V/‖V‖. Matrices and kernels under a norm constraint are weights.
    """
    scales: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, _NORMS):
            scales.update(module.parameters(recurse=False))
        if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], RowNorm):
            scales.add(module.original0)  # type: ignore[arg-type]
    trained = [p for p in model.parameters() if p.requires_grad]
    free = {p for p in trained if p.ndim <= 1 or p in scales}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p not in free], "weight_decay": weight_decay},
        {"params": [p for p in trained if p in free], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: TrainConfig, *, fused: bool = False) -> Optimizer:
    """The optimizer of the configuration. ``fused`` runs one kernel for all, where it exists."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        name = type(model).__name__
        raise ValueError(f"{name} has no parameter that requires a gradient: nothing to train.")
    parameters: Any = trained if config.decay_norms else decay_groups(model, config.weight_decay)
    common: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "fused": True if fused else None,
    }
    if config.optimizer == "adamw":
        return AdamW(parameters, betas=(config.momentum, 0.999), **common)
    made = SGD(parameters, momentum=config.momentum, nesterov=config.nesterov, **common)
    if fused and config.momentum > 0.0:
        # Torch's fused SGD stumbles over a parameter whose first gradient comes late; a buffer of
        # zeros is what the first step starts from in any case.
        for parameter in trained:
            made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made


class _Factor:
    """The rate of step t = 0, 1, … over its highest, for all schedules but one-cycle.

    With w warm-up steps of T: (t + 1)/w while t < w; after that, with s = (t − w)/(T − w),
    ½(1 + cos πs) for "cosine", (1 − s)^0.9 for "poly", drop^(milestones passed) for "step", 1 for
    "constant". A checkpoint can hold it.
    """

    def __init__(self, config: TrainConfig, total: int, per_epoch: int) -> None:
        self.kind = config.schedule
        self.total = total
        self.warm = round(config.warmup_share * total)
        self.milestones = [epoch * per_epoch for epoch in config.milestones]
        self.drop = config.drop

    def __call__(self, step: int) -> float:
        if step < self.warm:
            return (step + 1) / self.warm
        done = min(1.0, (step - self.warm) / max(1, self.total - self.warm))
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        if self.kind == "poly":
            return float((1.0 - done) ** 0.9)
        if self.kind == "step":
            return float(self.drop ** sum(step >= passed for passed in self.milestones))
        return 1.0


def make_schedule(
    optimizer: Optimizer, config: TrainConfig, *, total: int, per_epoch: int
) -> LRScheduler:
    """The schedule of the configuration over ``total`` steps; call ``step()`` after each step."""
    if config.schedule != "onecycle":
        return LambdaLR(optimizer, _Factor(config, total, per_epoch))
    share = config.warmup_share
    if math.isclose(share * total, 1.0, rel_tol=1e-9):
        share *= 1.0 + 1e-6  # torch divides by share·total − 1
    return OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=total,
        pct_start=share,
        cycle_momentum=config.cycle_momentum and config.momentum > 0.0,
    )
