"""Lemmas 1 and 2 (OptEq), by construction: feed-forward networks as OptEq weights.

Both rest on weights whose products are given: W̄_{k+1}W̄_kᵀ = W_{k+1}. Take the rows of W̄_{k+1} as
W_{k+1}(W̄_k⁺)ᵀ, in the row space of W̄_k, plus orthonormal rows outside of it, which keep the rank
full for the next step; hence m ≥ n_k + n_{k+1}.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equilibria.nn import BoundBlock, DeepOptEq, OptEqBlock
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
from equilibria.solvers import Picard

__all__ = ["UnitNetwork", "prior_of", "to_deep_opteq", "to_hidden_units"]

Skip = nn.Linear | Tensor | None
"""U_k of a stage after the first: a layer (its bias is added), a matrix [n_k, d] or nothing."""


class _Stage(NamedTuple):
    """z ↦ σ(Wz + Ux + b) (Eq 1), in float64. The first stage has W = 0: it reads x through U."""

    weight: Tensor
    skip: Tensor
    bias: Tensor
    prior: Prior


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


def _read(
    network: nn.Sequential, skips: Sequence[Skip] | None
) -> tuple[list[_Stage], Tensor, Tensor]:
    """The stages, W_out and b_out; two Linear in a row have σ = identity between them.

    Where the last module is an activation, the head is the identity.
    """
    if not isinstance(network, nn.Sequential):
        raise TypeError(f"expected an nn.Sequential, got {type(network).__name__}.")
    linears, priors = _split(network)
    first = linears[0].weight
    if len(linears) == len(priors):
        width = linears[-1].out_features
        head_weight, head_bias = torch.eye(width).double(), torch.zeros(width).double()
    else:
        head_weight, head_bias = affine(linears.pop())
    given = [None] * (len(linears) - 1) if skips is None else list(skips)
    if len(given) != len(linears) - 1:
        raise ValueError(
            f"skips has {len(given)} entries; this network has {len(linears)} stages, and the "
            f"{len(linears) - 1} after the first take one each (None for no skip)."
        )
    stages = []
    for number, (linear, prior) in enumerate(zip(linears, priors, strict=True)):
        weight, bias = affine(linear)
        if number == 0:
            skip, weight = weight, weight.new_zeros(len(bias), 1)
        else:
            skip, extra = _skip(given[number - 1], len(bias), first.shape[1], number + 1)
            skip, bias = skip.to(weight.device), bias + extra.to(bias.device)
        stages.append(_Stage(weight, skip, bias, prior))
    return stages, head_weight.to(first.device), head_bias.to(first.device)


def _split(network: nn.Sequential) -> tuple[list[nn.Linear], list[Prior]]:
    """The Linears, and the priors of the activations after them."""
    linears: list[nn.Linear] = []
    priors: list[Prior] = []
    for number, module in enumerate(network):
        if isinstance(module, nn.Linear):
            if len(linears) > len(priors):
                priors.append(Free())
            if linears and module.in_features != linears[-1].out_features:
                raise ValueError(
                    f"module {number} takes {module.in_features} inputs and gets "
                    f"{linears[-1].out_features}."
                )
            linears.append(module)
        elif not linears:
            raise TypeError(f"the first module is {module}; expected nn.Linear.")
        elif len(linears) == len(priors):
            raise TypeError(f"module {number}, {module}, is a second activation in a row.")
        else:
            priors.append(prior_of(module))
    if not priors:
        raise ValueError("expected at least one Linear followed by an activation.")
    return linears, priors


def affine(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight and bias in float64, without a graph; zero where there is no bias."""
    weight = linear.weight.detach().double()
    given: Tensor | None = linear.bias
    return weight, weight.new_zeros(len(weight)) if given is None else given.detach().double()


