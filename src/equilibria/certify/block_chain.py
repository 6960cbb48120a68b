"""The certificate of a deep OptEq: T = f_L ∘ … ∘ f_1 ∘ T_R contracts with a product of factors.

∂f_l/∂z = α_l W_lᵀ diag(σ′) W_l + (1 − α_l)I is symmetric with 0 ≤ σ′ ≤ L_σ, so that f_l has the
Lipschitz constant q_l = α_l L_σ‖W_l‖² + 1 − α_l, and α_l L_σ‖W_l‖ in c_l. With r that of the
regularizing step T_R (max|1 − h| over the Hessian's bounds h, or 1/(1 + h) for a prox),

    ρ = r q_1 ⋯ q_L,    ‖z − z*‖ ≤ ‖z − T(z)‖/(1 − ρ),
    ‖z*(x) − z*(x′)‖ ≤ Σ_l α_l L_σ‖W_l‖‖U_l‖ (q_{l+1} ⋯ q_L)/(1 − ρ) · ‖x − x′‖.

Rounding. Each computed block is within δ_l of the exact one at the same argument (error analysis
of ``rounding.py``), and an error of its argument passes with q_l: E_l = q_l E_{l−1} + δ_l.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from equilibria.engine.result import Solution
from equilibria.problems.kernels import Activated
from equilibria.problems.norms import SAFETY, UNIT, exact
from equilibria.problems.priors import Free, Prior
from equilibria.problems.problem import Problem
from equilibria.problems.regularizers import Regularizer

from .claims import NOT_BY_U, refuted_prox, refuted_regularizer, stretched
from .guarantee import Guarantee, solved, where_known
from .map_certificate import MapCertificate
from .rounding import direct_convolutions, norm, product_rounding, residual_rounding

_UP = 1.0 + 32 * UNIT  # a few operations, each rounded once, from above
_NONEXPANSIVE = 1.0 + 1e-10  # a proven bound on a norm of 1 is a little above it


class BlockChain(Protocol):
    """What is asked of the layer, an ``nn.Module``.

    A block is a dataclass with ``operator``, ``alpha`` and ``prior``, a method ``image(z, c)``,
    Wᵀσ(Wz + c), and a call (z, c) ↦ α·image + (1 − α)z.
    """

    prior: Prior
    regularizer: Regularizer | None
    regularize: Literal["gradient", "prox"]
    alpha: tuple[float, ...] | None

    def solve(self, x: Tensor) -> Solution[Tensor]: ...
    def inject(self, x: Tensor) -> tuple[Tensor, ...]: ...
    def check_state(self, z: Tensor, x: Tensor) -> None: ...
    def bound_blocks(self) -> Sequence[Any]: ...
    def each_block(self) -> Sequence[Any]: ...
    def regularized(self, z: Tensor) -> Tensor: ...
    def eval(self) -> Any: ...


class _Exact:
    """The layer's numbers in float64, as they were in its own dtype, with proven bounds."""

    def __init__(self, model: BlockChain) -> None:
        self.blocks: list[Any] = [
            replace(b, operator=b.operator.cast(torch.float64), alpha=float(b.alpha))
            for b in model.bound_blocks()
        ]
        inputs = [b.input_operator().cast(torch.float64) for b in model.each_block()]
        self.expansion = model.prior.expansion
        self.alphas = [block.alpha for block in self.blocks]
        self.norms = [block.operator.norm_upper() for block in self.blocks]  # ‖W_l‖, from above
        self.input_norms = [u.norm_upper() for u in inputs]  # ‖U_l‖, from above
        pairs = zip(self.alphas, self.norms, strict=True)
        # q_l, from above
        self.factors = [(a * self.expansion * w * w + (1.0 - a)) * _UP for a, w in pairs]

    def sensitivity(self, moved: Sequence[Any]) -> Any:
        """Σ_l α_l L_σ‖W_l‖ moved_l q_{l+1} ⋯ q_L, from above: T(z) moves by this if c_l move so."""
        total: Any = 0.0
        for q, a, w, u in zip(self.factors, self.alphas, self.norms, moved, strict=True):
            total = (q * total + a * self.expansion * w * u) * _UP
        return total


def regularizer_factor(regularizer: Regularizer | None, form: str) -> float:
    """r, a Lipschitz constant of z − ∂R(z) or prox_R(z), from above; inf where none is known."""
    if regularizer is None:
        return 1.0
    bounds = regularizer.curvature()
    low, high = float(bounds.lower), float(bounds.upper)
    if regularizer.couples_batch or not bounds.rigorous:
        return math.inf
    if form == "prox":
        return _UP / (1.0 + low) if regularizer.convex and low >= 0.0 else math.inf
    return max(abs(1.0 - low), abs(1.0 - high)) * _UP


def _evaluate(
    layer: BlockChain, numbers: _Exact, z: Tensor, c: Sequence[Tensor]
) -> tuple[Tensor, Tensor, bool]:
    """T(z) in float64, a bound on its distance from the exact one [B]; whether that is derived."""
    state = layer.regularized(z)
    off, derived = torch.zeros_like(norm(z)), True
    if layer.regularizer is not None:
        own = layer.regularizer.step_rounding(z, state)
        derived = own is not None
        if own is None:
            own = (z[0].numel() + 64) * UNIT * norm(z.abs() + state.abs())
        off = SAFETY * own
    for block, q, part in zip(numbers.blocks, numbers.factors, c, strict=True):
        image = block.image(state, part)
        problem = Problem(Free(), Activated(block.operator, part, block.prior))
        # It bounds the error of the image, and some more for that of a norm.
        block_off, known = residual_rounding(problem, state, image)
        skip_off = SAFETY * 8 * UNIT * norm(state.abs() + image.abs())
        off, derived = q * off + (block_off + skip_off), derived and known
        state = block(state, part)
    return state, off * _UP, derived


