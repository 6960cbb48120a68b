"""Layers that are a map and nothing more: solve, watch the Jacobian, penalize it, certify."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.adjoints.quarantine import failed_codes, lend
from equilibria.certify.map_certificate import MapCertificate, certify_map
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.options import check_number
from equilibria.engine.result import ConvergenceWarning, Solution
from equilibria.engine.solver import Solver
from equilibria.engine.spectral import jacobian_penalty, spectral_radius
from equilibria.engine.tree import map_tensors
from equilibria.entry import fixed_point

from .map_layer import MapLayer
from .observing import report
from .penalties import collectors
from .precision import uncached
from .residual_block import check_sizes

__all__ = ["MonitoredMapLayer"]


class MonitoredMapLayer(MapLayer):
    """z* = T(z*; x) with an eye on J = ∂T/∂z at z*. The base of DEQ and MDEQ.

    Nothing is known of T beforehand: the penalty ‖J‖²_F keeps training from making it unstable
    (Bai, Koltun and Kolter 2021), the spectral radius tells whether it did.
    """

    def __init__(
        self,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        jacobian_weight: float = 0.0,
        jacobian_samples: int = 1,
    ) -> None:
        super().__init__(solver, adjoint)
        self.jacobian_weight = jacobian_weight
        self.jacobian_samples = jacobian_samples
        check_number(self, "jacobian_weight", low=0.0)
        check_number(self, "jacobian_samples", low=1, integer=True)

    def bound_step(self) -> Callable[..., Any]:
        """T for one solve: what depends on the weights alone may be computed here, once."""
        return self.step

    def injected(self, x: Any) -> tuple[Any, ...]:
        """``inject(x)`` as it is: x enters the map itself, whose answer shows bad samples."""
        return self.inject(x)

    def after_solve(self, z: Any, failed: Tensor | None, *injected: Any) -> None:
        """Called once after a solve, for what moves in training mode; ``failed`` [B] blew up."""

    def contraction_bound(self) -> float | None:
        """ρ with ‖T(a; x) − T(b; x)‖ ≤ ρ‖a − b‖ for all a, b, x, or None where none is known."""
        return None

    def solve(self, x: Any, z0: Any = None, **options: Any) -> Solution[Any]:
        """Solve for x and tell all: value, result codes, stats. Options as ``fixed_point``."""
        return self._solve(x, z0, self.bound_step(), self.inject(x), options)

    def forward(self, x: Any, z0: Any = None) -> Any:
        """z*; ``z0`` is a warm start."""
        return self.observed_solve(x, z0).value

    def observed_solve(self, x: Any, z0: Any = None, **options: Any) -> Solution[Any]:
        """``solve``, told to who observes this layer or collects its penalty."""
        fn, injected = self.bound_step(), self.inject(x)
        solution = self._solve(x, z0, fn, injected, options)
        self.tell(solution, fn, injected)
        return solution

    def tell(
        self, solution: Solution[Any], fn: Callable[..., Any], injected: tuple[Any, ...]
    ) -> None:
        """Hand the solution to who observes this layer, and its penalty to who collects them."""
        report(self, solution)
        wanted = collectors(self) if self.jacobian_weight > 0 else []
        if wanted:
            penalty = self.jacobian_weight * _mean(*self._penalty(solution, fn, injected))
            for found in wanted:
                found.add(self, penalty)

    def _solve(
        self,
        x: Any,
        z0: Any,
        fn: Callable[..., Any],
        injected: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Solution[Any]:
        start = self.start(x, *injected) if z0 is None else z0
        chosen = {"solver": self.solver, "adjoint": self.adjoint, **options}
        with uncached(pytree.tree_leaves(start)[0]):
            found = fixed_point(fn, start, injected, **chosen)
        self.after_solve(found.value, failed_codes(found.result), *injected)
        return found

    # ------------------------------------------------------------------ the Jacobian

    def forward_with_penalty(self, x: Any, z0: Any = None) -> tuple[Any, Tensor]:
        """(z*, ‖J‖²_F/n of each sample [B]), both with a graph, from one map.

        Add ``layer.jacobian_weight * penalty.mean()`` to the loss. Samples whose solve blew up
        have the penalty 0. ``collect_penalties`` does this for a whole model.
        """
        fn, injected = self.bound_step(), self.inject(x)
        solution = self._solve(x, z0, fn, injected, {})
        report(self, solution)
        return solution.value, self._penalty(solution, fn, injected)[0]

    def jacobian_penalty(
        self,
        x: Any,
        z: Any,
        *,
        samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """‖J‖²_F/n of each sample at z, by Hutchinson, with a graph to the weights and to x; [B].

        z is taken as a constant. With dropout the masks are drawn anew: ``forward_with_penalty``
        takes those of the solve.
        """
        count = self.jacobian_samples if samples is None else samples
        fn, injected = self.bound_step(), self.inject(x)
        return jacobian_penalty(fn, z, injected, samples=count, generator=generator)

    def spectral_radius(
        self,
        x: Any,
        z: Any = None,
        *,
        steps: int = 30,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """max |λ(J)| of each sample at z (z* if not given), an estimate by Arnoldi; [B].

        Below 1, plain iteration started close enough finds z*; above 1 it leaves it. That is a
        statement about this z alone. It is taken on a copy in eval mode: looking changes nothing.
        """
        if self.training:
            still = copy.deepcopy(self).eval()
            return still.spectral_radius(x, z, steps=steps, generator=generator)
        with torch.no_grad():
            fn, injected = self.bound_step(), self.inject(x)
            if z is None:
                start = self.start(x, *injected)
                z = fixed_point(fn, start, injected, solver=self.solver).value
            return spectral_radius(fn, z, injected, steps=steps, generator=generator)

    def _penalty(
        self, solution: Solution[Any], fn: Callable[..., Any], injected: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        """The penalty [B], zero for samples that failed, and which did not, [B]."""
        failed = failed_codes(solution.result)
        # Their inputs may hold NaN, and 0·NaN is NaN in the gradients of shared weights.
        z, given = map_tensors(lambda t: lend(t, failed), (solution.value, injected))
        values = jacobian_penalty(fn, z, given, samples=self.jacobian_samples)
        if failed is None:
            return values, torch.ones_like(values, dtype=torch.bool)
        return torch.where(failed, 0.0, values), ~failed

    # ------------------------------------------------------------------ the unrolled twin

    def repeat(self, x: Any, repeats: int, z0: Any = None) -> Any:
        """T applied ``repeats`` times, with a graph: the weight-tied network of that depth."""
        check_sizes(type(self).__name__ + ".repeat", {"repeats": repeats})
        fn, injected = self.bound_step(), self.inject(x)
        z = self.start(x, *injected) if z0 is None else z0
        for _ in range(repeats):
            z = fn(z, *injected)
        self.after_solve(z, None, *injected)
        return z

    # ------------------------------------------------------------------ certificate

    @torch.no_grad()
    def certify(self, x: Any, z: Any = None) -> MapCertificate:
        """What is proven about the fixed point at x, and about z (the solver's if not given).

        Of a map without structure nothing is: the certificate then holds the residual and, as a
        note, the spectral radius. Where ``contraction_bound()`` gives a ρ < 1 the fixed point is
        unique and ‖z − z*‖ ≤ ‖z − T(z)‖/(1 − ρ). A ρ that the Jacobian at z contradicts is refused.
        """
        model = copy.deepcopy(self).eval()
        solver = "z was given"
        if z is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                found = model.solve(x)
            z, solver = found.value, found.summary()
        return certify_map(model, x, z, solver)

    def extra_repr(self) -> str:
        weight = f", jacobian_weight={self.jacobian_weight:g}" if self.jacobian_weight else ""
        return super().extra_repr() + weight


def _mean(values: Tensor, kept: Tensor) -> Tensor:
    return values.sum() / kept.sum().clamp_min(1)
