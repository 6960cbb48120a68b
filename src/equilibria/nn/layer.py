"""Layers whose forward is a solve: of a problem (EquilibriumLayer) or of a map (MapLayer).

``WeightedLayer`` has what the layers of problems with weights share: W (bounded) on the state and
c = Ux + b from the input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.adjoints import Implicit
from equilibria.adjoints.graph import captured
from equilibria.certify.rounding import product_rounding
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.result import Solution
from equilibria.engine.solver import SolverOptions
from equilibria.engine.tree import per_sample
from equilibria.entry import check_ways, fixed_point
from equilibria.problems import (
    ConvOperator,
    DenseOperator,
    HiddenProblem,
    LinearOperator,
    NonNegative,
    Prior,
)
from equilibria.problems.operators import check_dtype
from equilibria.problems.solving import minimize_from
from equilibria.solvers import Anderson, Auto

from .constraints import Constraint, NormBounded, constrain
from .inputs import (
    check_input,
    check_kernel,
    check_prior,
    check_sizes,
    contained,
    lowered,
    marked,
    zeros_as,
)
from .observing import report


class _SolvedLayer(nn.Module):
    """A solver and an adjoint; ``forward`` is ``solve``, shown to who observes the layer."""

    is_equilibrium: ClassVar[bool] = True
    default_solver: ClassVar[SolverOptions]
    default_adjoint: ClassVar[Adjoint] = Implicit()
    shown: ClassVar[tuple[str, ...]] = ()
    """The attributes that ``repr`` shows before the solver and the adjoint."""

    def __init__(self, solver: SolverOptions | None = None, adjoint: Adjoint | None = None) -> None:
        super().__init__()
        self.solver: SolverOptions = self.default_solver if solver is None else solver
        self.adjoint: Adjoint = self.default_adjoint if adjoint is None else adjoint
        check_ways(self.solver, self.adjoint)

    def solve(self, x: Any, z0: Any = None, **options: Any) -> Solution[Any]:
        """Solve for x and tell all: value, result codes, stats. Options as ``fixed_point``."""
        raise NotImplementedError

    def observed_solve(self, x: Any, z0: Any = None, **options: Any) -> Solution[Any]:
        """``solve``, reported to the observers of this layer and to its penalty."""
        solution = self.solve(x, z0, **options)
        report(self, solution)
        return solution

    def forward(self, x: Any, z0: Any = None) -> Any:
        """z*, [B, *state]; ``z0`` is a warm start."""
        return self.observed_solve(x, z0).value

    def extra_repr(self) -> str:
        names = (*self.shown, "solver", "adjoint")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class EquilibriumLayer(_SolvedLayer):
    """x ↦ z* = argmin_z G(z; x), a module whose forward is a solve and whose backward is exact.

    Give a function that writes down the problem, and by keyword the modules and parameters that it
    uses; they are registered here (so they train, move, copy and save) and handed to the function:

        layer = eq.nn.EquilibriumLayer(
            lambda x, W, U: eq.Problem(eq.NonNegative(), eq.Gaussian(W, U(x), gamma=0.5)),
            W=nn.Linear(8, 16, bias=False),
            U=nn.Linear(4, 16),
        )

    Or subclass it and write the method ``problem(x)``, as GEQ and OptEq do.
    """

    default_solver: ClassVar[SolverOptions] = Auto()

    def __init__(
        self,
        problem_fn: Callable[..., HiddenProblem] | None = None,
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
        **parts: nn.Module | nn.Parameter,
    ) -> None:
        super().__init__(solver, adjoint)
        self._problem_fn = problem_fn
        self._parts = tuple(parts)
        for name, part in parts.items():
            if not isinstance(part, (nn.Module, nn.Parameter)):
                raise TypeError(
                    f"EquilibriumLayer({name}=...): expected an nn.Module or nn.Parameter, got "
                    f"{type(part).__name__}."
                )
            setattr(self, name, part)
        for name, held in captured(problem_fn).items():
            # It would neither train nor move with the layer.
            if isinstance(held, nn.Module) or (isinstance(held, Tensor) and held.requires_grad):
                raise ValueError(
                    f"problem_fn captures '{name}', which would not be registered, copied or saved "
                    f"with the layer. Pass it by keyword, EquilibriumLayer(problem_fn, {name}="
                    f"{name}), and take it as an argument: lambda x, {name}: ..."
                )

    def problem(self, x: Tensor) -> HiddenProblem:
        """The problem that this layer solves for the input x [B, ...]."""
        if self._problem_fn is None:
            raise TypeError(
                f"{type(self).__name__} has no problem: pass problem_fn or override problem(x)."
            )
        made = self._problem_fn(x, **{name: getattr(self, name) for name in self._parts})
        if not isinstance(made, HiddenProblem):
            raise TypeError(
                f"problem_fn must return a Problem, got {type(made).__name__} for an input of "
                f"shape {tuple(x.shape)}."
            )
        return made

    def start(self, problem: HiddenProblem, x: Tensor) -> Tensor:
        """Where the solver starts for the input x; zero for most problems."""
        return problem.default_start()

    def starts_at_zero(self) -> bool:
        """Whether ``start`` is known to be zero, which saves work."""
        return False

    def nominal_bounds(self, problem: HiddenProblem) -> tuple[Any, Any] | None:
        """(m, L) from a constraint instead of the weights, to choose a solver; None: not known.

        Certificates take the proven ``problem.curvature()``, too slow for every training step.
        """
        return None

    def solve(self, x: Tensor, z0: Tensor | None = None, **options: Any) -> Solution[Tensor]:
        """Solve for x and tell all: value, result codes, stats, the solver's choice."""
        return self.solve_posed(*self.posed(x, z0), **options)

    def forward(self, x: Tensor, z0: Any = None, *, keep: list[Any] | None = None) -> Tensor:
        """z*, [B, *state]; ``z0`` is a warm start. ``keep`` gets the problem and the Solution."""
        if keep is None:
            found: Tensor = super().forward(x, z0)
            return found
        posed = self.posed(x, z0)
        solution = self.solve_posed(*posed)
        report(self, solution)
        keep += (posed[0], solution)
        return solution.value

    def solve_posed(
        self, problem: HiddenProblem, start: Tensor, zero_start: bool, **options: Any
    ) -> Solution[Tensor]:
        """Solve a problem of ``posed`` from its start."""
        chosen = {"solver": self.solver, "adjoint": self.adjoint, **options}
        bounds = partial(self.nominal_bounds, problem)
        return minimize_from(problem, start, bounds=bounds, zero_start=zero_start, **chosen)

    def posed(self, x: Tensor, z0: Tensor | None = None) -> tuple[HiddenProblem, Tensor, bool]:
        """The problem of a solve, bad samples of x kept apart, its start, and if that is zero."""
        zero = z0 is None and self.starts_at_zero()
        x, bad = contained(x)
        problem = self.problem(x)
        start = self.start(problem, x) if z0 is None else z0
        if bad is None:
            return problem, start, zero
        if z0 is None and not zero:
            start = torch.where(per_sample(bad, start), 0.0, start)
        return self.marked(problem, bad), start, zero

    def marked(self, problem: HiddenProblem, bad: Tensor) -> HiddenProblem:
        """The problem with NaN in the inputs of the samples of ``bad`` [B]; one input is enough."""
        return problem.with_inputs(*marked(problem.inputs(), bad))


