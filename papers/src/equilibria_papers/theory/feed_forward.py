"""Reading a feed-forward network: z_{k+1} = σ_k(W_k z_k + U_k x + b_k), y = W_out z + b_out (Eq 1).

The network is an ``nn.Sequential`` of Linear and activations; its input skips U_k, which a
Sequential cannot hold, come beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria.problems import (
    Box,
    Free,
    LeakyNonNegative,
    Logistic,
    NonNegative,
    Prior,
    Softplus,
    SoftThreshold,
    Tanh,
)

Skip = nn.Linear | Tensor | None


@dataclass(frozen=True, eq=False)
class Stage:
    """z ↦ σ(Wz + Ux + b), in float64. The first stage has W = 0: it reads x through U alone."""

    weight: Tensor
    """W [n, inputs]."""
    skip: Tensor
    """U [n, d]."""
    bias: Tensor
    """b [n]."""
    prior: Prior
    """f with σ = prox_f."""


@dataclass(frozen=True, eq=False)
class FeedForward:
    """Eq 1, stage by stage, and its head y = W_out z + b_out; float64 copies of the weights."""

    stages: tuple[Stage, ...]
    head_weight: Tensor
    head_bias: Tensor
    inputs: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self, x: Tensor) -> Tensor:
        """y, [B, out], from x [B, inputs]."""
        x = x.double()
        z = x.new_zeros(len(x), self.stages[0].weight.shape[1])
        for stage in self.stages:
            z = stage.prior.activation(z @ stage.weight.mT + x @ stage.skip.mT + stage.bias)
        return z @ self.head_weight.mT + self.head_bias


def prior_of(activation: nn.Module) -> Prior:
    """The prior whose proximal operator the activation is, f with σ = prox_f (Assumption 1)."""
    match activation:
        case nn.ReLU():
            return NonNegative()
        case nn.ReLU6():
            return Box(0.0, 6.0)
        case nn.Hardtanh(min_val=low, max_val=high):
            return Box(float(low), float(high))
        case nn.LeakyReLU(negative_slope=slope) if 0.0 < slope <= 1.0:
            return LeakyNonNegative(float(slope))
        case nn.Tanh():
            return Tanh()
        case nn.Sigmoid():
            return Logistic()
        case nn.Softplus(beta=1.0):
            return Softplus()
        case nn.Softshrink(lambd=weight):
            return SoftThreshold(float(weight))
        case nn.Identity():
            return Free()
    raise TypeError(
        f"{activation} is not known as the proximal operator of a prior (it must be monotone and "
        "1-Lipschitz). Known: ReLU, ReLU6, Hardtanh, LeakyReLU with a slope in (0, 1], Tanh, "
        "Sigmoid, Softplus(beta=1), Softshrink, Identity."
    )


def read_feed_forward(network: nn.Sequential, skips: Sequence[Skip] | None = None) -> FeedForward:
    """Eq 1 from Linear, activation, …, Linear; two Linear in a row have σ = identity between them.

    Args:
        network: an ``nn.Sequential`` whose first module is a Linear. Where the last is an
            activation, the head is the identity.
        skips: U_k for the stages after the first, each an ``nn.Linear`` (its bias is added), a
            matrix [n_k, d] or None.
    """
    if not isinstance(network, nn.Sequential):
        raise TypeError(f"expected an nn.Sequential, got {type(network).__name__}.")
    linears, activations = _split(network)
    inputs = linears[0].in_features
    if len(linears) == len(activations):
        width = linears[-1].out_features
        head_weight, head_bias = torch.eye(width).double(), torch.zeros(width).double()
    else:
        head_weight, head_bias = _affine(linears.pop())
    given = [None] * (len(linears) - 1) if skips is None else list(skips)
    if len(given) != len(linears) - 1:
        raise ValueError(
            f"skips has {len(given)} entries; this network has {len(linears)} stages, and the "
            f"{len(linears) - 1} after the first take one each (None for no skip)."
        )
    stages = []
    for number, (linear, activation) in enumerate(zip(linears, activations, strict=True)):
        weight, bias = _affine(linear)
        if number == 0:
            skip, weight = weight, weight.new_zeros(len(bias), 1)
        else:
            skip, extra = _skip(given[number - 1], len(bias), inputs, number + 1)
            skip, bias = skip.to(weight.device), bias + extra.to(bias.device)
        stages.append(Stage(weight, skip, bias, prior_of(activation)))
    first = linears[0].weight
    head_weight, head_bias = head_weight.to(first.device), head_bias.to(first.device)
    return FeedForward(tuple(stages), head_weight, head_bias, inputs, first.dtype, first.device)


def _split(network: nn.Sequential) -> tuple[list[nn.Linear], list[nn.Module]]:
    """Linears and the activations after them, Identity between two Linears."""
    linears: list[nn.Linear] = []
    activations: list[nn.Module] = []
    for number, module in enumerate(network):
        if isinstance(module, nn.Linear):
            if len(linears) > len(activations):
                activations.append(nn.Identity())
            if linears and module.in_features != linears[-1].out_features:
                raise ValueError(
                    f"module {number} takes {module.in_features} inputs and gets "
                    f"{linears[-1].out_features}."
                )
            linears.append(module)
        elif not linears:
            raise TypeError(f"the first module is {module}; expected nn.Linear.")
        elif len(linears) == len(activations):
            raise TypeError(f"module {number}, {module}, is a second activation in a row.")
        else:
            prior_of(module)
            activations.append(module)
    if not activations:
        raise ValueError("expected at least one Linear followed by an activation.")
    return linears, activations


def _affine(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    weight = linear.weight.detach().double()
    given: Tensor | None = linear.bias
    bias = weight.new_zeros(len(weight)) if given is None else given.detach().double()
    return weight, bias


def _skip(skip: Skip, outputs: int, inputs: int, number: int) -> tuple[Tensor, Tensor]:
    if skip is None:
        return torch.zeros(outputs, inputs).double(), torch.zeros(outputs).double()
    if isinstance(skip, nn.Linear):
        weight, bias = _affine(skip)
    else:
        weight = skip.detach().double()
        bias = weight.new_zeros(outputs)
    if tuple(weight.shape) != (outputs, inputs):
        raise ValueError(
            f"the skip of stage {number} has the shape {tuple(weight.shape)}; it takes x "
            f"[{inputs}] to the stage's {outputs} units: [{outputs}, {inputs}]."
        )
    return weight, bias
