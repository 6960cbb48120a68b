"""MonotoneDEQ: an equilibrium layer that has one equilibrium whatever its weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.adjoints import Implicit
from equilibria.certify.map_certificate import MapCertificate
from equilibria.certify.monotone_layer import certify_monotone
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.iterate import Callback
from equilibria.engine.maps import Map
from equilibria.engine.options import check_number, options
from equilibria.engine.result import Iterated, Solution
from equilibria.engine.solver import Solver, SolverOptions
from equilibria.engine.transforms import functorch_active
from equilibria.engine.tree import Leaves
from equilibria.entry import fixed_point
from equilibria.problems import NonNegative, Prior
from equilibria.problems.monotone_operator import (
    DenseMonotone,
    MonotoneInclusion,
    MonotoneOperator,
)
from equilibria.problems.monotone_tiers import TieredMonotone, make_geometry
from equilibria.problems.norms import convolution_norm_upper, dense_norm
from equilibria.problems.operators import check_dtype
from equilibria.solvers.forward_backward import Splitting, SplittingIteration, SplittingSolver
from equilibria.solvers.peaceman_rachford import PeacemanRachford

from .inputs import check_halving, check_sizes, solving_dtype, zeros_as
from .layer import FeatureLayer, MapLayer, linear

_KRYLOV = Implicit()
_BACKWARD_STEPS = 500


@options
class TransposedSplitting(Adjoint):
    """Implicit differentiation whose system u = g + Jᵀu is solved as the forward pass was.

    J is the Jacobian of the splitting's step S. With D = diag prox′ ∈ [0, 1] and V the resolvent,

        forward-backward:   u ← g + (I − α(I − Wᵀ))D u,
        Peaceman–Rachford:  u ← g + (2D − I)(2Vᵀ − I) u,

    the splittings of the transposed problem: the same step α, the same V, and the same contraction
    factor as forward, so they converge wherever the forward solve does. After a solver that is no
    splitting this is ``Implicit()``. The tolerance is the solver's, relative to the gradient that
    leaves the solve, which is about α times u (and never below 4 units of rounding of u); a forward
    solve of fixed steps has the default one of its dtype here.
    """

    def run(self, fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
        if not isinstance(solver, SplittingIteration) or not torch.is_grad_enabled():
            return _KRYLOV.run(fn, z0, solver, callback)
        back = solver
        if back.fixed_steps:
            most = max(back.max_steps, _BACKWARD_STEPS)
            back = dataclasses.replace(back, rtol=None, max_steps=most)
        traced = torch.compiler.is_compiling() or functorch_active()
        if fn.surrogate is not None and not traced:
            share = min(1.0, float(fn.surrogate.near(*fn.args)) / 2)
            rtol = share * back.relative_tolerance(fn.dtypes(z0)[0], z0[0].device.type)
            least = 4 * torch.finfo(z0[0].dtype).eps
            back = dataclasses.replace(back, rtol=max(rtol, least))
        return Implicit(solver=back).run(fn, z0, solver, callback)


class DenseWeights(nn.Module):
    """A, B [n, n], drawn as ``nn.Linear`` draws (monDEQ's MONSingleFc)."""

    def __init__(self, channels: int, m: float) -> None:
        super().__init__()
        self.m = m
        self.A = nn.Parameter(torch.empty(channels, channels))
        self.B = nn.Parameter(torch.empty(channels, channels))
        for weight in (self.A, self.B):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    def operator(self, sizes: Sequence[tuple[int, int]]) -> MonotoneOperator:
        """W as a matrix; ``sizes`` is empty."""
        dtype = solving_dtype(self.A)
        with torch.autocast(self.A.device.type, enabled=False):
            return DenseMonotone(self.A, self.B, self.m, dtype)


class TieredWeights(nn.Module):
    """Kernels in direction and length: Aᵢ = gᵢA/‖A‖_F, Bᵢ = hᵢB/‖B‖_F, Nᵢ = gᵢ′N/‖N‖_F.

    g, g′ and h are learned and start at 1, as in monotone_op_net, which scales AᵀA by g itself:
    there a g below zero ends monotonicity (one tier) or is NaN (several). Here its square stands,
    so W is monotone wherever training goes.
    """

    def __init__(self, channels: Sequence[int], kernel_size: int, m: float, padding: str) -> None:
        super().__init__()
        self.m = m
        self.kernel_size, self.padding = kernel_size, padding
        self.A = nn.ParameterList([self._kernel(c, c) for c in channels])
        self.B = nn.ParameterList([self._kernel(c, c) for c in channels])
        steps = zip(channels[1:], channels[:-1], strict=True)
        self.N = nn.ParameterList([self._kernel(o, i) for o, i in steps])
        self.g = nn.Parameter(torch.ones(len(channels)))
        self.h = nn.Parameter(torch.ones(len(channels)))
        self.g_down = nn.Parameter(torch.ones(len(channels) - 1)) if len(channels) > 1 else None

    def _kernel(self, outputs: int, inputs: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(outputs, inputs, self.kernel_size, self.kernel_size))
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        return weight

    def operator(self, sizes: Sequence[tuple[int, int]]) -> MonotoneOperator:
        """W on maps of these sizes, one a tier."""
        first = self.A[0]
        geometry = make_geometry(self.padding, self.kernel_size)
        dtype = solving_dtype(first)
        with torch.autocast(first.device.type, enabled=False):
            a = [_scaled(w, self.g[i]) for i, w in enumerate(self.A)]
            b = [_scaled(w, self.h[i]) for i, w in enumerate(self.B)]
            n = []
            if self.g_down is not None:
                n = [_scaled(w, self.g_down[i]) for i, w in enumerate(self.N)]
            return TieredMonotone(a, b, n, self.m, sizes, geometry, dtype)


def _scaled(weight: Tensor, length: Tensor) -> Tensor:
    """length·weight/‖weight‖_F; zero stays zero."""
    norm: Tensor = torch.linalg.vector_norm(weight)
    return weight * (length / norm.clamp_min(torch.finfo(norm.dtype).tiny))


class MonotoneDEQ(FeatureLayer, MapLayer):
    """z = σ(Wz + Ux + b), W = (1 − m)I − AᵀA + B − Bᵀ  (Nguyen 2022, Eq 3.1–3.3).

    The layer of Winston and Kolter 2020. I − W ⪰ mI for every A and B, so the inclusion
    0 ∈ (I − W)z − (Ux + b) + ∂f(z), σ = prox_f, has exactly one solution, also where the map
    σ(Wz + Ux + b) expands and plain iteration diverges.

    - dense: ``channels`` a number, no ``kernel_size``; x [B, in_channels], z [B, channels].
    - convolutional: with an odd ``kernel_size``; x [B, in_channels, H, W], z [B, channels, H, W].
    - multi-tier: ``channels`` a sequence (c₀, c₁, …); z is a tuple ([B, c₀, H, W],
      [B, c₁, H/2, W/2], …), coupled downwards by stride-2 convolutions; x enters the first tier. H
      and W must be divisible by 2 for each tier after the first.

    Args:
        channels: channels of z, one number or one a tier.
        in_channels: channels of x; None: those of the first tier of z.
        kernel_size: None for vectors, else odd: the size of U, A, B (and of the down-sampling).
        m: the modulus of strong monotonicity, above 0.
        padding: of every convolution. "zeros": maps are zero beyond their edges (monDEQ pads x
            by k//2 and holds the border of z at zero, which is the same; our z has no border).
            "circular": maps are tori.
        prior: f with σ = prox_f.
        solver: ``PeacemanRachford()`` if not given: it converges for every W with about the m/L-th
            part of the steps of ``ForwardBackward()``, at the price of one inverse a solve.
            Other solvers (Anderson, Broyden, Picard) run on the layer's own map σ(Wz + c), where
            convergence is not guaranteed if ‖W‖ ≥ 1.
        adjoint: ``TransposedSplitting()`` if not given: implicit gradients, the backward system
            solved by the transposed splitting. All other adjoints work, on the splitting's step.
    """

    default_solver = PeacemanRachford()
    default_adjoint = TransposedSplitting()
    shown = ("channels", "in_channels", "kernel_size", "padding", "m", "prior")

    def __init__(
        self,
        channels: int | Sequence[int],
        *,
        in_channels: int | None = None,
        kernel_size: int | None = None,
        m: float = 1.0,
        padding: Literal["zeros", "circular"] = "zeros",
        prior: Prior = NonNegative(),  # noqa: B008
        bias: bool = True,
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        super().__init__(solver, adjoint)
        self.channels = _tiers(channels, kernel_size)
        self._describe(self.channels[0], in_channels, kernel_size, prior)
        self.m = m
        check_number(self, "m", low=0.0, low_open=True)
        if padding not in ("zeros", "circular"):
            raise ValueError(f"MonotoneDEQ(padding={padding!r}): expected 'zeros' or 'circular'.")
        self.padding = padding
        self.U = linear(self.in_channels, self.channels[0], kernel_size, bias=bias, padding=padding)
        self.W: DenseWeights | TieredWeights
        if kernel_size is None:
            self.W = DenseWeights(self.channels[0], float(m))
        else:
            self.W = TieredWeights(self.channels, kernel_size, float(m), padding)

    @property
    def tiers(self) -> int:
        """How many maps the state has; with one it is a tensor, else a tuple."""
        return len(self.channels)

    def state_sizes(self, x: Tensor) -> list[tuple[int, int]]:
        """The pixels of each tier for the input x."""
        if not self.convolutional:
            return []
        height, width = x.shape[2:]
        return [(height >> i, width >> i) for i in range(self.tiers)]

    def check_input(self, x: Tensor) -> None:
        """Raise unless x is a floating tensor of the right shape, in the layer's dtype."""
        super().check_input(x)
        if self.kernel_size is None:
            return
        check_halving("MonotoneDEQ", x, self.tiers - 1)
        least, last = self.kernel_size - 1, min(x.shape[2:]) >> (self.tiers - 1)
        if self.padding == "circular" and last < least:
            raise ValueError(
                f"MonotoneDEQ(padding='circular', kernel_size={self.kernel_size}) needs maps of at "
                f"least {least} pixels in its last tier, got {last} (x is {tuple(x.shape)})."
            )

    def inject(self, x: Tensor) -> tuple[Tensor]:
        """(c,), c = Ux + b, checked."""
        self.check_input(x)
        return (self.U(x),)

    def inclusion(self, x: Tensor) -> MonotoneInclusion:
        """0 ∈ (I − W)z − c + ∂f(z) for inputs of this size, W composed once."""
        return MonotoneInclusion(self.W.operator(self.state_sizes(x)), self.prior, self.tiers)

    def step(self, z: Any, *injected: Any) -> Any:
        (c,) = injected
        return self.inclusion(c).step(z, c)

    def start(self, x: Tensor, *injected: Any) -> Any:
        parts = [zeros_as(x, shape, injected[0].dtype) for shape in self._state_shapes(x)]
        return parts[0] if self.tiers == 1 else tuple(parts)

    def _state_shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        sizes: list[Any] = self.state_sizes(x) or [()]
        return [(x.shape[0], c, *size) for c, size in zip(self.channels, sizes, strict=True)]

    def check_state(self, z: Any, x: Tensor) -> None:
        shapes = self._state_shapes(x)
        parts = list(z) if self.tiers > 1 and isinstance(z, (tuple, list)) else [z]
        found = [tuple(getattr(part, "shape", ())) or type(part).__name__ for part in parts]
        if found != shapes or not all(isinstance(part, Tensor) for part in parts):
            raise ValueError(
                f"MonotoneDEQ: z0 must be shaped as the state, {shapes}, but is {found}."
            )

    def solve(self, x: Tensor, z0: Any = None, **options: Any) -> Solution[Any]:
        """Solve for x and tell all. Options as ``fixed_point``: solver, adjoint, throw, callback.

        The residual is ‖T(z) − z‖ of the layer's own map T, whatever the solver iterates.
        """
        chosen = {"adjoint": self.adjoint, **options}
        solver = chosen.pop("solver", self.solver)
        if not isinstance(solver, SplittingSolver):
            inclusion, start, c = self._posed(x, z0)
            found = fixed_point(inclusion.step, start, (c,), solver=solver, **chosen)
            # Solvers that extrapolate may end a little outside of the prior's domain.
            value = inclusion.into_domain(found.value)
            reason = f"{type(solver).__name__} on the layer's own map"
            return dataclasses.replace(found, value=value, choice=reason)
        splitting = self.split(solver, x, z0)
        callback = chosen.get("callback")
        if callback is not None:
            read = torch.no_grad()(splitting.read)  # the engine iterates u and shows z
            chosen["callback"] = lambda step, u, norm: callback(step, read(u), norm)
        found = fixed_point(
            splitting, splitting.start, splitting.inputs, solver=solver.iteration, **chosen
        )
        value = splitting.read(found.value)
        return dataclasses.replace(found, value=value, choice=splitting.reason)

    def split(self, solver: SplittingSolver, x: Tensor, z0: Any = None) -> Splitting:
        """The map that ``solver`` iterates for x, and how its fixed point gives z."""
        return solver.split(*self._posed(x, z0))

    def _posed(self, x: Tensor, z0: Any) -> tuple[MonotoneInclusion, Any, Tensor]:
        (c,) = self.injected(x)
        start = self.start(x, c) if z0 is None else z0
        self.check_state(start, x)
        for part in [start] if self.tiers == 1 else start:
            check_dtype(c, part)
        return self.inclusion(x), start if self.tiers == 1 else tuple(start), c

    def bounds(self) -> tuple[float, float]:
        """(m, L), proven for these weights: I − W ⪰ mI rounded down, L ≥ ‖I − W‖ rounded up."""
        with torch.no_grad():
            operator = self.W.operator([(1, 1)] * self.tiers)
            return operator.modulus_lower(), operator.norm_uppers()[0]

    def input_norm_upper(self) -> float:
        """A proven upper bound on ‖U‖₂."""
        weight: Any = self.U.weight
        return convolution_norm_upper(weight) if self.convolutional else dense_norm(weight).upper

    def certify(self, x: Tensor, z: Any = None) -> MapCertificate:
        """What is proven at x, and about z (None: the layer's own answer); see docs/monotone.md."""
        if z is not None:
            self.check_state(z, x)
        return certify_monotone(self, x, z)


def _tiers(channels: object, kernel_size: int | None) -> tuple[int, ...]:
    """The channels of each tier, checked."""
    found = tuple(channels) if isinstance(channels, Sequence) else (channels,)
    for value in found:
        check_sizes("MonotoneDEQ", {"channels": value})
    if not found:
        raise ValueError("MonotoneDEQ(channels=()): expected at least one tier.")
    if kernel_size is None and isinstance(channels, Sequence):
        raise ValueError(
            f"MonotoneDEQ(channels={channels!r}): several tiers are convolutional; give "
            "kernel_size, an odd number such as 3."
        )
    return found