class MapLayer(_SolvedLayer, ABC):
    """z* = T(z*; x). Write ``inject``, ``step`` and ``start``; the rest is here.

    The state is a tensor [B, ...] or a tree of them. What depends on x alone is computed once, in
    ``inject``, not at every evaluation.
    """

    default_solver: ClassVar[SolverOptions] = Anderson()

    @abstractmethod
    def inject(self, x: Tensor) -> tuple[Any, ...]:
        """Check x; what the map needs of it: tensors (or trees) with the batch in dim 0."""

    @abstractmethod
    def step(self, z: Any, *injected: Any) -> Any:
        """T(z; x), shaped as z."""

    @abstractmethod
    def start(self, x: Tensor, *injected: Any) -> Any:
        """Where the solver starts, [B, ...]."""

    def bound_step(self) -> Callable[..., Any]:
        """T for one solve: what depends on the weights alone may be computed here, once."""
        return self.step

    def check_state(self, z: Any, x: Tensor) -> None:
        """Raise unless z is shaped as the state for x; a layer that knows the shape checks it."""

    def state_like(self, x: Any) -> bool:
        """Whether the state has the dtype of x."""
        return isinstance(x, Tensor) and x.is_floating_point()

    def couples_batch(self) -> bool:
        """Whether T makes the samples of a batch depend on each other."""
        return False

    def injected(self, x: Tensor) -> tuple[Any, ...]:
        """``inject(x)`` for a solve, bad samples of x kept from the weights that it applies."""
        x, bad = contained(x)
        found: tuple[Any, ...] = marked(self.inject(x), bad)
        return found

    def after_solve(self, solution: Solution[Any], *injected: Any) -> None:
        """Called once after a solve, for what moves in training mode."""

    def prepared(self, x: Any, z0: Any = None) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
        """The map of one solve, its start, checked, and what it is given besides."""
        injected = self.injected(x)
        start = self.start(x, *injected) if z0 is None else z0
        self.check_state(start, x)
        if z0 is not None and self.state_like(x):
            for part in pytree.tree_leaves(z0):
                check_dtype(x, part)
        return self.bound_step(), start, injected

    def solve(self, x: Any, z0: Any = None, **options: Any) -> Solution[Any]:
        """Solve for x and tell all: value, result codes, stats. Options as ``fixed_point``."""
        return self.solve_map(*self.prepared(x, z0), **options)

    def solve_map(
        self, step: Callable[..., Any], start: Any, injected: tuple[Any, ...], **options: Any
    ) -> Solution[Any]:
        """``solve`` for what was ``prepared``."""
        ways = {"solver": self.solver, "adjoint": self.adjoint, "coupled": self.couples_batch()}
        found = fixed_point(step, start, injected, **{**ways, **options})
        self.after_solve(found, *injected)
        return found


