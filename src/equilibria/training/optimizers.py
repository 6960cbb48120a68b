"""Optimizers: which parameters decay, SGD with momentum, AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW, Optimizer

from equilibria.nn.constraints import RowNorm

from .config import TrainConfig

__all__ = ["decay_groups", "gradient_norm", "make_optimizer", "scale_gradients"]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights, which decay, and the norms, biases and scales, which do not.

    A scale is what multiplies a whole map: every parameter of at most one dimension (γ of a
    Gaussian layer too) and g of W = g·V/‖V‖, whatever its shape. Matrices and kernels under a norm
    constraint are weights.
    """
    scales: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, _NORMS):
            scales.update(module.parameters(recurse=False))
        if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], RowNorm):
            scales.add(module.original0)  # type: ignore[arg-type]
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (free if parameter.ndim <= 1 or parameter in scales else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: TrainConfig, *, fused: bool = False) -> Optimizer:
    """The optimizer of the configuration. ``fused`` runs one kernel for all, where it exists."""
    parameters: Any = (
        [p for p in model.parameters() if p.requires_grad]
        if config.decay_norms
        else decay_groups(model, config.weight_decay)
    )
    if not parameters:
        raise ValueError(
            f"the model ({type(model).__name__}) has no parameter that requires a gradient: there "
            "is nothing to train."
        )
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
        for group in made.param_groups:
            for parameter in group["params"]:
                made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """‖g‖₂ over the parameters that have a gradient, on their device; None if none has."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return None
    if len({(g.device, g.dtype) for g in gradients}) > 1:
        return torch.nn.utils.get_total_norm(gradients)
    # The same in two calls, where torch's function first sorts tensors by device and type.
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def scale_gradients(parameters: Sequence[nn.Parameter], limit: float, norm: Tensor) -> None:
    """g ← g·min(1, limit/‖g‖), in place and without waiting for the device."""
    torch.nn.utils.clip_grads_with_norm_(list(parameters), limit, norm)
