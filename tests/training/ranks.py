"""Trainings whose first gradients are compared: by one process here, by several under torchrun.

``torchrun --nproc-per-node 2 -m tests.training.ranks FOLDER cpu`` writes one file for each process.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

import equilibria as eq
from equilibria.data import ImageData
from equilibria.training import fit

from .small import Pixels, config, digits, masks


class Gradients(pl.Callback):
    """Those of the first step, after they were averaged over processes, and by what."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.backend = "none"

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.found:
            named = pl_module.model.named_parameters()
            self.found = {n: p.grad.clone() for n, p in named if p.grad is not None}
            if torch.distributed.is_initialized():
                self.backend = torch.distributed.get_backend()


def network(norm: bool, rtol: float) -> nn.Module:
    """A GEQ solved to its tolerance, each sample by its own number of steps."""
    torch.manual_seed(0)
    layer = eq.nn.GEQ(
        *(8, 8),
        in_channels=64,
        hidden=None,
        constraint=eq.nn.NormBounded(bound=0.95),
        solver=eq.Picard(rtol=rtol, max_steps=2000),
        adjoint=eq.Implicit(solver=eq.GMRES(rtol=rtol)),
    )
    first = [nn.BatchNorm1d(64)] if norm else []
    return nn.Sequential(nn.Flatten(), *first, layer, nn.Linear(8, 10))


OPTIONS: dict[str, Any] = {"epochs": 1, "lr": 0.05, "precision": "64-true"}
CASES: dict[str, dict[str, Any]] = {
    "own number of steps": {"ema": 0.9},
    "one uneven batch": {"batch_size": 128},
    "labels that do not count": {},
    "joint batch norms": {"sync_batchnorm": True},
    "sharded": {"strategy": "fsdp", "precision": "32-true"},
    "resumed": {"epochs": 2},
}


def data(name: str) -> tuple[ImageData, ImageData]:
    if name == "labels that do not count":
        whole = masks()
        targets = torch.as_tensor(whole.targets).clone()
        targets[:24:3, 2:] = 255  # more on some processes than on others
        whole = dataclasses.replace(whole, targets=targets)
        return whole.subset(range(32)), whole.subset(range(32, 39))
    few = 101 if name == "one uneven batch" else 96
    train, valid = digits()
    return train.subset(range(few)), valid.subset(range(37))  # 37: uneven in validation


def case(name: str, out: Path, *, resume: Any = None, stop: Any = (), **more: Any) -> Any:
    """Train a case: its first gradients, final weights and history."""
    seen = Gradients()
    rtol = 1e-5 if name == "sharded" else 1e-12  # in float32, which FSDP takes
    model = network(name == "joint batch norms", rtol)
    if name == "labels that do not count":
        torch.manual_seed(0)
        model = Pixels(3)
    settings = config(out, **{**OPTIONS, **CASES[name], **more})
    given: dict[str, Any] = {"data": data(name), "model": model, "resume": resume}
    result = fit(settings, progress=False, callbacks=[seen, *stop], **given)
    rows = [{k: row[k] for k in ("step", "train_loss", "val_loss")} for row in result.history]
    found = {"gradients": seen.found, "weights": result.model.state_dict(), "history": rows}
    return {**found, "backend": seen.backend}


def main(folder: Path, accelerator: str) -> None:
    world, found = int(os.environ["WORLD_SIZE"]), {}
    torch.set_num_threads(1)
    for name, options in CASES.items():
        resume = folder / "cut" if name == "resumed" else None
        given = {"devices": world, "strategy": "ddp", "accelerator": accelerator, **options}
        found[name] = case(name, folder / name, resume=resume, **given)
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
