"""deepinv's algorithms and priors on our engine; where deepinv is missing, objects like its own."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.adapters import DeepinvFixedPoint, DeepinvPrior, from_deepinv
from tests.optional import optional

dinv: Any = optional("deepinv")
TIGHT = eq.Anderson(rtol=1e-12, max_steps=2000)
PARAMS = {"lambda": 0.3, "stepsize": 0.4}


class Ridge(nn.Module):
    explicit_prior = True

    def fn(self, x: Tensor, *args: Any) -> Tensor:
        return 0.5 * x.square().flatten(1).sum(1)

    def prox(self, x: Tensor, *args: Any, gamma: Any = 1.0) -> Tensor:
        return x / (1 + gamma)


class Absolute(Ridge):
    def fn(self, x: Tensor, *args: Any) -> Tensor:
        return x.abs().flatten(1).sum(1)

    def prox(self, x: Tensor, *args: Any, gamma: Any = 1.0) -> Tensor:
        return x.sign() * torch.relu(x.abs() - gamma)


class Iteration(nn.Module):
    """Proximal gradient, or ADMM with the dual beside, on ``½‖x − y‖²_M + λ prior(x)``."""

    cost_fn = None

    def __init__(self, dual: bool) -> None:
        super().__init__()
        self.dual = dual

    def forward(self, X: Any, fit: Any, prior: Any, params: Any, y: Tensor, A: Tensor) -> Any:
        x, z = X["est"] if len(X["est"]) == 2 else (X["est"][0], torch.zeros_like(X["est"][0]))
        step, weight = params["stepsize"], params["lambda"]
        if not self.dual:
            z = x - step * (x @ A.T - y) @ A
            return {"est": (prior.prox(z, None, gamma=weight * step), z), "cost": None}
        matrix = torch.eye(A.shape[1], dtype=A.dtype) + step * A.T @ A
        u = torch.linalg.solve(matrix, (x - z + step * y @ A).mT).mT
        x = prior.prox(u + z, None, gamma=weight * step)
        return {"est": (x, z + u - x), "cost": None}


class Algorithm(nn.Module):
    """What the adapter reads of deepinv's algorithms and their fixed points."""

    def __init__(self, prior: nn.Module, dual: bool = False) -> None:
        super().__init__()
        self.params_algo = nn.ParameterDict(
            {k: nn.Parameter(torch.tensor(v).double()) for k, v in PARAMS.items()}
        )
        own: Any = nn.Module()
        own.iterator, own.max_iter = Iteration(dual), 5
        own.update_data_fidelity_fn, own.update_prior_fn = None, lambda k: prior
        own.update_params_fn = lambda k: self.params_algo
        own.init_iterate_fn = lambda y, A, init, cost_fn: {
            "est": (y @ A if init is None else init,)
        }
        own.init_metrics_fn = lambda X, x_gt: {"residual": []}
        own.update_metrics_fn = lambda metrics, before, after, x_gt: metrics["residual"].append(
            float((after["est"][0] - before["est"][0]).norm())
        )
        self.fixed_point = own

    def forward(self, y: Tensor, A: Tensor, **options: Any) -> Any:
        X, metrics = self.fixed_point(y, A, **options)
        return (X["est"][0], metrics) if metrics else X["est"][0]


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    A = 0.5 * torch.randn(7, 5).double()
    return A, torch.randn(3, 7).double().requires_grad_(), torch.randn(3, 5).double()