class FeatureLayer(nn.Module):
    """A layer of x [B, in_channels], or with a kernel size of maps [B, in_channels, H, W]."""

    in_channels: int
    kernel_size: int | None
    prior: Prior

    def _describe(
        self, channels: int, in_channels: int | None, kernel_size: int | None, prior: Prior
    ) -> None:
        """Check and keep what every such layer is given; x has ``channels`` if not said."""
        name = type(self).__name__
        self.in_channels = channels if in_channels is None else in_channels
        check_sizes(name, {"channels": channels, "in_channels": self.in_channels})
        if kernel_size is not None:
            check_kernel(name, kernel_size)
        check_prior(name, prior)
        self.kernel_size, self.prior = kernel_size, prior

    @property
    def convolutional(self) -> bool:
        return self.kernel_size is not None

    def check_input(self, x: Tensor) -> None:
        """Raise unless x is a floating tensor [B, in] or [B, in, H, W] in the layer's dtype."""
        check_input(self, x, self.in_channels, convolutional=self.convolutional)


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


class WeightedLayer(FeatureLayer, EquilibriumLayer):
    """A layer with W: state → mid and U: x → features, dense or k × k convolutions.

    Dense: x [B, in], state [B, channels].
    Convolutional: x [B, in, H, W], state [B, channels, H, W].
    """

    shown: ClassVar[tuple[str, ...]] = ("channels", "mid", "in_channels", "kernel_size", "prior")

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
        self._describe(channels, in_channels, kernel_size, prior)
        check_sizes(type(self).__name__, {"mid": mid})
        self.channels, self.mid, self.constraint = channels, mid, constraint
        free = linear(channels, mid, kernel_size, bias=False)
        self.W = constrain(free, "weight", constraint)
        self.U = linear(self.in_channels, features, kernel_size, bias=bias)

    @property
    def state_channels(self) -> int:
        """Channels of the state that is solved for."""
        return self.channels

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

    def input_norm_upper(self, in_shape: Sequence[int] | None = None) -> float:
        """A proven upper bound on the norm of x ↦ c, for the Lipschitz certificate: ‖U‖₂.

        For every size of x, or for x of ``in_shape``: closer and faster where maps are small.
        """
        u = self.input_operator()
        return u.norm_upper() if in_shape is None else u.norm_upper_on(u.output_shape(in_shape))

    def input_rounding(self, x: Tensor) -> Tensor:
        """How far float64 moves c = Ux + b at most, ‖·‖ [B]."""
        return product_rounding(self.U, x)

    def nominal_norm(self) -> float | None:
        """What the constraint says of ‖W‖₂, with a margin."""
        return _MARGIN * self.constraint.bound if isinstance(self.constraint, NormBounded) else None

    def start(self, problem: HiddenProblem, x: Tensor) -> Tensor:
        """Zero, in the memory format of x and in the precision of c."""
        shape = (x.shape[0], self.state_channels, *x.shape[2:])
        return zeros_as(x, shape, problem.inputs()[0].dtype)

    def starts_at_zero(self) -> bool:
        return type(self).start is WeightedLayer.start


def linear(
    inputs: int,
    outputs: int,
    kernel_size: int | None,
    *,
    bias: bool,
    padding: Literal["zeros", "circular"] = "zeros",
) -> nn.Module:
    """A matrix, or with a kernel size a convolution that keeps the size of its maps."""
    if kernel_size is None:
        return nn.Linear(inputs, outputs, bias=bias)
    half, mode = kernel_size // 2, padding
    return nn.Conv2d(inputs, outputs, kernel_size, padding=half, bias=bias, padding_mode=mode)


def weight_operator(weight: Any) -> LinearOperator:
    """A weight [out, in] as a matrix, [out, in, k, k] as a zero-padded convolution."""
    return DenseOperator(weight) if weight.ndim == 2 else ConvOperator(weight)