def _skip(skip: Skip, outputs: int, inputs: int, number: int) -> tuple[Tensor, Tensor]:
    if isinstance(skip, nn.Linear):
        weight, bias = affine(skip)
    else:
        weight = torch.zeros(outputs, inputs) if skip is None else skip.detach()
        weight, bias = weight.double(), weight.new_zeros(outputs).double()
    if tuple(weight.shape) != (outputs, inputs):
        raise ValueError(
            f"the skip of stage {number} has the shape {tuple(weight.shape)}; it takes x "
            f"[{inputs}] to the stage's {outputs} units: [{outputs}, {inputs}]."
        )
    return weight, bias


class UnitNetwork(nn.Module):
    """z_{k+1} = W̄_kᵀσ_k(W̄_k z_k + U_k x + b_k), z_1 = 0, y = W̄_out z + b_out (Eq 2).

    ``units`` are the blocks of a deep OptEq (``.W``, ``.U``), one after the other instead of at
    equilibrium. x [B, d] → y [B, out].
    """

    def __init__(self, units: Sequence[OptEqBlock], priors: Sequence[Prior], head: nn.Linear):
        super().__init__()
        self.units = nn.ModuleList(units)
        self.priors = tuple(priors)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        z = x.new_zeros(len(x), self.head.in_features)
        for unit, prior in zip(self.units, self.priors, strict=True):
            assert isinstance(unit, OptEqBlock)
            z = BoundBlock(unit.operator(), 1.0, prior)(z, unit.U(x))
        y: Tensor = self.head(z)
        return y

    def nu_needed(self) -> list[float]:
        """L_σ‖W̄_k‖² of each unit: the ν that Theorem 1 asks for. The lemma does not bound it."""
        units: Any = self.units
        pairs = zip(units, self.priors, strict=True)
        return [prior.expansion * unit.operator().norm_upper() ** 2 for unit, prior in pairs]


@torch.no_grad()
def to_hidden_units(network: nn.Sequential, skips: Sequence[Skip] | None = None) -> UnitNetwork:
    """Lemma 1: ``network`` in the form z_{k+1} = W̄_kᵀσ(W̄_k z_k + U_k x + b_k), same output.

    The state has the size m = max(n_k + n_{k+1}).

    Args:
        network: an ``nn.Sequential`` of Linear and activations, the first a Linear.
        skips: input skips U_k of the stages after the first: nn.Linear, matrix [n_k, d] or None.

    Returns:
        A ``UnitNetwork`` with the dtype and device of ``network``. Theorem 1 with ν = 1 does not
        follow for its units: their norms are not bounded by 1 (``nu_needed``).
    """
    stages, *head = _read(network, skips)
    sizes = [len(stage.bias) for stage in stages]
    size = max([a + b for a, b in pairwise(sizes)], default=sizes[0])
    inputs = stages[0].skip.shape[1]
    units = [
        OptEqBlock(size, n, inputs, kernel_size=None, separable=False, constraint=None, bias=True)
        for n in sizes
    ]
    made = UnitNetwork(units, [stage.prior for stage in stages], _fill(units, stages, size, *head))
    return made.to(next(network.parameters()))


