"""minimize: any solver finds the minimizer that scipy finds, with right gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize as scipy_minimize
from torch import Tensor

import equilibria as eq

SOLVERS = {
    "auto": eq.Auto(rtol=1e-11, max_steps=3000),
    "anderson": eq.Anderson(rtol=1e-11, max_steps=500),
    "broyden": eq.Broyden(rtol=1e-11, max_steps=500),
    "fista": eq.ProximalGradient(rtol=1e-11, max_steps=3000),
    "plain": eq.ProximalGradient(accelerate=False, rtol=1e-11, max_steps=3000),
    "compact": eq.ProximalGradient(rtol=1e-11, max_steps=3000, compact=True),
}


def draw(mu: float, seed: int = 0, rows: int = 12, columns: int = 6) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, dtype=torch.float64, generator=source)
    weight = mu * weight / torch.linalg.matrix_norm(weight, 2)
    return weight, torch.randn(5, rows, dtype=torch.float64, generator=source)


def oracle(weight: Tensor, c: np.ndarray, gamma: float) -> np.ndarray:
    """argmin over z ≥ 0 of ½‖z‖² − (1/2γ)exp(−γ‖c − Wz‖²), by L-BFGS-B on numpy."""
    w = weight.numpy()

    def value(z: np.ndarray) -> tuple[float, np.ndarray]:
        r = c - w @ z
        e = np.exp(-gamma * r @ r)
        return 0.5 * z @ z - e / (2 * gamma), z - e * (w.T @ r)

    found = scipy_minimize(
        value,
        np.zeros(w.shape[1]),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * w.shape[1],
        options={"ftol": 1e-16, "gtol": 1e-11, "maxiter": 5000},
    )
    return np.asarray(found.x)


@pytest.mark.parametrize("mu", [0.4, 0.95, 1.4])
@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_finds_the_minimizer(name: str, mu: float) -> None:
    weight, c = draw(mu)
    problem = eq.Problem(eq.NonNegative(), eq.Gaussian(weight, c, gamma=0.02))
    sol = eq.minimize(problem, solver=SOLVERS[name])
    assert sol.converged.all()
    assert sol.choice
    wanted = np.stack([oracle(weight, row, 0.02) for row in c.numpy()])
    np.testing.assert_allclose(sol.value, wanted, atol=1e-6)
    assert float((problem.step(sol.value) - sol.value).abs().max()) < 1e-8


def test_answers_lie_in_the_domain() -> None:
    """Anderson extrapolates: without a projection G would be infinite at some answers."""
    weight, c = draw(0.95, seed=3)
    problem = eq.Problem(eq.NonNegative(), eq.Gaussian(weight, 5 * c, gamma=0.001))
    for seed in range(5):
        start = torch.randn(
            5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        sol = eq.minimize(problem, start, solver=eq.Anderson(rtol=1e-3))
        assert (sol.value >= 0).all()
        assert torch.isfinite(problem.objective(sol.value)).all()


@pytest.mark.parametrize("name", ["anderson", "fista", "plain"])
def test_gradients_to_the_input_and_the_weight(name: str) -> None:
    weight, c = draw(0.9, rows=6, columns=3)
    tight = SOLVERS[name]
    adjoint = eq.Implicit(solver=eq.GMRES(rtol=1e-12))

    def layer(weight: Tensor, c: Tensor) -> Tensor:
        problem = eq.Problem(eq.Tanh(), eq.Gaussian(weight, c, gamma=0.05))
        return eq.minimize(problem, solver=tight, adjoint=adjoint).value

    given = (weight.requires_grad_(), c[:2].clone().requires_grad_())
    assert torch.autograd.gradcheck(layer, given, atol=1e-6, fast_mode=True)


def test_compaction_of_a_problem_with_steps_of_its_own() -> None:
    """A step τ per sample (from bounds per sample) follows its sample out of the batch."""
    weight, c = draw(0.5)
    c = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    c = c * torch.logspace(-2, 0, 6, dtype=torch.float64).view(-1, 1)
    problem = eq.Problem(eq.Free(), eq.Sigmoidal(weight, c))
    plain = eq.minimize(problem, solver=eq.ProximalGradient(rtol=1e-10, block=1))
    compact = eq.minimize(problem, solver=eq.ProximalGradient(rtol=1e-10, block=1, compact=True))
    assert plain.stats.steps.tolist() == compact.stats.steps.tolist()
    torch.testing.assert_close(plain.value, compact.value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("solver", [eq.Anderson(rtol=1e-2), eq.Broyden(rtol=1e-2)], ids=["a", "b"])
def test_the_residual_at_the_value_is_bounded_by_the_one_stated(solver: eq.Anderson) -> None:
    """The value is the last iterate moved into z ≥ 0; T contracts with the factor 0.8² here."""
    for seed in range(10):
        weight, c = draw(0.8, seed)
        problem = eq.Problem(eq.NonNegative(), eq.Gaussian(weight, c, gamma=0.1))
        found = eq.minimize(problem, solver=solver)
        residual = (problem.step(found.value) - found.value).norm(dim=1)
        assert (residual <= 1.64 * found.stats.residual + 1e-12).all()


def test_vmap_over_weights_whose_norm_is_needed_says_what_to_do() -> None:
    torch.manual_seed(0)
    weights, c = 0.3 * torch.randn(2, 4, 4, dtype=torch.float64), torch.ones(3, 4).double()

    def solve(W: Tensor, **options: Any) -> Tensor:
        return eq.minimize(eq.Problem(eq.NonNegative(), eq.Linear(W, c)), **options).value

    with pytest.raises(RuntimeError, match=r"each level of torch.vmap.*solver=Anderson\(\)"):
        torch.vmap(solve)(weights)
    found = torch.vmap(partial(solve, solver=eq.Anderson(rtol=1e-12)))(weights)
    wanted = torch.stack([solve(W, solver=eq.Anderson(rtol=1e-12)) for W in weights])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["sigmoid", "estimated"])
def test_transforms_where_bounds_differ_from_sample_to_sample(kind: str) -> None:
    torch.manual_seed(0)
    W, c = 0.3 * torch.randn(2, 4, dtype=torch.float64), 0.3 * torch.randn(2, 3, 4).double()

    def fit(z: Tensor, x: Tensor) -> Tensor:
        return (z - x).square().sum(1) + 0.1 * z.cos().sum(1)

    def solve(c: Tensor) -> Tensor:
        own = {"coupling": eq.Sigmoidal(W, c)} if kind == "sigmoid" else {"smooth": fit, "x": c}
        return eq.minimize(eq.Problem(eq.NonNegative(), **own)).value

    alone = torch.stack([solve(x) for x in c])
    torch.testing.assert_close(torch.vmap(solve)(c), alone, rtol=1e-7, atol=1e-9)
    wanted = torch.autograd.functional.jacobian(solve, c[0])
    torch.testing.assert_close(torch.func.jacfwd(solve)(c[0]), wanted, rtol=1e-6, atol=1e-8)
