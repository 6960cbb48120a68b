"""Deep OptEq: z = f_L ∘ … ∘ f_1(z), f_l(z) = α_l W_lᵀσ(W_l z + c_l) + (1−α_l)z.

Xie et al. 2021, Eq 5–6. W_l and U_l are matrices, k × k convolutions, or depthwise-separable ones.
The three ways of Algorithm 1 to train it, or any other layer, are in ``training_way``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.adjoints import Implicit, Unrolled
from equilibria.certify.block_chain import certify_block_chain
from equilibria.certify.map_certificate import MapCertificate
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions
from equilibria.problems import (
    LinearOperator,
    NonNegative,
    Prior,
    Regularizer,
    SeparableConvOperator,
)
from equilibria.solvers import Picard, SequentialAveraging

from .constraints import Constraint, NormBounded, OperatorNorm, constrain
from .inputs import check_sizes, lowered, zeros_as
from .layer import FeatureLayer, MapLayer, linear, weight_operator


class _SeparableNorm(OperatorNorm):
    """σ of the composed map z ↦ P(D ∗ z), from both weights in one matrix [out + k², C]."""

    def __init__(self, spec: NormBounded, kernel_size: int) -> None:
        # The singular values of a separable kernel lie close: one power iteration follows them too
        # slowly where it is enough for a full convolution, and four still cost less.
        super().__init__(spec.bound, size=spec.size, steps=4 * spec.steps)
        self.kernel_size = kernel_size

    def operator(self, weight: Tensor) -> SeparableConvOperator:
        k = self.kernel_size
        pointwise, depthwise = weight[: -k * k], weight[-k * k :]
        return SeparableConvOperator(depthwise.mT.reshape(-1, 1, k, k), pointwise[:, :, None, None])

    def _input_shape(self, weight: Tensor) -> tuple[int, ...]:
        return (weight.shape[1], self.size, self.size)


class SeparableConv(nn.Module):
    """Wz = P(D ∗ z) + b: a depthwise k × k convolution, then a pointwise one, as one linear map.

    ``NormBounded(bound=β)`` bounds the composed map: P is divided by max(1, ‖P∘D‖/β).
    ``WeightNormalized`` acts on each of the two. Whoever writes to the weights by hand calls
    ``settle()`` afterwards; an optimizer's steps are followed by power iteration.

    z [B, inputs, H, W] → [B, outputs, H, W]; k odd.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel_size: int,
        *,
        bias: bool = False,
        constraint: Constraint = None,
    ) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(
            inputs, inputs, kernel_size, padding=kernel_size // 2, groups=inputs, bias=False
        )
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=bias)
        self.norm: _SeparableNorm | None = None
        if isinstance(constraint, NormBounded):
            self.norm = _SeparableNorm(constraint, kernel_size)
            self.settle()
        else:
            constrain(self.depthwise, "weight", constraint)
            constrain(self.pointwise, "weight", constraint)

    @property
    def bias(self) -> Tensor | None:
        return self.pointwise.bias

    def _packed(self) -> Tensor:
        return torch.cat([self.pointwise.weight.flatten(1), self.depthwise.weight.flatten(1).mT])

    @torch.no_grad()
    def settle(self) -> None:
        """Converge the power iteration on the present weights."""
        if self.norm is not None:
            self.norm.right_inverse(self._packed())

    def operator(self) -> SeparableConvOperator:
        """The linear part, its constraint evaluated once."""
        depthwise, pointwise = self.depthwise.weight, self.pointwise.weight
        if self.norm is not None:
            pointwise = (pointwise / self.norm.excess(self._packed())).to(pointwise.dtype)
        return SeparableConvOperator(lowered(depthwise), lowered(pointwise))

    def forward(self, z: Tensor) -> Tensor:
        out = self.operator()(z)
        return out if self.bias is None else out + self.bias.to(out.dtype).view(-1, 1, 1)


@dataclass(frozen=True, eq=False)
class BoundBlock:
    """A block with its weights evaluated: what a solve repeats. z, f(z) [B, channels, ...]."""

    operator: LinearOperator
    alpha: float | Tensor
    prior: Prior

    def image(self, z: Tensor, c: Tensor) -> Tensor:
        """Wᵀσ(Wz + c), the proximal operator of this block's φ where L_σ‖W‖² ≤ 1 (Theorem 1)."""
        hidden = self.prior.activation(self.operator(z) + c)
        return self.operator.adjoint(hidden, z.shape[1:])

    def __call__(self, z: Tensor, c: Tensor) -> Tensor:
        image = self.image(z, c)
        if isinstance(self.alpha, float) and self.alpha == 1.0:
            return image
        weight = self.alpha if isinstance(self.alpha, float) else self.alpha.to(z.dtype)
        return torch.lerp(z, image.to(z.dtype), weight)