@torch.no_grad()
def to_deep_opteq(network: nn.Sequential, skips: Sequence[Skip] | None = None) -> nn.Sequential:
    """Lemma 2: a deep OptEq (α = 1) and a head whose output is that of ``network``.

    Beside W_{l+1}W_lᵀ = A_{l+1} the loop must carry nothing back, W_1W_Lᵀ = 0. That can be had from
    three stages on; with fewer a first block with W = 0 forgets the state instead (the paper, too,
    has one block more than the network has stages). For α < 1 the skip
    (1 − α)z carries every W_lᵀσ_l around the loop; another construction, in which every layer holds
    all hidden units, works there (``claims/opteq_deep.py``), but its equilibrium need not be
    the only one.

    Args:
        network: an ``nn.Sequential`` of Linear and activations, the first a Linear, all
            activations alike.
        skips: input skips U_k of the stages after the first: nn.Linear, matrix [n_k, d] or None.

    Returns:
        ``nn.Sequential(DeepOptEq, Linear)`` with the dtype and device of ``network``.
    """
    stages, *head = _read(network, skips)
    priors = {stage.prior for stage in stages}
    if len(priors) > 1:
        raise ValueError(
            "Lemma 2 is about networks with one activation; this one has the priors "
            f"{sorted(map(repr, priors))}. Two Linear in a row count as Identity between them: "
            "multiply them first."
        )
    sizes = [len(stage.bias) for stage in stages]
    reset = len(sizes) < 3
    need = [a + b for a, b in pairwise(sizes)]
    if not reset:
        need = need[:1] + [sizes[0] + n for n in need[1:]]
    size = max(need, default=sizes[0])
    # T ∘ T is constant (with a reset T itself is): three steps are exact, the last to see it.
    layer = DeepOptEq(
        size,
        [1] * reset + sizes,
        in_channels=stages[0].skip.shape[1],
        alpha=1.0,
        prior=stages[0].prior,
        constraint=None,
        solver=Picard(rtol=0.0, atol=0.0, max_steps=3),
    )
    blocks = [block for block in layer.blocks if isinstance(block, OptEqBlock)]
    if reset:
        for parameter in blocks[0].parameters():
            parameter.zero_()
    made = nn.Sequential(layer, _fill(blocks[int(reset) :], stages, size, *head, closed=not reset))
    return made.to(next(network.parameters()))


def _fill(
    units: Sequence[OptEqBlock],
    stages: Sequence[_Stage],
    size: int,
    head_weight: Tensor,
    head_bias: Tensor,
    *,
    closed: bool = False,
) -> nn.Linear:
    """Give the units the weights of the construction; the head that reads their last state."""
    wanted = [*(stage.weight for stage in stages[1:]), head_weight]
    weights = _factors(wanted, len(stages[0].bias), size, closed=closed)
    for unit, weight, stage in zip(units, weights, stages, strict=True):
        parts: Any = unit.double().to(weight.device)
        parts.W.weight.copy_(weight)
        parts.U.weight.copy_(stage.skip)
        parts.U.bias.copy_(stage.bias)
    read = head_weight @ torch.linalg.pinv(weights[-1]).mT
    head = nn.Linear(size, len(read), dtype=torch.float64, device=read.device)
    head.weight.copy_(read)
    head.bias.copy_(head_bias)
    return head


def _factors(wanted: Sequence[Tensor], rows: int, size: int, *, closed: bool) -> list[Tensor]:
    """W̄_1 … W̄_K [·, size] with W̄_{k+1}W̄_kᵀ = W_{k+1}; closed: W̄_KW̄_1ᵀ = 0 as well."""
    # Rows of the size √‖W_{k+1}‖ split its norm evenly between W̄_{k+1} and W̄_k.
    sizes = [float(torch.linalg.matrix_norm(w, 2)) ** 0.5 or 1.0 for w in wanted]
    first = sizes[0] * torch.eye(rows, size).to(wanted[0])
    found = [first]
    for k, product in enumerate(wanted[:-1], 1):
        before = found[-1]
        taken = torch.cat([before, first]) if closed else before
        usable = before
        if closed and k == len(wanted) - 1:
            # To leave W̄_1 alone, the last factor uses only what W̄_{K−1} has outside of its rows.
            usable = before - before @ torch.linalg.pinv(first) @ first
        outside = _complement(taken, len(product))
        found.append(product @ torch.linalg.pinv(usable).mT + sizes[k] * outside)
    return found


def _complement(rows: Tensor, count: int) -> Tensor:
    """``count`` orthonormal rows that are orthogonal to all ``rows``."""
    _, values, basis = torch.linalg.svd(rows, full_matrices=True)
    rank = int((values > 1e-10 * values[0]).sum()) if values[0] > 0 else 0
    found: Tensor = basis[rank : rank + count]
    return found
