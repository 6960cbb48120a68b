"""The learning rate, step by step: one-cycle, cosine, steps down, constant; each with a warm-up."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from .config import TrainConfig

__all__ = ["Factor", "make_schedule"]


class Factor:
    """The rate of step t = 0, 1, … over its highest, for all schedules but one-cycle.

    With w warm-up steps of T: (t + 1)/w while t < w; after that ½(1 + cos π(t − w)/(T − w)) for
    "cosine", drop^(milestones passed) for "step", 1 for "constant". A plain object of numbers, so
    that a checkpoint can hold it.
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
        if self.kind == "cosine":
            done = (step - self.warm) / max(1, self.total - self.warm)
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        if self.kind == "step":
            return float(self.drop ** sum(step >= passed for passed in self.milestones))
        return 1.0


def make_schedule(
    optimizer: Optimizer, config: TrainConfig, *, total: int, per_epoch: int
) -> LRScheduler:
    """The schedule of the configuration over ``total`` steps; call ``step()`` after each step."""
    if config.schedule != "onecycle":
        return LambdaLR(optimizer, Factor(config, total, per_epoch))
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
