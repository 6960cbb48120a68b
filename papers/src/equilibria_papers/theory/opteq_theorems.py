"""What OptEq proves of a deep OptEq at one input: Lemma 3, Theorem 2, Corollary 1, Theorem 3.

Everything starts from the L maps f_l(z) = α prox_{φ_l}(z) + (1 − α)z (Eq 6) as a list of ``Block``:
made by hand from weights, or by ``as_blocks(layer, x)``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from equilibria import fixed_point
from equilibria.adjoints import Implicit
from equilibria.engine import Solution, sample_norm
from equilibria.nn import DeepOptEq, OptEq, OptEqBlock
from equilibria.problems import Activated, LinearOperator, NonNegative, Prior, as_operator
from equilibria.solvers import Anderson

__all__ = [
    "Block",
    "MultiBlock",
    "WideLimitStudy",
    "approach_wide_limit",
    "as_blocks",
    "deep_equilibrium",
    "inclusion_residual",
    "moreau_envelope",
    "multi_block",
    "to_wide_opteq",
    "two_layer_objective",
    "wide_limit",
]

# How far a norm that is meant to be 1 may lie above it: power iteration, rounding.
_SLACK = 1e-6
# Solves of this module: float64, to where rounding begins.
_SOLVER = Anderson(rtol=1e-13, atol=1e-14, max_steps=5000, patience=500)


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
        """f(z), [B, *state]."""
        inner = self.proximal(z)
        return inner if self.alpha == 1.0 else self.alpha * inner + (1.0 - self.alpha) * z

    def psi(self, z: Tensor) -> Tensor:
        """ψ(z), [B]; σ̃ is fixed up to the constant of the prior."""
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

        return fixed_point(descend, y, (y, self.c), solver=_SOLVER, adjoint=Implicit()).value  # type: ignore[no-any-return]


Deep: TypeAlias = DeepOptEq | Sequence[Block]
"""A deep OptEq layer (with its input x), or the blocks that it has there (then x is None)."""


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
    solver = dataclasses.replace(_SOLVER, rtol=max(1e-13, 1e-14 / kappa))
    return fixed_point(relaxed, blocks[0].start(), solver=solver)


def _check_assumption(blocks: Sequence[Block], what: str) -> None:
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


class MultiBlock:
    """Lemma 3: a deep OptEq is a one-layer OptEq of L blocks with a permutation.

        z̃ = α W̃ᵀσ(W̃Pz̃ + Ũx + b̃) + (1 − α)Pz̃          (Eq 7, with P inside too)

    z̃ = (z_1, …, z_{L−1}, z_0), [B, L, *state], holds what each layer makes; P hands every block its
    predecessor. The paper prints σ(W̃z̃ + …), without P, and W̃ with an identity block that does not
    fit R^{mL}; the equilibrium of a deep OptEq does not solve that equation.

    Args:
        blocks: f_1, …, f_L in the order in which the deep OptEq applies them.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = as_blocks(blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def permute(self, z: Tensor) -> Tensor:
        """Pz̃ = (z_0, z_1, …, z_{L−1}): each block sees its predecessor, the first sees the last."""
        one = self.blocks[0].start().shape
        expected = (one[0], len(self), *one[1:])
        if tuple(z.shape) != expected:
            raise ValueError(
                f"z̃ has the shape [B, L, *state] = {expected}, got {tuple(z.shape)}; "
                "expand(z) makes it from one state [B, *state]."
            )
        return torch.roll(z, 1, dims=1)

    def expand(self, z: Tensor) -> Tensor:
        """z̃ = (f_1(z), f_2(f_1(z)), …, z) from one state z [B, *state].

        The last entry is z itself, not T(z): z̃ solves Eq 7 exactly when z = T(z).
        """
        found = []
        inner = z
        for block in self.blocks[:-1]:
            inner = block(inner)
            found.append(inner)
        return torch.stack([*found, z], dim=1)

    def step(self, z: Tensor, *, as_printed: bool = False) -> Tensor:
        """α W̃ᵀσ(W̃Pz̃ + Ũx + b̃) + (1 − α)Pz̃; ``as_printed`` leaves the inner P out."""
        before = self.permute(z)
        read = z if as_printed else before
        triples = zip(self.blocks, before.unbind(1), read.unbind(1), strict=True)
        after = [b.alpha * b.proximal(own) + (1.0 - b.alpha) * left for b, left, own in triples]
        return torch.stack(after, dim=1)

    def residual(self, z: Tensor, *, as_printed: bool = False) -> Tensor:
        """‖z̃ − step(z̃)‖, [B]; zero exactly at the multi-block forms of deep equilibria."""
        return sample_norm([z - self.step(z, as_printed=as_printed)])


def multi_block(layer: Deep, x: Tensor | None = None) -> MultiBlock:
    """The multi-block form of ``layer`` at the input x (Lemma 3), or of given blocks."""
    return MultiBlock(as_blocks(layer, x))


@torch.no_grad()
def inclusion_residual(
    layer: Deep,
    x: Tensor | None,
    z: Tensor,
    *,
    form: Literal["subgradient", "proximal"] = "subgradient",
    check: bool = True,
) -> Tensor:
    """dist(0, ∂Φ(z̃) + (I − P)z̃), Φ(z̃) = Σ_l α_l M_{φ_l}^{1−α_l}(z_l) (Eq 8, Theorem 2), [B].

    α M_φ^{1−α} is differentiable for α < 1, and with v_l the solution of f_l(v_l) = z_l its
    gradient is v_l − z_l. So the inclusion has the residual v_l − (Pz̃)_l in each block, no matter
    how z̃ was found. In float64.

    Args:
        z: one state [B, *state], which is expanded to z̃ by Lemma 3, or z̃ [B, L, *state] itself.
        form: "subgradient" as above, for α < 1; "proximal" for every α: ‖z̃ − prox_Φ(Pz̃)‖, which
            is zero at the same z̃.
        check: raise where Assumption 2 (L_σ‖W_l‖² ≤ 1) is not met; without it Φ is not convex.
    """
    blocks = as_blocks(layer, x)
    if check:
        _check_assumption(blocks, "Theorem 2")
    if form not in ("subgradient", "proximal"):
        raise ValueError(f"form={form!r}: expected 'subgradient' or 'proximal'.")
    multi = MultiBlock(blocks)
    z = z.detach().double()
    stacked = multi.expand(z) if z.ndim == blocks[0].start().ndim else z
    if form == "proximal":
        return multi.residual(stacked)
    full = [number for number, block in enumerate(blocks, 1) if block.alpha == 1.0]
    if full:
        raise ValueError(
            f"inclusion_residual(form='subgradient') needs α < 1, and block(s) {full} have α = 1, "
            "where ∂Φ may be empty beside the equilibrium; use form='proximal'."
        )
    triples = zip(blocks, stacked.unbind(1), multi.permute(stacked).unbind(1), strict=True)
    rests = [block.inverse(own) - before for block, own, before in triples]
    return sample_norm([torch.stack(rests, 1)])


def moreau_envelope(block: Block, z: Tensor) -> Tensor:
    """α M_φ^{1−α}(z) = α min_u φ(u) + ‖u − z‖²/(2(1 − α)), [B], for every W, invertible or not.

    The minimizer is u = ∇ψ(v) with f(v) = z, where φ(u) = ψ*(u) − ½‖u‖² = ⟨u, v⟩ − ψ(v) − ½‖u‖².
    Needs α < 1. The value is differentiable in z once, with the gradient v − z.
    """
    v = block.inverse(z)
    u = block.proximal(v).detach()
    phi = (u * v - 0.5 * u * u).flatten(1).sum(1) - block.psi(v)
    distance = (u - z.double()).square().flatten(1).sum(1)
    return block.alpha * (phi + distance / (2.0 * (1.0 - block.alpha)))


def two_layer_objective(
    layer: Deep, x: Tensor | None, z0: Tensor, z1: Tensor | None = None, *, check: bool = True
) -> Tensor:
    """α M_{φ_1}^{1−α}(z_1) + α M_{φ_2}^{1−α}(z_0) + ½‖z_1 − z_0‖² (Corollary 1), [B], in float64.

    Its minimizer is the equilibrium of the two layers. Differentiable in both states, once.

    Args:
        z0: the deep OptEq's state, [B, *state].
        z1: the state between the layers; None takes f_1(z_0).
        check: raise where Assumption 2 (L_σ‖W_l‖² ≤ 1) is not met; without it the objective is
            not convex.
    """
    blocks = as_blocks(layer, x)
    if len(blocks) != 2:
        raise ValueError(
            f"Corollary 1 is about L = 2 layers, got {len(blocks)}; for other L use "
            "inclusion_residual (Theorem 2) or wide_limit (Theorem 3)."
        )
    if check:
        _check_assumption(blocks, "Corollary 1")
    z0 = z0.double()
    between = blocks[0](z0) if z1 is None else z1.double()
    if between.shape != z0.shape:
        raise ValueError(
            f"z1 and z0 are states of one shape, got {tuple(between.shape)} and {tuple(z0.shape)}."
        )
    total = moreau_envelope(blocks[0], between) + moreau_envelope(blocks[1], z0)
    return total + 0.5 * (between - z0).square().flatten(1).sum(1)


@torch.no_grad()
def wide_limit(layer: Deep, x: Tensor | None = None, *, check: bool = True) -> Solution[Tensor]:
    """z with Lz = Σ_l W_lᵀσ(W_l z + U_l x + b_l), to which all blocks tend as α → 0 (Theorem 3).

    It is the y of min Σ_l φ_l(x_l) + ½‖x_l − y‖². Where the layers have their own α_l, α_l = t·a_l
    with t → 0, block l counts a_l times: (Σa_l)z = Σa_l W_lᵀσ(W_l z + U_l x + b_l).

    The solution has the value [B, *state] in float64. ``check`` raises where Assumption 2
    (L_σ‖W_l‖² ≤ 1) is not met, or no W_l is proven to have L_σ‖W_l‖² < 1; without them there may be
    no limit or several.
    """
    blocks = as_blocks(layer, x)
    if check:
        _check_assumption(blocks, "Theorem 3")
        if not min(block.expansion() for block in blocks) < 1.0:
            raise ValueError(
                "Theorem 3 needs one layer with L_σ‖W_l‖² < 1, and all bounds are 1 or more; "
                "bound one of them below 1, or pass check=False."
            )
    total = sum(block.alpha for block in blocks)

    def mean(z: Tensor) -> Tensor:
        return torch.stack([(b.alpha / total) * b.proximal(z) for b in blocks]).sum(0)

    return fixed_point(mean, blocks[0].start(), solver=_SOLVER)


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
    biased = first.bias is not None
    made = OptEq(
        layer.channels,
        sum(layer.mids),
        in_channels=layer.in_channels,
        kernel_size=layer.kernel_size,
        prior=layer.prior,
        constraint=None,
        bias=biased,
        nu=float(len(blocks)),
    ).to(first.weight)
    for part, name in (("W", "weight"), ("U", "weight"), *([("U", "bias")] if biased else [])):
        stacked = torch.cat([getattr(getattr(block, part), name) for block in blocks])
        getattr(getattr(made, part), name).copy_(stacked)
    return made


@dataclass(frozen=True, eq=False)
class WideLimitStudy:
    """What happens to the blocks of a deep OptEq on the way α → 0; K values of α, B samples."""

    alphas: tuple[float, ...]  # α, the largest of the layers' where they differ. [K].
    blocks: Tensor  # z̃(α), [K, B, L, *state]
    limit: Tensor  # The wide OptEq's z, [B, *state]
    distance: Tensor  # max_l ‖z_l(α) − limit‖, [K, B]
    gap: Tensor  # max_l ‖z_l(α) − z_{l−1}(α)‖, how far neighboring blocks are apart, [K, B]
    slope: Tensor  # lim gap/α as α → 0: max_l (α_l/α)‖prox_{φ_l}(limit) − limit‖, [B]

    @property
    def orders(self) -> Tensor:
        """log-log slopes of ``distance`` between neighboring α, [K − 1, B]; they tend to 1."""
        steps = torch.tensor(self.alphas, dtype=torch.float64).log().diff()
        return self.distance.cpu().log().diff(dim=0) / steps[:, None]

    def __str__(self) -> str:
        head = f"{'α':>10}  {'max ‖z_l − limit‖':>18}  {'max ‖z_l − z_{l−1}‖':>20}  {'order':>6}"
        orders = ["", *(f"{order:6.3f}" for order in self.orders.mean(1).tolist())]
        columns = zip(self.alphas, self.distance, self.gap, orders, strict=True)
        rows = [
            f"{alpha:10.3g}  {float(far.max()):18.3e}  {float(gap.max()):20.3e}  {order}"
            for alpha, far, gap, order in columns
        ]
        return "\n".join([head, *rows])


@torch.no_grad()
def approach_wide_limit(
    layer: Deep,
    x: Tensor | None = None,
    alphas: Sequence[float] = (0.5, 0.1, 0.01, 0.001),
    *,
    check: bool = True,
) -> WideLimitStudy:
    """Solve the deep OptEq for each α and measure how its blocks come together (Theorem 3).

    z_l − z_{l−1} = α(prox_{φ_l}(z_{l−1}) − z_{l−1}), so neighbors agree at the rate α.

    The layer's own α are replaced by each of ``alphas``, falling numbers in (0, 1]; where they
    differ they are scaled, so that the largest is that. ``check`` is as in ``wide_limit``.
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