def ridge_oracle(A: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return torch.linalg.solve(A.T @ A + weight * torch.eye(5).double(), (y @ A).mT).mT


@pytest.mark.parametrize("dual", [False, True])
def test_gradients_of_an_algorithm_are_those_of_the_minimizer(dual: bool) -> None:
    A, y, w = drawn()
    model = from_deepinv(Algorithm(Ridge(), dual), solver=TIGHT)
    weight, step = model.params_algo["lambda"], model.params_algo["stepsize"]
    with eq.nn.observe(model) as seen:
        x = model(y, A)
    assert bool(seen.solutions["fixed_point"][0].converged.all())
    exact = ridge_oracle(A, y, weight)
    torch.testing.assert_close(x, exact, atol=1e-9, rtol=0)
    found = torch.autograd.grad((x * w).sum(), [weight, y, step])
    expected = torch.autograd.grad((exact * w).sum(), [weight, y])
    for a, b in zip(found, (*expected, torch.zeros(()).double()), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_metrics_starts_and_what_is_refused() -> None:
    A, y, _ = drawn()
    model = from_deepinv(Algorithm(Absolute()), solver=TIGHT, adjoint=eq.Unrolled())
    x, metrics = model(y, A, init=torch.ones(3, 5).double(), compute_metrics=True)
    assert metrics["residual"][-1] < 1e-9 < metrics["residual"][0]
    assert x.requires_grad
    for take in (from_deepinv, DeepinvFixedPoint):
        with pytest.raises(TypeError, match="got a Ridge, takes a FixedPoint"):
            take(Ridge())


@pytest.mark.parametrize("weight", [0.3, torch.tensor([0.3, 0.1, 0.6])])
def test_a_prior_of_theirs_is_one_of_ours(weight: Any) -> None:
    A, y, g = drawn()
    fit = eq.LeastSquares(A, y.detach())
    mine = eq.Problem(eq.SoftThreshold(weight), smooth=fit)
    theirs = eq.Problem(DeepinvPrior(Absolute(), weight, exact=True), smooth=fit)
    z = eq.minimize(mine, solver=eq.Auto(rtol=1e-12)).value
    torch.testing.assert_close(eq.minimize(theirs, solver=eq.Auto(rtol=1e-12)).value, z)
    torch.testing.assert_close(theirs.objective(z), mine.objective(z))
    for point in (z, g, torch.relu(g)):
        a, b = theirs.minimal_subgradient(point), mine.minimal_subgradient(point)
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    proven = eq.certify(theirs, z=z + 1e-3 * g)
    assert not proven.rigorous
    assert bool(((1e-3 * g).norm(dim=1) <= proven.error_bound).all())
    assert bool(proven.error_bound.isfinite().all())
    unknown = eq.certify(eq.Problem(DeepinvPrior(Absolute(), weight), smooth=fit), z=z)
    assert bool(unknown.error_bound.isinf().all())


def test_a_prox_that_does_not_fit_is_refuted() -> None:
    A, y, _ = drawn()
    wrong = Absolute()
    wrong.prox = types.MethodType(Ridge.prox, wrong)  # type: ignore[method-assign]
    problem = eq.Problem(DeepinvPrior(wrong, exact=True), smooth=eq.LeastSquares(A, y.detach()))
    assert "REFUTED" in str(eq.certify(problem, z=torch.ones(3, 5).double()))
    implicit = Absolute()
    implicit.explicit_prior = False  # type: ignore[misc]
    with pytest.raises(TypeError, match="explicit_prior=True"):
        DeepinvPrior(implicit)


# --- deepinv itself, where it is installed ------------------------------------------------------


@pytest.mark.parametrize("name", ["PGD", "GD", "ADMM", "DRS"])
def test_against_deepinv(name: str) -> None:
    A, y, w = drawn()
    physics = dinv.physics.LinearPhysics(A=lambda x: x @ A.T, A_adjoint=lambda v: v @ A)
    physics.prox_l2 = lambda z, v, gamma, **k: (
        torch.linalg.solve(torch.eye(5).double() + gamma * A.T @ A, (z + gamma * v @ A).mT).mT
    )
    deq = dinv.optim.DEQConfig(max_iter_backward=500) if name in ("PGD", "GD") else None
    own = getattr(dinv.optim, name)(
        data_fidelity=dinv.optim.L2(), prior=dinv.optim.Tikhonov(), lambda_reg=0.3, stepsize=0.4,
        max_iter=500, thres_conv=1e-13, unfold=deq is None, DEQ=deq, trainable_params=["lambda"],
    ).double()  # fmt: skip
    mine = from_deepinv(copy.deepcopy(own), solver=TIGHT)
    x, theirs = (model(y, physics) for model in (mine, own))
    exact = ridge_oracle(A, y, torch.tensor(0.3).double())
    torch.testing.assert_close(x, exact, atol=1e-5, rtol=0)
    found, expected = (
        torch.autograd.grad((t * w).sum(), [next(model.parameters()), y])
        for t, model in ((x, mine), (theirs, own))
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_priors_of_deepinv() -> None:
    A, y, _ = drawn()
    for prior, ours in [
        (dinv.optim.L1Prior(), eq.SoftThreshold(0.2)),
        (dinv.optim.L12Prior(l2_axis=1), eq.GroupSoftThreshold(0.2)),
    ]:
        answers = [
            eq.minimize(eq.Problem(f, smooth=eq.LeastSquares(A, y.detach()))).value
            for f in (DeepinvPrior(prior, 0.2), ours)
        ]
        torch.testing.assert_close(*answers, atol=1e-4, rtol=0)