@torch.no_grad()
def certify_block_chain(layer: BlockChain, x: Tensor, z: Tensor | None = None) -> MapCertificate:
    """The certificate of ``layer`` at x, for z or its own answer. The layer is left as it is."""
    model: BlockChain = copy.deepcopy(layer).eval()
    state, text = solved(lambda: model.solve(x), z)
    c, starts = model.inject(x), model.inject(torch.zeros_like(x[:1]))
    model.check_state(state, x)
    with direct_convolutions(state):
        c_off = [product_rounding(b.U, x) for b in model.each_block()]
        parts = [exact(part) for part in c]
        found = _certify(model, _Exact(model), exact(state), parts, c_off, text)
    images = [block.input_operator()(x) for block in model.each_block()]  # U_l x
    if any(map(stretched, c, starts, images)):
        found = replace(found, lipschitz=None, lipschitz_note=NOT_BY_U)
    return found


def _certify(
    model: BlockChain,
    numbers: _Exact,
    z: Tensor,
    c: Sequence[Tensor],
    c_off: Sequence[Tensor],
    solver: str,
) -> MapCertificate:
    r = regularizer_factor(model.regularizer, model.regularize)
    rho = math.prod(numbers.factors) * r * (1.0 + 4 * len(numbers.blocks) * UNIT)
    image, off, derived = _evaluate(model, numbers, z, c)
    residual = norm(z - image)
    off = off + SAFETY * (z[0].numel() + 5) * UNIT * residual  # of the difference and its norm
    finite = (residual + off).isfinite()
    wrong = _refuted(model, numbers, z, c)
    contracts = rho < 1.0 and not wrong
    error = (residual + off) / (1.0 - rho) * _UP if contracts else torch.full_like(off, math.inf)
    error = torch.where(finite, error, math.inf)
    lipschitz, why = None, "the fixed point is not certified to be unique"
    moved = torch.full_like(off, math.inf)
    if contracts:
        lipschitz = numbers.sensitivity(numbers.input_norms) / (1.0 - rho) * _UP
        moved = numbers.sensitivity(c_off) / (1.0 - rho) * _UP
        why = "every input: Σ α_l L_σ‖W_l‖‖U_l‖ q_{l+1}⋯q_L/(1 − ρ)"
    return MapCertificate(
        kinds=where_known(finite & contracts, Guarantee.contraction),
        residual=residual,
        error_bound=error,
        rounding=off,
        contraction=rho if math.isfinite(rho) else None,
        input_rounding=moved,
        lipschitz=lipschitz,
        lipschitz_note=why,
        solver=solver,
        rigorous=derived and not model.prior.sampled and not wrong,
        numbers=_words(numbers, model, r),
        notes=(*_notes(numbers, model, r, rho, derived=derived), *wrong),
    )


def _refuted(model: BlockChain, numbers: _Exact, z: Tensor, c: Sequence[Tensor]) -> list[str]:
    """Which claims of the user's own parts do not hold at samples, in words."""
    found, first = [], numbers.blocks[0]
    if model.regularizer is not None:
        found.append(refuted_regularizer(model.regularizer, model.regularize, z))
    found.append(refuted_prox(model.prior, first.operator(z) + c[0]))
    return [f"REFUTED: {text}" for text in found if text is not None]


def _words(numbers: _Exact, model: BlockChain, r: float) -> dict[str, str]:
    def row(values: list[float]) -> str:
        return ", ".join(f"{value:.4g}" for value in values)

    found = {
        "α_l": row(numbers.alphas) + (" (learned)" if model.alpha is None else ""),
        "‖W_l‖": f"at most {row(numbers.norms)}",
        "‖U_l‖": f"at most {row(numbers.input_norms)}",
        "factors q_l": row(numbers.factors),
    }
    if model.regularizer is not None:
        found["regularizer"] = f"{model.regularizer!r} ({model.regularize} form), factor {r:.4g}"
    return found


def _notes(numbers: _Exact, model: BlockChain, r: float, rho: float, *, derived: bool) -> list[str]:
    notes = []
    if not derived:
        notes.append("rounding is an estimate: none is derived for this regularizer")
    if model.prior.sampled:
        notes.append(
            "the slope L_σ of the activation is the largest at the samples that CustomPrior took; "
            "that it is nowhere larger, and its rounding, are assumed"
        )
    if model.regularizer is not None and model.regularizer.couples_batch:
        notes.append("the regularizer couples the samples of a batch: nothing is derived for it")
    elif not math.isfinite(r):
        notes.append("no Lipschitz constant of the regularizing step is known")
    if rho < 1.0:
        return notes
    steep = [w for w in numbers.norms if numbers.expansion * w * w > _NONEXPANSIVE]
    if not steep and r <= _NONEXPANSIVE:
        notes.append(
            "T is nonexpansive, to rounding, but not proven to contract: it may have one fixed "
            "point, many or none; where it has some, SequentialAveraging tends to that of least R"
        )
    elif steep:
        notes.append(
            f"{len(steep)} of {len(numbers.norms)} blocks are not proven nonexpansive "
            f"(L_σ‖W_l‖² up to {numbers.expansion * max(steep) ** 2:.4g}); lower the bound of W"
        )
    return notes
