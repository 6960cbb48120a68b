"""Several processes of one training: their strategy, their joint batch norms, their common end."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equilibria.nn import MultiBranch

_LOST = re.compile(
    r"(?i)gloo|nccl|connection (closed|reset)|timed out|timeout|pair closure|process group|store"
)
_OBSERVER = "lightning.fabric.strategies.launchers.subprocess_script"


class ProcessLostError(RuntimeError):
    """A process of the training was killed, failed, or did not answer in time."""


def rank() -> int:
    """This process among all, known before there is a trainer: from the environment."""
    known = int(getattr(rank_zero_only, "rank", 0) or 0)
    return known or int(os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or 0)


class Sharded(FSDPStrategy):
    """FSDP; on the CPU too, which Lightning refuses and torch can (gloo)."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.root_device.type == "cpu":
            from torch.distributed.fsdp import FullyShardedDataParallel

            settings = {**self.kwargs, "device_id": self.root_device}
            settings["sharding_strategy"] = self.sharding_strategy
            model = FullyShardedDataParallel(model, **settings)
        return super()._setup_model(model)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.root_device.type != "cpu":
            return super().lightning_module_state_dict()
        from torch.distributed import fsdp

        # Lightning moves it to the CPU, where torch then reads memory that it has freed.
        assert self.model is not None
        where = fsdp.FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        kind = fsdp.StateDictType.FULL_STATE_DICT
        with fsdp.FullyShardedDataParallel.state_dict_type(self.model, kind, where):
            return dict(self.model.state_dict())


def limit_wait(seconds: float) -> None:
    """From here on, when all have started, a process waits so long for the others."""
    torch.distributed.barrier()
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def is_lost(error: RuntimeError) -> bool:
    """Whether a collective failed because of another process, by what its backend says."""
    return _LOST.search(str(error)) is not None


def leave_children(trainer: pl.Trainer, *, kill: bool) -> None:
    """Let this process end by itself: Lightning's observer of the processes that it started kills
    the first one as soon as another has failed, in the middle of its message."""
    started: list[Any] = getattr(trainer.strategy.launcher, "procs", [])
    children = list(started)
    started.clear()
    for child in children if kill else ():
        child.kill()


@contextmanager
def announced(advice: Callable[[], str]) -> Iterator[None]:
    """Say why the run ends where Lightning's observer is about to kill it without a word."""

    def said(record: logging.LogRecord) -> str:
        what = record.getMessage().partition(". ")[0]
        return f"error: {what}. The training ends. {advice()}"

    observer, handler = logging.getLogger(_OBSERVER), logging.StreamHandler()
    handler.format = said  # type: ignore[method-assign]
    before = observer.level, observer.propagate
    observer.addHandler(handler)
    observer.setLevel(logging.INFO)
    observer.propagate = False
    try:
        yield
    finally:
        observer.removeHandler(handler)
        observer.setLevel(before[0])
        observer.propagate = before[1]


class JointNorms(LayerSync):
    """Batch norms take their statistics over all processes; those inside an equilibrium layer do
    not: each process takes its own number of steps there, and would wait for the others forever."""

    def __init__(self) -> None:
        self._own: dict[nn.Module, type[nn.Module]] = {}

    def apply(self, model: Any) -> nn.Module:
        on_cpu = model.trainer.strategy.root_device.type == "cpu"
        self._own = {norm: type(norm) for norm in _outer_norms(model)}
        for norm in self._own:
            norm.__class__ = _OnCPU if on_cpu else _OnGPU  # its parameters stay where they are
        return model  # type: ignore[no-any-return]

    def revert(self, model: nn.Module) -> nn.Module:
        for norm, kind in self._own.items():
            norm.__class__ = kind
        return model


def _outer_norms(parent: nn.Module) -> Iterator[nn.Module]:
    for child in parent.children():
        if isinstance(child, _BatchNorm):
            yield child
        elif isinstance(child, MultiBranch) or not getattr(child, "is_equilibrium", False):
            yield from _outer_norms(child)


def _joint(norm: _BatchNorm) -> bool:
    """Not without gradients: there a process looks at a batch of its own (validation, reports)."""
    return norm.training and torch.is_grad_enabled()


class _OnGPU(nn.SyncBatchNorm):
    process_group = None  # of all processes

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if _joint(self) else _BatchNorm.forward(self, x)


class _OnCPU(_BatchNorm):
    """torch's SyncBatchNorm is for GPUs alone; its formula."""

    def _check_input_dim(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        if not _joint(self):
            return super().forward(x)
        each, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        wide = x.double()  # E[x²] − E[x]² cancels
        count = wide.new_tensor([x.numel() / x.shape[1]])
        parts = torch.cat([count, wide.sum(each), wide.square().sum(each)])
        sums: Tensor = _Sum.apply(parts)  # type: ignore[no-untyped-call]
        n, (total, squares) = sums[0].detach(), sums[1:].chunk(2)
        mean = total / n
        variance = (squares / n - mean.square()).clamp_min(0.0)
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked += 1
                mean_of_all = 1.0 / float(self.num_batches_tracked)
                rate = mean_of_all if self.momentum is None else self.momentum
                unbiased = variance * n / (n - 1).clamp_min(1)
                self.running_mean.lerp_(mean.to(self.running_mean), rate)
                self.running_var.lerp_(unbiased.to(self.running_var), rate)
        out = (wide - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        found: Tensor = out.to(x.dtype)
        return found


class _Sum(torch.autograd.Function):
    """Σ over processes, forward and backward; torch's own is deprecated without a public heir."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        torch.distributed.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Sum.apply(grad)  # type: ignore[no-untyped-call]
