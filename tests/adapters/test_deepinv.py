"""deepinv's algorithms and priors on our engine; where deepinv is missing, objects like its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.adapters import DeepinvFixedPoint, DeepinvPrior, from_deepinv
from tests.optional import optional

dinv: Any = optional("deepinv")
TIGHT = eq.Anderson(rtol=1e-12, max_steps=2000)


class Like(nn.Module):
    """A prior as deepinv's: the ridge, or the sum of absolute values; its prox may be wrong."""

    def __init__(self, value: str, prox: str = "", explicit: bool = True) -> None:
        super().__init__()
        self.value, self.method, self.explicit_prior = value, prox or value, explicit

    def fn(self, x: Tensor, *args: Any) -> Tensor:
        return (0.5 * x.square() if self.value == "ridge" else x.abs()).flatten(1).sum(1)

    def prox(self, x: Tensor, *args: Any, gamma: Any = 1.0) -> Tensor:
        if self.method == "ridge":
            return x / (1 + gamma)
        return x.sign() * torch.relu(x.abs() - gamma)


class Algorithm(nn.Module):
    """What the adapter reads of an algorithm: proximal gradient, or ADMM with its dual."""

    def __init__(self, prior: nn.Module, dual: bool = False) -> None:
        super().__init__()
        start = {"lambda": 0.3, "stepsize": 0.4}.items()
        made = {k: nn.Parameter(torch.tensor(v).double()) for k, v in start}
        self.params_algo, own = nn.ParameterDict(made), nn.Module()
        self.fixed_point: Any = own
        own.iterator, own.max_iter, own.dual = nn.Module(), 5, dual  # type: ignore[assignment]
        own.iterator.forward, own.iterator.cost_fn = self.iterate, None  # type: ignore[assignment]
        own.update_data_fidelity_fn, own.update_prior_fn = None, lambda k: prior
        own.update_params_fn = lambda k: self.params_algo
        own.init_iterate_fn = lambda y, A, init, cost_fn: {
            "est": (y @ A if init is None else init,)
        }
        own.init_metrics_fn = lambda X, x_gt: []
        own.update_metrics_fn = lambda metrics, before, after, x_gt: metrics.append(
            float((after["est"][0] - before["est"][0]).norm())
        )
        self.dual = dual

    def iterate(self, X: Any, fit: Any, prior: Any, params: Any, y: Tensor, A: Tensor) -> Any:
        x, z = X["est"] if len(X["est"]) == 2 else (X["est"][0], torch.zeros_like(X["est"][0]))
        step, weight = params["stepsize"], params["lambda"]
        if not self.dual:
            z = x - step * (x @ A.T - y) @ A
            return {"est": (prior.prox(z, None, gamma=weight * step), z)}
        u = proximal(A, x - z, y, step)
        x = prior.prox(u + z, None, gamma=weight * step)
        return {"est": (x, z + u - x)}

    def forward(self, y: Tensor, A: Tensor, **options: Any) -> Any:
        X, metrics = self.fixed_point(y, A, **options)
        return (X["est"][0], metrics) if metrics else X["est"][0]


def proximal(A: Tensor, x: Tensor, y: Tensor, step: Any) -> Tensor:
    """The prox of step ½‖Ax − y‖²."""
    matrix = torch.eye(A.shape[1]).to(A) + step * A.T @ A
    return torch.linalg.solve(matrix, (x + step * y @ A).mT).mT


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    A = 0.5 * torch.randn(7, 5).double()
    return A, torch.randn(3, 7).double().requires_grad_(), torch.randn(3, 5).double()


