"""What the layers with weights share: W (bounded) on the state, c = Ux + b from the input."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor, nn

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions
from equilibria.problems import (
    ConvOperator,
    DenseOperator,
    HiddenProblem,
    LinearOperator,
    NonNegative,
    Prior,
)

from .constraints import Constraint, NormBounded, constrain
from .inputs import check_input, check_kernel, check_prior, check_sizes, lowered, zeros_as
from .layer import EquilibriumLayer

# How far the true norm may lie above the nominal bound (map size, one power iteration a step).
_MARGIN = 1.02


class LayerOptions(TypedDict, total=False):
    """Options that GEQ, KerDEQ, OptEq, PolynomialEq and SigmoidEq share, all by keyword."""

    in_channels: int | None
    """Channels of x; None: ``channels``."""
    kernel_size: int | None
    """None for vectors, x [B, in_channels]; odd for convolutions, x [B, in_channels, H, W]."""
    prior: Prior
    """f; its proximal operator σ = prox_f is the activation. NonNegative(), if not given, is
    ReLU."""
    constraint: Constraint
    """On W: ``NormBounded(bound=...)``, ``WeightNormalized()`` or None (free);
    NormBounded(bound=0.95) if not given."""
    bias: bool
    """Whether Ux has a bias; True if not given."""
    solver: SolverOptions | None
    """How the problem is solved; None: Auto(), unless the layer says otherwise."""
    adjoint: Adjoint | None
    """How gradients pass the answer; None: Implicit()."""


class WeightedLayer(EquilibriumLayer):
    """A layer with W: state → mid and U: x → features, dense or k × k convolutions.

    Dense: x [B, in], state [B, channels].
    Convolutional: x [B, in, H, W], state [B, channels, H, W].
    """

    shown = ("channels", "mid", "in_channels", "kernel_size", "prior", "constraint")

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        features: int,
        in_channels: int | None = None,
        kernel_size: int | None = None,
        prior: Prior = NonNegative(),  # noqa: B008 — frozen
        constraint: Constraint = NormBounded(bound=0.95),  # noqa: B008
        bias: bool = True,
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        super().__init__(None, solver, adjoint)
        name = type(self).__name__
        self.in_channels = channels if in_channels is None else in_channels
        check_sizes(name, {"channels": channels, "mid": mid, "in_channels": self.in_channels})
        if kernel_size is not None:
            check_kernel(name, kernel_size)
        check_prior(name, prior)
        self.channels, self.mid = channels, mid
        self.kernel_size = kernel_size
        self.prior = prior
        self.constraint = constraint
        free = linear(channels, mid, kernel_size, bias=False)
        self.W = constrain(free, "weight", constraint)
        self.U = linear(self.in_channels, features, kernel_size, bias=bias)

    @property
    def convolutional(self) -> bool:
        return self.kernel_size is not None

    @property
    def state_channels(self) -> int:
        """Channels of the state that is solved for."""
        return self.channels

    def check_input(self, x: Tensor) -> None:
        """Raise unless x is a floating tensor [B, in] or [B, in, H, W] in the layer's dtype."""
        check_input(self, x, self.in_channels, convolutional=self.convolutional)

    def features(self, x: Tensor) -> Tensor:
        """c = Ux + b, checked."""
        self.check_input(x)
        c: Tensor = self.U(x)
        return c

    def operator(self) -> LinearOperator:
        """W, its constraint evaluated once; under autocast already in the lower precision."""
        return weight_operator(lowered(self.W.weight))

    def input_operator(self) -> LinearOperator:
        """U without its bias: the linear part of x ↦ c."""
        return weight_operator(self.U.weight)

    def input_norm_upper(self) -> float:
        """A proven upper bound on the norm of x ↦ c, for the Lipschitz certificate: ‖U‖₂."""
        return self.input_operator().norm_upper()

    def nominal_norm(self) -> float | None:
        """What the constraint says of ‖W‖₂, with a margin."""
        return _MARGIN * self.constraint.bound if isinstance(self.constraint, NormBounded) else None

    def start(self, problem: HiddenProblem, x: Tensor) -> Tensor:
        """Zero, in the memory format of x and in the precision of c."""
        shape = (x.shape[0], self.state_channels, *x.shape[2:])
        return zeros_as(x, shape, problem.inputs()[0].dtype)

    def starts_at_zero(self) -> bool:
        return type(self).start is WeightedLayer.start


def linear(inputs: int, outputs: int, kernel_size: int | None, *, bias: bool) -> nn.Module:
    """A matrix, or with a kernel size a convolution that keeps the size of its maps."""
    if kernel_size is None:
        return nn.Linear(inputs, outputs, bias=bias)
    return nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2, bias=bias)


def weight_operator(weight: Any) -> LinearOperator:
    """A weight [out, in] as a matrix, [out, in, k, k] as a zero-padded convolution."""
    return DenseOperator(weight) if weight.ndim == 2 else ConvOperator(weight)
