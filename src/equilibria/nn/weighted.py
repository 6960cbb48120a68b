"""What the layers with weights share: W (bounded) on the state, c = Ux + b from the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.options import options
from equilibria.engine.result import Solution
from equilibria.engine.solver import Bounds, Choice, Point, Solver
from equilibria.engine.tree import Leaves
from equilibria.problems import (
    ConvOperator,
    DenseOperator,
    HiddenProblem,
    LinearOperator,
    Prior,
)
from equilibria.problems.norms import NormBound
from equilibria.problems.solving import minimize_from
from equilibria.solvers import Auto, ProximalGradient

from .constraints import Constraint, NormBounded, constrain
from .inputs import channels_last, check_input
from .layer import EquilibriumLayer
from .precision import lowered

# How far the true norm may lie above the nominal bound (map size, one power iteration a step).
_MARGIN = 1.02


class WeightedLayer(EquilibriumLayer):
    """A layer with W: state → mid and U: x → features, dense or k × k convolutions.

    Dense: x [B, in], state [B, channels].
    Convolutional: x [B, in, H, W], state [B, channels, H, W].
    """

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        in_channels: int | None,
        features: int,
        kernel_size: int | None,
        prior: Prior,
        constraint: Constraint,
        bias: bool,
        solver: Solver | None,
        adjoint: Adjoint | None,
    ) -> None:
        super().__init__(None, solver, adjoint)
        sizes = {"channels": channels, "mid": mid, "in_channels": in_channels}
        for name, value in sizes.items():
            if name == "in_channels" and value is None:
                continue
            self._check_size(name, value)
        if kernel_size is not None:
            self._check_size("kernel_size", kernel_size)
            if kernel_size % 2 == 0:
                raise ValueError(
                    f"{type(self).__name__}(kernel_size={kernel_size}): 'same' padding needs an "
                    "odd kernel size."
                )
        if not isinstance(prior, Prior):
            raise TypeError(
                f"{type(self).__name__}(prior={prior!r}): expected a prior such as NonNegative()."
            )
        self.channels, self.mid = channels, mid
        self.in_channels = channels if in_channels is None else in_channels
        self.kernel_size = kernel_size
        self.prior = prior
        self.constraint = constraint
        self.W = constrain(self._linear(channels, mid, False), "weight", constraint)
        self.U = self._linear(self.in_channels, features, bias)

    def _check_size(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{type(self).__name__}({name}={value!r}): expected an integer of at least 1."
            )

    def _linear(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        if self.kernel_size is None:
            return nn.Linear(inputs, outputs, bias=bias)
        k = self.kernel_size
        return nn.Conv2d(inputs, outputs, k, padding=k // 2, bias=bias)

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
        weight = lowered(self.W.weight)
        return ConvOperator(weight) if self.convolutional else DenseOperator(weight)

    def input_operator(self) -> LinearOperator:
        """U without its bias: the linear part of x ↦ c."""
        weight: Any = self.U.weight
        return ConvOperator(weight) if self.convolutional else DenseOperator(weight)

    def input_norm_upper(self) -> float:
        """A proven upper bound on the norm of x ↦ c, for the Lipschitz certificate: ‖U‖₂."""
        return self.input_operator().norm_upper()

    def norm(self, size: int | tuple[int, int] | None = None) -> NormBound:
        """‖W‖₂ on maps of ``size`` pixels: an estimate from below and a proven upper bound."""
        if not self.convolutional:
            return self.operator().norm()
        if size is None:
            raise ValueError(f"{type(self).__name__}.norm needs size, the pixels of the map.")
        pixels = (size, size) if isinstance(size, int) else size
        return self.operator().norm((self.channels, *pixels))

    def start(self, problem: HiddenProblem, x: Tensor) -> Tensor:
        """Zero, in the memory format of x and in the precision of c."""
        c = problem.inputs()[0]
        zeros = c.new_zeros(x.shape[0], self.state_channels, *x.shape[2:])
        return zeros.to(memory_format=torch.channels_last) if channels_last(x) else zeros

    def nominal_bounds(self, problem: HiddenProblem) -> tuple[Any, Any] | None:
        """(m, L) from the constraint instead of the weights, to choose a solver; None: not known.

        No certificate uses them: those take the proven bounds of ``problem.curvature()``, which
        cost too much for every training step.
        """
        return None

    def nominal_norm(self) -> float | None:
        """What the constraint says of ‖W‖₂, with a margin."""
        return _MARGIN * self.constraint.bound if isinstance(self.constraint, NormBounded) else None

    def solve(self, x: Tensor, z0: Tensor | None = None, **options: Any) -> Solution[Tensor]:
        problem, start = self.posed(x, z0)
        chosen = {"solver": self.solver, "adjoint": self.adjoint, **options}
        solver = chosen["solver"]
        if isinstance(solver, (Auto, ProximalGradient)):
            bounds = self.nominal_bounds(problem)
            if bounds is not None:
                chosen["solver"] = _Decided(choice=solver.for_problem(lambda: bounds))
        zero = z0 is None and type(self).start is WeightedLayer.start
        return minimize_from(problem, start, zero_start=zero, **chosen)

    def extra_repr(self) -> str:
        kernel = f", kernel_size={self.kernel_size}" if self.convolutional else ""
        parts = f"{self.channels}, {self.mid}, in_channels={self.in_channels}{kernel}"
        return (
            f"{parts}, prior={self.prior!r}, constraint={self.constraint!r}, {super().extra_repr()}"
        )


@options
class _Decided(Solver):
    """A choice already made, handed on."""

    choice: Choice

    def for_problem(self, bounds: Bounds) -> Choice:
        return self.choice

    def init(self, z: Leaves) -> Any:
        return self.choice.solver.init(z)

    def step(self, point: Point, state: Any) -> tuple[Leaves, Any]:
        return self.choice.solver.step(point, state)
