"""deepinv's algorithms on this engine, and its priors as ours; deepinv itself is not imported."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions
from equilibria.engine.tree import per_sample, power_of_two
from equilibria.entry import fixed_point
from equilibria.nn.observing import report
from equilibria.problems import JointPrior
from equilibria.problems.parts import replaced
from equilibria.problems.priors import Parameter, aligned, check_parameter, check_step


class DeepinvFixedPoint(nn.Module):
    """``est = T(est; y, physics)`` in place of a ``deepinv.optim.FixedPoint``, called as that is.

    T is an iteration with the parameters, prior and data fidelity of the last of ``max_iter``. The
    state is all of ``X["est"]``, so algorithms with a dual have implicit gradients too. deepinv's
    backtracking, acceleration and stopping rule are not used; ``X["cost"]`` is None.
    """

    is_equilibrium = True

    def __init__(
        self, own: Any, *, solver: SolverOptions | None = None, adjoint: Adjoint | None = None
    ) -> None:
        super().__init__()
        if not hasattr(own, "init_iterate_fn"):
            raise TypeError(f"got a {type(own).__name__}, takes a FixedPoint of deepinv.optim.")
        self.own, self.solver, self.adjoint = own, solver, adjoint

    def forward(
        self, *args: Any, init: Any = None, compute_metrics: bool = False, **kwargs: Any
    ) -> tuple[dict[str, Any], Any]:
        own, x_gt = self.own, kwargs.pop("x_gt", None)
        cost = own.iterator.cost_fn if compute_metrics else None
        own.iterator.has_cost = cost is not None  # or each iteration evaluates it
        started = own.init_iterate_fn(*args, init, cost_fn=cost)
        makers = (own.update_data_fidelity_fn, own.update_prior_fn, own.update_params_fn)
        parts = [made and made(own.max_iter - 1) for made in makers]
        metrics = own.init_metrics_fn(started, x_gt=x_gt) if compute_metrics else None

        def advanced(est: Any, *given: Any) -> Any:
            return own.iterator({"est": est}, *parts, *given, **kwargs)

        @torch.no_grad()
        def observe(step: int, est: Any, residual: Tensor) -> None:
            own.update_metrics_fn(metrics, {"est": est}, advanced(est, *args), x_gt=x_gt)

        with torch.no_grad():  # init may lack the dual, or have it in another shape
            start = tuple(advanced(tuple(started["est"]), *args)["est"])
        found = fixed_point(
            lambda est, *given: tuple(advanced(est, *given)["est"]),
            start,
            args,
            solver=self.solver,
            adjoint=self.adjoint,
            callback=observe if compute_metrics else None,
        )
        report(self, found)
        return {"est": found.value, "cost": None}, metrics


def from_deepinv(
    model: Any, *, solver: SolverOptions | None = None, adjoint: Adjoint | None = None
) -> Any:
    """An algorithm of deepinv, such as ``PGD(..., DEQ=True)``, on this engine; changed in place.

    ``model(y, physics)`` is then the fixed point, with gradients, with ``DEQ`` and without.
    """
    own = getattr(model, "fixed_point", model)
    model.fixed_point = DeepinvFixedPoint(own, solver=solver, adjoint=adjoint)
    model.DEQ, model.unfold = False, True  # neither a gradient of its own nor torch.no_grad()
    if type(model).__name__ == "BaseDEQ":  # of DEQ_builder, which has no such switch
        model.__class__ = type(model).__base__
    return model


@dataclass(frozen=True)
class DeepinvPrior(JointPrior):
    """``f(z) = weight g(z)`` with the value and the prox of a ``deepinv.optim.Prior`` g.

    ``g_param`` is passed on to both. ``exact=True`` says that the prox is a closed form, no inner
    solve: without it ``certify`` gives no error bound. Its error bounds are never called rigorous.
    """

    prior: Any
    weight: Parameter = 1.0
    g_param: Any = None
    exact: bool = False
    parameters = ("weight",)
    sampled = True

    def _check(self) -> None:
        if not getattr(self.prior, "explicit_prior", False):
            name = type(self.prior).__name__
            raise TypeError(f"prior got a {name}, takes one with a value (explicit_prior=True).")
        check_parameter(self, "weight", low=0.0)

    def value(self, z: Tensor) -> Tensor:
        g: Tensor = self.prior.fn(z, self.g_param)
        return aligned(self, "weight", g) * g

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        tau, first = check_step(tau), v.flatten(1)[:, 0]
        gamma = aligned(self, "weight", first) * (tau.flatten() if isinstance(tau, Tensor) else tau)
        gamma = per_sample(gamma, v).to(v.dtype) if isinstance(gamma, Tensor) else gamma
        found: Tensor = self.prior.prox(v, self.g_param, gamma=gamma)
        return found

    def prox_error(self, v: Tensor, tau: float | Tensor = 1.0) -> float:
        return 0.0 if self.exact else torch.inf

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        """Of the Moreau envelope; its step is small if the prox is exact."""
        size, slope = (t.flatten(1).norm(dim=1) + 1e-30 for t in (z, g))
        small = torch.finfo(z.dtype).eps ** 0.5 if self.exact else 0.01
        tau = per_sample(power_of_two(small * size / slope), z)
        return (z - self.prox(z - tau * g, tau)) / tau

    def in_double(self) -> Self:
        return replaced(super().in_double(), prior=copy.deepcopy(self.prior).double())