@pytest.mark.parametrize("dual", [False, True])
def test_gradients_of_an_algorithm_are_those_of_the_minimizer(dual: bool) -> None:
    A, y, w = drawn()
    model = from_deepinv(Algorithm(Like("ridge"), dual), solver=TIGHT)
    weight, step = model.params_algo["lambda"], model.params_algo["stepsize"]
    with eq.nn.observe(model) as seen:
        x = model(y, A)
    assert bool(seen.solutions["fixed_point"][0].converged.all())
    exact = proximal(A, torch.zeros(1).double(), y, 1.0 / weight)
    torch.testing.assert_close(x, exact, atol=1e-9, rtol=0)
    found = torch.autograd.grad((x * w).sum(), [weight, y, step])
    expected = torch.autograd.grad((exact * w).sum(), [weight, y])
    for a, b in zip(found, (*expected, torch.zeros(()).double()), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_metrics_starts_and_what_is_refused() -> None:
    A, y, _ = drawn()
    model = from_deepinv(Algorithm(Like("absolute")), solver=TIGHT, adjoint=eq.Unrolled())
    x, metrics = model(y, A, init=torch.ones(3, 5).double(), compute_metrics=True)
    assert x.requires_grad
    assert metrics[-1] < 1e-9 < metrics[0]
    for take in (from_deepinv, DeepinvFixedPoint):
        with pytest.raises(TypeError, match="got a Like, takes a FixedPoint"):
            take(Like("ridge"))
    with pytest.raises(TypeError, match="explicit_prior=True"):
        DeepinvPrior(Like("ridge", explicit=False))


@pytest.mark.parametrize("weight", [0.3, torch.tensor([0.3, 0.1, 0.6])])
def test_a_prior_of_theirs_is_one_of_ours(weight: Any) -> None:
    A, y, g = drawn()
    fit = eq.LeastSquares(A, y.detach())
    mine = eq.Problem(eq.SoftThreshold(weight), smooth=fit)
    theirs = eq.Problem(DeepinvPrior(Like("absolute"), weight, exact=True), smooth=fit)
    z = eq.minimize(mine, solver=eq.Auto(rtol=1e-12)).value
    torch.testing.assert_close(eq.minimize(theirs, solver=eq.Auto(rtol=1e-12)).value, z)
    torch.testing.assert_close(theirs.objective(z), mine.objective(z))
    for point in (z, g, torch.relu(g)):
        a, b = theirs.minimal_subgradient(point), mine.minimal_subgradient(point)
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    known = eq.certify(theirs, z=z + 1e-3 * g)
    assert not known.rigorous
    assert bool(((1e-3 * g).norm(dim=1) <= known.error_bound).all())
    for prior in (
        DeepinvPrior(Like("absolute")),
        DeepinvPrior(Like("absolute", "ridge"), exact=True),
    ):
        unknown = eq.certify(eq.Problem(prior, smooth=fit), z=z)
        assert bool(unknown.error_bound.isinf().all())
        assert ("REFUTED" in str(unknown)) == prior.exact


@pytest.mark.parametrize("name", ["PGD", "GD", "ADMM", "DRS"])
def test_against_deepinv(name: str) -> None:
    """Where it is installed."""
    A, y, w = drawn()
    physics = dinv.physics.LinearPhysics(A=lambda x: x @ A.T, A_adjoint=lambda v: v @ A)
    physics.prox_l2 = lambda z, v, gamma, **k: proximal(A, z, v, gamma)
    deq = dinv.optim.DEQConfig(max_iter_backward=500) if name in ("PGD", "GD") else None
    own = getattr(dinv.optim, name)(
        data_fidelity=dinv.optim.L2(), prior=dinv.optim.Tikhonov(), lambda_reg=0.3, stepsize=0.4,
        max_iter=500, thres_conv=1e-13, unfold=deq is None, DEQ=deq, trainable_params=["lambda"],
    ).double()  # fmt: skip
    mine = from_deepinv(copy.deepcopy(own), solver=TIGHT)
    x, theirs = (model(y, physics) for model in (mine, own))
    torch.testing.assert_close(x, proximal(A, torch.zeros(1).to(A), y, 1 / 0.3), atol=1e-5, rtol=0)
    found, expected = (
        torch.autograd.grad((t * w).sum(), [next(model.parameters()), y])
        for t, model in ((x, mine), (theirs, own))
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    problems = [
        eq.Problem(f, smooth=eq.LeastSquares(A, y.detach()))
        for f in (DeepinvPrior(dinv.optim.L12Prior(l2_axis=1), 0.2), eq.GroupSoftThreshold(0.2))
    ]
    torch.testing.assert_close(*(eq.minimize(q).value for q in problems), atol=1e-4, rtol=0)
