"""Theorem 3 (OptEq): as α → 0 the blocks of a deep OptEq agree, on a wide one-layer OptEq.

    Lz = Σ_l W_lᵀσ(W_l z + U_l x + b_l),   the y of   min Σ_l φ_l(x_l) + ½‖x_l − y‖²

Neighboring blocks differ by z_l − z_{l−1} = α(prox_{φ_l}(z_{l−1}) − z_{l−1}), so they agree at the
rate α, with the known slope ‖prox_{φ_l}(z) − z‖ at the limit. Where the layers have their own α_l,
α_l = t·a_l with t → 0, block l counts a_l times: (Σa_l)z = Σa_l W_lᵀσ(W_l z + U_l x + b_l).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from equilibria import fixed_point
from equilibria.engine import Solution
from equilibria.nn import DeepOptEq, OptEq, OptEqBlock

from .blocks import SOLVER, Block, Deep, as_blocks, check_assumption, deep_equilibrium
from .multi_block import MultiBlock


def _shares(blocks: Sequence[Block]) -> list[float]:
    """a_l/Σa, from the blocks' α."""
    total = sum(block.alpha for block in blocks)
    return [block.alpha / total for block in blocks]


@torch.no_grad()
def wide_limit(layer: Deep, x: Tensor | None = None, *, check: bool = True) -> Solution[Tensor]:
    """z with Lz = Σ_l W_lᵀσ(W_l z + U_l x + b_l), to which all blocks tend as α → 0 (Theorem 3).

    Args:
        layer: a deep OptEq, or its blocks (then x is None).
        x: the layer's input.
        check: raise where Assumption 2 (L_σ‖W_l‖² ≤ 1) is not met, or no W_l is proven to have
            L_σ‖W_l‖² < 1; without them there may be no limit or several.

    Returns:
        A ``Solution`` with value [B, *state] in float64.
    """
    blocks = as_blocks(layer, x)
    if check:
        check_assumption(blocks, "Theorem 3")
        if not min(block.expansion() for block in blocks) < 1.0:
            raise ValueError(
                "Theorem 3 needs one layer with L_σ‖W_l‖² < 1, and all bounds are 1 or more; "
                "bound one of them below 1, or pass check=False."
            )
    shares = _shares(blocks)

    def mean(z: Tensor) -> Tensor:
        parts = [share * block.proximal(z) for share, block in zip(shares, blocks, strict=True)]
        return torch.stack(parts).sum(0)

    return fixed_point(mean, blocks[0].start(), solver=SOLVER)


def wide_objective(layer: Deep, x: Tensor | None, y: Tensor) -> Tensor:
    """min over x_l of Σ_l φ_l(x_l) + ½‖x_l − y‖², which is Σ_l ½‖y‖² − ψ_l(y), [B].

    x_l = prox_{φ_l}(y) is the minimizer, and Moreau's identity closes the sum, with no inverse of
    W_l. Its minimizer over y is ``wide_limit``. Where the layers have their own α_l, block l counts
    α_l/ᾱ times, ᾱ their mean. Differentiable in y.
    """
    blocks = as_blocks(layer, x)
    y = y.double()
    half = 0.5 * (y * y).flatten(1).sum(1)
    terms = [
        len(blocks) * share * (half - block.psi(y))
        for share, block in zip(_shares(blocks), blocks, strict=True)
    ]
    return torch.stack(terms).sum(0)


@torch.no_grad()
def to_wide_opteq(layer: DeepOptEq) -> OptEq:
    """The limit of ``layer`` as α → 0 as a layer of its own: z = (1/L)W̄ᵀσ(W̄z + Ūx + b̄).

    W̄, Ū and b̄ stack those of the L blocks, and ν = L, so it is an ``OptEq`` with a hidden problem,
    certificates and solvers. Takes a dense or convolutional layer whose blocks have one α.
    """
    if layer.separable:
        raise TypeError("to_wide_opteq: an OptEq has no separable convolutions; use wide_limit.")
    if layer.regularizer is not None:
        raise ValueError("to_wide_opteq: Theorem 3 is about layers without a regularizer.")
    alphas = layer.alphas()
    if bool((alphas != alphas[0]).any()):
        raise ValueError(
            f"to_wide_opteq: the blocks have different α, {alphas.tolist()}, and count differently "
            "in the limit, which no OptEq can say; use wide_limit."
        )
    model = copy.deepcopy(layer).eval()
    blocks = [block for block in model.blocks if isinstance(block, OptEqBlock)]
    first: Any = blocks[0].U
    made = OptEq(
        layer.channels,
        sum(layer.mids),
        in_channels=layer.in_channels,
        kernel_size=layer.kernel_size,
        prior=layer.prior,
        constraint=None,
        bias=first.bias is not None,
        nu=float(len(blocks)),
    ).to(first.weight)
    stacks: list[tuple[Any, str, list[Any]]] = [
        (made.W, "weight", [block.W.weight for block in blocks]),
        (made.U, "weight", [block.U.weight for block in blocks]),
    ]
    if first.bias is not None:
        stacks.append((made.U, "bias", [block.U.bias for block in blocks]))
    for module, name, parts in stacks:
        getattr(module, name).copy_(torch.cat(parts))
    return made


