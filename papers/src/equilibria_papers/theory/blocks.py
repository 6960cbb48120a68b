"""The blocks of a deep OptEq at one input: f(z) = α prox_φ(z) + (1 − α)z (OptEq, Eq 6).

What OptEq proves of a deep OptEq is about its L maps at a given x, so everything here
starts from a list of ``Block``: made by hand from weights, or by ``deep_blocks(layer, x)``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from equilibria import fixed_point
from equilibria.adjoints import Implicit
from equilibria.engine import Solution
from equilibria.nn import DeepOptEq
from equilibria.problems import Activated, LinearOperator, NonNegative, Prior, as_operator
from equilibria.solvers import Anderson

# How far a norm that is meant to be 1 may lie above it: power iteration, rounding.
_SLACK = 1e-6
# Solves of this module: float64, to where rounding begins.
SOLVER = Anderson(rtol=1e-13, atol=1e-14, max_steps=5000, patience=500)


@dataclass(frozen=True, eq=False)
class Block:
    """f(z) = α Wᵀσ(Wz + c) + (1 − α)z with c = Ux + b (Eq 6 at one input), in float64.

    With ψ(z) = 1ᵀσ̃(Wz + c), σ̃′ = σ, and L_σ‖W‖² ≤ 1, Wᵀσ(W· + c) = ∇ψ is the proximal operator
    of the convex φ = ψ* − ½‖·‖² (Theorem 1), and f that of α M_φ^{1−α} (Table 1).

    Args:
        W: z [B, *state] → Wz, shaped like c: a matrix, a kernel, a bias-free layer, an operator.
        c: Ux + b, [B, *out].
        prior: f with σ = prox_f.
        alpha: α in (0, 1].
    """

    W: LinearOperator | Tensor
    c: Tensor
    prior: Prior = field(default_factory=NonNegative)
    alpha: float = 1.0
    _coupling: Activated = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise ValueError(f"Block(alpha={self.alpha!r}): expected a number in (0, 1].")
        operator = as_operator(self.W).cast(torch.float64)
        coupling = Activated(operator, self.c.detach().double(), self.prior)
        object.__setattr__(self, "W", operator)
        object.__setattr__(self, "c", coupling.c)
        object.__setattr__(self, "_coupling", coupling)

    def proximal(self, z: Tensor) -> Tensor:
        """prox_φ(z) = Wᵀσ(Wz + c), [B, *state]."""
        return -self._coupling.grad(z)

    def __call__(self, z: Tensor) -> Tensor:
        """f(z) = α prox_φ(z) + (1 − α)z, [B, *state]."""
        inner = self.proximal(z)
        return inner if self.alpha == 1.0 else self.alpha * inner + (1.0 - self.alpha) * z

    def psi(self, z: Tensor) -> Tensor:
        """ψ(z) = 1ᵀσ̃(Wz + c), [B]; σ̃ is fixed up to the constant of the prior."""
        return -self._coupling.value(z)

    def start(self) -> Tensor:
        """Zero, shaped as z."""
        return self._coupling.default_start()

    def expansion(self) -> float:
        """An upper bound on L_σ‖W‖², which Assumption 2 wants to be at most 1."""
        return self.prior.expansion * self._coupling.operator.norm_upper() ** 2

    @torch.no_grad()
    def inverse(self, y: Tensor) -> Tensor:
        """The v with f(v) = y, for α < 1, so that ∇(α M_φ^{1−α})(y) = v − y.

        v minimizes ½(1 − α)‖v‖² + αψ(v) − ⟨y, v⟩, with Hessian between m = 1 − α and
        L = 1 − α + αL_σ‖W‖²; gradient steps of 2/(m + L), accelerated.
        """
        if self.alpha == 1.0:
            raise ValueError(
                "Block.inverse needs α < 1: at α = 1 the block is prox_φ itself, which is not "
                "one-to-one. Use α < 1, or the proximal form of the inclusion."
            )
        modulus = 1.0 - self.alpha
        step = 2.0 / (2.0 * modulus + self.alpha * self.expansion())
        y = y.detach().double()

        def descend(v: Tensor, y: Tensor, c: Tensor) -> Tensor:
            inner = -Activated(self._coupling.operator, c, self.prior).grad(v)
            return v - step * (modulus * v + self.alpha * inner - y)

        return fixed_point(descend, y, (y, self.c), solver=SOLVER, adjoint=Implicit()).value  # type: ignore[no-any-return]


Deep: TypeAlias = DeepOptEq | Sequence[Block]
"""A deep OptEq layer (with its input x), or the blocks that it has there (without)."""


def as_blocks(deep: Deep, x: Tensor | None = None) -> tuple[Block, ...]:
    """f_1, …, f_L of a deep OptEq at the input x, as it computes them in eval mode.

    Given blocks (with x = None) are checked and returned.
    """
    if isinstance(deep, DeepOptEq):
        return _of_layer(deep, x)
    if x is not None:
        raise TypeError("blocks are bound to their input: x belongs to a DeepOptEq only.")
    blocks = tuple(deep)
    if not blocks:
        raise ValueError("a deep OptEq has at least one block, got none.")
    for number, block in enumerate(blocks, 1):
        if not isinstance(block, Block):
            raise TypeError(f"block {number} is a {type(block).__name__}; expected Block(W, c, …).")
    shapes = [tuple(block.start().shape) for block in blocks]
    if len(set(shapes)) > 1:
        raise ValueError(f"the blocks act on states of different shapes: {shapes}.")
    return blocks


@torch.no_grad()
def _of_layer(layer: DeepOptEq, x: Tensor | None) -> tuple[Block, ...]:
    if x is None:
        raise TypeError("a DeepOptEq has blocks at an input: give x.")
    if layer.regularizer is not None:
        raise ValueError(
            f"this DeepOptEq has {layer.regularizer!r} in its map, and the results of OptEq on "
            "its blocks (Lemma 3, Theorems 2 and 3, Corollary 1) are about the map without. Make "
            "one with regularizer=None and the same weights."
        )
    # In eval mode the power iterations of the constraints stand still; the layer is left alone.
    model = copy.deepcopy(layer).eval()
    pairs = zip(model.bound_blocks(), model.inject(x), strict=True)
    return tuple(Block(b.operator, c, b.prior, float(b.alpha)) for b, c in pairs)


@torch.no_grad()
def deep_equilibrium(blocks: Sequence[Block]) -> Solution[Tensor]:
    """z = f_L ∘ … ∘ f_1(z), [B, *state] in float64, quickly for every α.

    Plain iteration needs about 1/α steps. With L_σ‖W_l‖² ≤ 1 every f_l is α_l/2-averaged, so
    T = f_L ∘ … ∘ f_1 is κ-averaged, κ = S/(1 + S), S = Σ α_l/(2 − α_l); hence z + (T(z) − z)/(2κ)
    is still firmly nonexpansive, has the same fixed points, and does not stall as α → 0.
    """
    total = sum(block.alpha / (2.0 - block.alpha) for block in blocks)
    kappa = total / (1.0 + total)

    def relaxed(z: Tensor) -> Tensor:
        after = z
        for block in blocks:
            after = block(after)
        return z + (after - z) / (2.0 * kappa)

    # The difference T(z) − z is of the size κ, and so is what rounding leaves of it.
    solver = dataclasses.replace(SOLVER, rtol=max(1e-13, 1e-14 / kappa))
    return fixed_point(relaxed, blocks[0].start(), solver=solver)


def check_assumption(blocks: Sequence[Block], what: str) -> None:
    """Raise unless L_σ‖W_l‖² ≤ 1 is proven for every block (Assumption 2)."""
    for number, block in enumerate(blocks, 1):
        found = block.expansion()
        if not found <= 1.0 + _SLACK:
            raise ValueError(
                f"{what} rests on Assumption 2, L_σ‖W_l‖² ≤ 1, and block {number} has "
                f"L_σ‖W_{number}‖² up to {found:.4g} (‖W_{number}‖ ≤ "
                f"{math.sqrt(found / block.prior.expansion):.4g}): there its map is not the "
                "proximal operator of a convex φ. Bound the weights, e.g. "
                "DeepOptEq(constraint=NormBounded(bound=0.95)), or pass check=False to compute the "
                "formula anyway."
            )