class OptEqBlock(nn.Module):
    """The weights of one block: W [mid ← channels] under its constraint, U [mid ← in] with b."""

    def __init__(
        self,
        channels: int,
        mid: int,
        in_channels: int,
        *,
        kernel_size: int | None,
        separable: bool,
        constraint: Constraint,
        bias: bool,
    ) -> None:
        super().__init__()
        self.W: nn.Module
        self.U: nn.Module
        if separable and kernel_size is not None:
            self.W = SeparableConv(channels, mid, kernel_size, constraint=constraint)
            self.U = SeparableConv(in_channels, mid, kernel_size, bias=bias)
        else:
            free = linear(channels, mid, kernel_size, bias=False)
            self.W = constrain(free, "weight", constraint)
            self.U = linear(in_channels, mid, kernel_size, bias=bias)

    def operator(self) -> LinearOperator:
        """W, its constraint evaluated once; under autocast already in the lower precision."""
        return _operator(self.W)

    def input_operator(self) -> LinearOperator:
        """U without its bias."""
        return _operator(self.U)


def _operator(module: nn.Module) -> LinearOperator:
    if isinstance(module, SeparableConv):
        return module.operator()
    return weight_operator(lowered(module.weight))


class DeepOptEq(FeatureLayer, MapLayer):
    """z = T(z) = f_L ∘ … ∘ f_1(z),  f_l(z) = α_l W_lᵀσ(W_l z + U_l x + b_l) + (1−α_l)z  (Eq 5–6).

    With L_σ‖W_l‖² ≤ 1 each f_l is the proximal operator of α_l·M_{φ_l}^{1−α_l}, so nonexpansive
    (Theorems 1 and 2); with ‖W_l‖ < 1 it contracts with the factor α_l L_σ‖W_l‖² + 1 − α_l, and T
    with the product of them. L = 1 and α = 1 is ``OptEq(form="state")``.

    A feature regularizer R (§5.1; it carries its weight, the paper's γR) enters the map in front of
    the blocks, in one of two forms, which are two problems:

    - ``regularize="gradient"``: T(z − ∂R(z)). L = 1: the minimizer of Φ + R (Theorem 4), where
      Φ = αM_φ^{1−α}, which is φ itself for α = 1.
    - ``regularize="prox"``: T(prox_R(z)), where R has a closed prox. L = 1: the minimizer of
      Φ + env R, the Moreau envelope min_u R(u) + ½‖u − z‖², and *not* of Φ + R.

    With Decorrelation and HSIC, which compare samples, the batch is solved as one. The other way to
    regularize (§5.2) is the solver ``SequentialAveraging``.

    Dense without ``kernel_size``: x [B, in_channels], z [B, channels], W_l [mids[l], channels].
    Convolutional with it: x [B, in_channels, H, W], z [B, channels, H, W].

    Args:
        channels, in_channels: channels of z; of x, which None makes the same.
        mids: channels of W_l z and U_l x, one number per block; its length is L.
        separable: W_l and U_l are depthwise-separable convolutions, pointwise ∘ depthwise.
        alpha: α in (0, 1], one number or one per block.
        learn_alpha: make each α_l a parameter, sigmoid(``alpha_logits``), started at ``alpha``.
        prior, constraint, bias: f with σ = prox_f, on every W_l, b_l; as in ``LayerOptions``.
        regularizer, regularize: R of §5.1, or None, and its form, see above.
        solver, adjoint: Anderson() and Implicit() if not given.
    """

    blocks: nn.ModuleList
    """Block l has ``W`` and ``U`` (with its bias b)."""
    alpha: tuple[float, ...] | None
    """Fixed α_l, or None where they are learned; ``alphas()`` gives both."""
    alpha_logits: nn.Parameter | None
    shown = ("channels", "mids", "in_channels", "kernel_size", "alpha", "prior", "regularizer")

    def __init__(
        self,
        channels: int,
        mids: Sequence[int],
        *,
        in_channels: int | None = None,
        kernel_size: int | None = None,
        separable: bool = False,
        alpha: float | Sequence[float] = 0.8,
        learn_alpha: bool = False,
        prior: Prior = NonNegative(),  # noqa: B008
        constraint: Constraint = NormBounded(bound=0.95),  # noqa: B008
        bias: bool = True,
        regularizer: Regularizer | None = None,
        regularize: Literal["gradient", "prox"] = "gradient",
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        super().__init__(solver, adjoint)
        self._describe(channels, in_channels, kernel_size, prior)
        if separable and kernel_size is None:
            raise ValueError(
                "DeepOptEq(separable=True) is for convolutions: give kernel_size as well."
            )
        _check_regularizer(regularizer, regularize)
        self.channels, self.mids = channels, _block_sizes(mids)
        self.separable, self.constraint = separable, constraint
        self.regularizer, self.regularize = regularizer, regularize
        values = _start_alphas(alpha, len(self.mids), learned=learn_alpha)
        self.alpha = None if learn_alpha else values
        self.register_parameter("alpha_logits", None)
        if learn_alpha:
            logits = [math.log(a) - math.log1p(-a) for a in values]
            self.alpha_logits = nn.Parameter(torch.tensor(logits))
        how: Any = {"kernel_size": kernel_size, "separable": separable, "bias": bias}
        self.blocks = nn.ModuleList(
            OptEqBlock(channels, mid, self.in_channels, constraint=constraint, **how)
            for mid in self.mids
        )

    def alphas(self) -> Tensor:
        """α_1 … α_L [L], in the dtype and on the device of the weights; learned ones with graph."""
        weight = next(self.blocks.parameters())
        if self.alpha_logits is None:
            return torch.tensor(self.alpha, dtype=weight.dtype, device=weight.device)
        # A sigmoid that has underflowed would make a block the identity: stay inside (0, 1].
        logits = self.alpha_logits
        return logits.sigmoid().clamp_min(torch.finfo(logits.dtype).tiny)

    def _factors(self) -> Sequence[float | Tensor]:
        """α_l as numbers where they are fixed: no transfer to the device in a solve."""
        return self.alphas().unbind() if self.alpha is None else self.alpha

    def each_block(self) -> list[OptEqBlock]:
        """``blocks`` with their type."""
        return [block for block in self.blocks if isinstance(block, OptEqBlock)]

    def bound_blocks(self) -> list[BoundBlock]:
        """The blocks with their constraints and α evaluated once, for a whole solve.

        In training mode this moves the power iteration of ``NormBounded``.
        """
        pairs = zip(self.each_block(), self._factors(), strict=True)
        return [BoundBlock(block.operator(), factor, self.prior) for block, factor in pairs]

    def bound_step(self) -> Callable[..., Tensor]:
        """(z, c_1, …, c_L) ↦ T(z; x) with the weights evaluated once; see ``bound_blocks``."""
        # The closure holds what the map uses and not the layer: adjoints look through it.
        blocks, regularizer, form = self.bound_blocks(), self.regularizer, self.regularize

        def step(z: Tensor, *c: Tensor) -> Tensor:
            z = _regularized(z, regularizer, form)
            for block, part in zip(blocks, c, strict=True):
                z = block(z, part)
            return z

        return step

    def inject(self, x: Tensor) -> tuple[Tensor, ...]:
        """c_l = U_l x + b_l for each block, [B, mids[l], ...], checked."""
        self.check_input(x)
        return tuple(block.U(x) for block in self.each_block())

    def step(self, z: Tensor, *injected: Tensor) -> Tensor:
        """T(z; x), the regularizer of §5.1 included. A solve evaluates the weights once instead."""
        return self.bound_step()(z, *injected)

    def regularized(self, z: Tensor) -> Tensor:
        """z − ∂R(z) or prox_R(z), what the blocks are applied to; z itself without R."""
        return _regularized(z, self.regularizer, self.regularize)

    def start(self, x: Tensor, *injected: Tensor) -> Tensor:
        """z₀ = x (Algorithm 1) where x has the shape of z, else zero; in the precision of c."""
        c = injected[0]
        if self.in_channels == self.channels:
            # A sample with NaN must fail by its c and not carry NaN through an unrolled graph.
            return torch.where(torch.isfinite(x), x, 0.0).to(c.dtype)
        return zeros_as(x, (x.shape[0], self.channels, *x.shape[2:]), c.dtype)

    def couples_batch(self) -> bool:
        return self.regularizer is not None and self.regularizer.couples_batch

    def certify(self, x: Tensor, z: Tensor | None = None) -> MapCertificate:
        """What is proven of the fixed point for x, and of z (None: the layer's own answer)."""
        return certify_block_chain(self, x, z)

    def check_state(self, z: object, x: Tensor) -> None:
        expected = (x.shape[0], self.channels, *x.shape[2:])
        if not isinstance(z, Tensor) or tuple(z.shape) != expected:
            got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(
                f"the state of DeepOptEq for x {tuple(x.shape)} is {expected}, got z0 {got}."
            )


def _regularized(z: Tensor, regularizer: Regularizer | None, form: str) -> Tensor:
    if regularizer is None:
        return z
    return regularizer.prox(z) if form == "prox" else z - regularizer.grad(z)


def _block_sizes(mids: object) -> tuple[int, ...]:
    if isinstance(mids, (str, bytes)) or not isinstance(mids, Sequence) or not mids:
        raise ValueError(
            f"DeepOptEq(mids={mids!r}): expected the channels of each block, such as (16, 32, 64)."
        )
    check_sizes("DeepOptEq", {f"mids[{i}]": mid for i, mid in enumerate(mids)})
    return tuple(mids)


def _start_alphas(
    alpha: float | Sequence[float], count: int, *, learned: bool
) -> tuple[float, ...]:
    values = tuple(alpha) if isinstance(alpha, Sequence) else (alpha,) * count
    if len(values) != count:
        raise ValueError(
            f"DeepOptEq(alpha={alpha!r}) gives {len(values)} numbers for the {count} blocks of "
            "mids: expected one for all, or one per block."
        )
    allowed = "(0, 1), which a sigmoid can reach," if learned else "(0, 1]"
    for value in values:
        given: object = value
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not number or not 0.0 < value <= 1.0 or (learned and value == 1.0):
            raise ValueError(f"DeepOptEq(alpha={alpha!r}): expected numbers in {allowed} (Eq 6).")
    return tuple(float(value) for value in values)


def _check_regularizer(regularizer: object, regularize: object) -> None:
    if regularize not in ("gradient", "prox"):
        raise ValueError(f"DeepOptEq(regularize={regularize!r}): expected 'gradient' or 'prox'.")
    if regularizer is None:
        return
    if not isinstance(regularizer, Regularizer):
        raise TypeError(
            f"DeepOptEq(regularizer={regularizer!r}): expected a regularizer such as "
            "SquaredNorm(0.1) or None."
        )
    name = type(regularizer).__name__
    if regularize == "prox" and not regularizer.has_prox:
        raise ValueError(
            f"DeepOptEq(regularize='prox') needs a regularizer with a closed prox (SquaredNorm, "
            f"L1), got {name}; use regularize='gradient'."
        )
    if regularize == "gradient" and not regularizer.smooth:
        raise ValueError(
            f"DeepOptEq(regularize='gradient') takes a smooth regularizer, and {name} has a kink: "
            "z − ∂R(z) jumps there. Use regularize='prox'."
        )


def training_way(
    way: Literal["implicit", "sam", "unrolled"],
    *,
    steps: int = 20,
    regularizer: Regularizer | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The options ``solver`` and ``adjoint`` of the three ways of Algorithm 1 (Xie et al. 2021).

    - ``"implicit"``: solve the fixed point by the layer's own solver, differentiate by the implicit
      function theorem. Memory does not grow with the steps.
    - ``"sam"``: K = ``steps`` steps of ``SequentialAveraging`` (Eq 11), differentiated step by
      step; ``regularizer`` is its R (None: ½‖z‖²), ``options`` are the solver's (rho, c, …).
    - ``"unrolled"``: K plain steps z ← T(z), differentiated step by step.
    """
    fixed: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "max_steps": steps}
    if way == "sam":
        averaging = SequentialAveraging(regularizer=regularizer, **fixed, **options)
        return {"solver": averaging, "adjoint": Unrolled()}
    if way not in ("implicit", "unrolled"):
        raise ValueError(f"training_way({way!r}): expected 'implicit', 'sam' or 'unrolled'.")
    given = sorted([*options, *([] if regularizer is None else ["regularizer"])])
    if given:
        raise TypeError(
            f"training_way({way!r}) takes no {', '.join(given)}: those belong to 'sam'. The "
            "regularizer of §5.1 is an option of the layer."
        )
    if way == "unrolled":
        return {"solver": Picard(**fixed), "adjoint": Unrolled()}
    return {"solver": None, "adjoint": Implicit()}