@dataclass(frozen=True, eq=False)
class WideLimitStudy:
    """What happens to the blocks of a deep OptEq on the way α → 0; K values of α, B samples."""

    alphas: tuple[float, ...]
    """α, the largest of the layers' where they differ. [K]."""
    blocks: Tensor
    """z̃(α), [K, B, L, *state]."""
    limit: Tensor
    """The wide OptEq's z, [B, *state]."""
    distance: Tensor
    """max_l ‖z_l(α) − limit‖, [K, B]."""
    gap: Tensor
    """max_l ‖z_l(α) − z_{l−1}(α)‖, how far neighboring blocks are apart, [K, B]."""
    slope: Tensor
    """lim gap/α as α → 0: max_l (α_l/α)‖prox_{φ_l}(limit) − limit‖, [B]."""

    @property
    def orders(self) -> Tensor:
        """log-log slopes of ``distance`` between neighboring α, [K − 1, B]; they tend to 1."""
        steps = torch.tensor(self.alphas, dtype=torch.float64).log().diff()
        return self.distance.cpu().log().diff(dim=0) / steps[:, None]

    def __str__(self) -> str:
        head = f"{'α':>10}  {'max ‖z_l − limit‖':>18}  {'max ‖z_l − z_{l−1}‖':>20}  {'order':>6}"
        rows = [head]
        orders = [math.nan, *self.orders.mean(1).tolist()]
        for alpha, far, gap, order in zip(
            self.alphas, self.distance, self.gap, orders, strict=True
        ):
            tail = "" if math.isnan(order) else f"{order:6.3f}"
            rows.append(
                f"{alpha:10.3g}  {float(far.max()):18.3e}  {float(gap.max()):20.3e}  {tail}"
            )
        return "\n".join(rows)


@torch.no_grad()
def approach_wide_limit(
    layer: Deep,
    x: Tensor | None = None,
    alphas: Sequence[float] = (0.5, 0.1, 0.01, 0.001),
    *,
    check: bool = True,
) -> WideLimitStudy:
    """Solve the deep OptEq for each α and measure how its blocks come together (Theorem 3).

    Args:
        layer: a deep OptEq, or its blocks (then x is None); its own α are replaced by each of
            ``alphas`` (where they differ: scaled, so that the largest is that).
        x: the layer's input.
        alphas: falling numbers in (0, 1].
        check: as in ``wide_limit``.
    """
    if not alphas or not all(0.0 < a <= 1.0 for a in alphas):
        raise ValueError(f"alphas={tuple(alphas)!r}: expected numbers in (0, 1].")
    if any(b >= a for a, b in pairwise(alphas)):
        raise ValueError(f"alphas={tuple(alphas)!r}: expected falling numbers.")
    blocks = as_blocks(layer, x)
    limit = wide_limit(blocks, check=check).value
    largest = max(block.alpha for block in blocks)
    found = []
    for alpha in alphas:
        scaled = [
            dataclasses.replace(block, alpha=min(1.0, block.alpha * (alpha / largest)))
            for block in blocks
        ]
        found.append(MultiBlock(scaled).expand(deep_equilibrium(scaled).value))
    stacked = torch.stack(found)
    distance = _largest(stacked - limit[None, :, None])
    gap = _largest(stacked - torch.roll(stacked, 1, dims=2))
    pulls = [(b.alpha / largest) * (b.proximal(limit) - limit) for b in blocks]
    slope = _largest(torch.stack(pulls, dim=1)[None])[0]
    return WideLimitStudy(tuple(alphas), stacked, limit, distance, gap, slope)


def _largest(stacked: Tensor) -> Tensor:
    """The largest norm over the blocks: [K, B, L, *state] → [K, B]."""
    norms: Tensor = torch.linalg.vector_norm(stacked.flatten(3), dim=3)
    return norms.amax(2)
