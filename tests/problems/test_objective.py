"""Any smooth objective: against dense algebra, scipy, cvxpy and finite differences."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize as scipy_minimize
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from equilibria.certify import Guarantee
from equilibria.problems import BoundsWarning, IdentityOperator, JointPrior, ModuleOperator
from equilibria.problems.objective import ritz_ends
from tests.problems.test_operators import randn

N = 5


def squares(z: Tensor, x: Tensor, A: Tensor) -> Tensor:
    return 0.5 * (z @ A.T - x).square().sum(1)


def logistic(z: Tensor, x: Tensor, A: Tensor) -> Tensor:
    """A ridge, and the logistic loss of the labels sign(x)."""
    return torch.nn.functional.softplus(-x.sign() * (z @ A.T)).sum(1) + 0.05 * z.square().sum(1)


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    return randn(8, N, seed=seed), randn(3, 8, seed=seed + 1)


# --- the answer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [None, "given"])
@pytest.mark.parametrize("scale", [1.0, pytest.param(1e6, marks=pytest.mark.slow), 1e-6])
def test_a_function_is_minimized_as_by_scipy(bounds: str | None, scale: float) -> None:
    """Whatever the unit of G: a tolerance is relative to it."""
    A, x = data()
    high = scale * (0.25 * float(torch.linalg.matrix_norm(A, 2)) ** 2 + 0.1)
    problem = eq.Problem(
        eq.NonNegative(),
        smooth=lambda z, x, A: scale * logistic(z, x, A),
        x=x,
        theta=A,
        state=(N,),
        bounds=None if bounds is None else (0.1 * scale, high),
    )
    found = eq.minimize(problem).value
    for row, got in zip(x, found, strict=True):

        def fun(z: np.ndarray, row: Tensor = row) -> tuple[float, np.ndarray]:
            t = torch.tensor(z).unsqueeze(0).requires_grad_()
            value = logistic(t, row.unsqueeze(0), A).sum()
            return float(value.detach()), torch.autograd.grad(value, t)[0][0].numpy()

        want = scipy_minimize(
            fun, np.zeros(N), jac=True, bounds=[(0, None)] * N, tol=1e-12, method="L-BFGS-B"
        )
        np.testing.assert_allclose(got.detach().numpy(), want.x, atol=2e-5)


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        pytest.param(
            lambda z, x: (z.exp() - 500 * x * z).sum(1), lambda x: np.log(500 * x), id="exp"
        ),
        pytest.param(
            lambda z, x: (0.25 * z**4 - 3 * x * z).sum(1), lambda x: np.cbrt(3 * x), id="flat at 0"
        ),
        pytest.param(
            lambda z, x: (0.25 * z**4 - 0.5 * z**2 - x * z).sum(1),
            lambda x: np.vectorize(lambda v: np.roots([1, 0, -1, -v]).real.max())(x),
            id="not convex at 0",
        ),
        pytest.param(
            lambda z, x: (1 + (5 * (z - 9 * x)) ** 2).sqrt().sum(1), lambda x: 9 * x, id="flat"
        ),
    ],
)
def test_functions_whose_curvature_at_the_start_says_little(function: Any, answer: Any) -> None:
    """The step of the estimated bounds would leave for infinity."""
    x = torch.tensor([[0.5, 1.0], [2.0, 1.5]], dtype=torch.float64, requires_grad=True)

    def solved(x: Tensor) -> Tensor:
        tight = eq.Implicit(solver=eq.GMRES(rtol=1e-12))
        found = eq.minimize(eq.Problem(eq.Free(), smooth=function, x=x), adjoint=tight)
        assert found.converged.all()
        return found.value

    np.testing.assert_allclose(solved(x).detach(), answer(x.detach().numpy()), rtol=1e-6)
    assert gradcheck(solved, (x,), eps=1e-3, atol=1e-3)
    torch.testing.assert_close(solved(x)[:1], solved(x[:1]))  # whatever its batch mates need


def test_curvature_of_least_squares_is_that_of_the_maps_at_hand() -> None:
    """Asked on 2 pixels first: z_{i+1} − z_{i−1} has the norm 1 there, and nearly 2 on 40."""
    kernel = torch.tensor([[[[1.0, 0.0, -1.0]]]], dtype=torch.float64)
    small = eq.LeastSquares(kernel, torch.zeros(1, 1, 1, 2, dtype=torch.float64))
    assert small.curvature().upper < 3.1
    large = small.with_inputs(torch.zeros(1, 1, 1, 40, dtype=torch.float64))
    dense = np.eye(40, k=1) - np.eye(40, k=-1)
    assert large.curvature().upper >= np.linalg.norm(dense, 2) ** 2


def test_least_squares_is_dense_algebra() -> None:
    A, x = data()
    problem = eq.Problem(eq.Free(), smooth=eq.LeastSquares(A, x, weight=3.0))
    want = torch.linalg.lstsq(A, x.T).solution.T
    torch.testing.assert_close(eq.minimize(problem).value, want, atol=2e-6, rtol=0)
    low, high = torch.linalg.eigvalsh(3.0 * A.T @ A)[[0, -1]].tolist()
    bounds = problem.curvature()
    assert bounds.rigorous
    assert bounds.lower <= low <= bounds.lower * (1 + 1e-9)
    assert high <= bounds.upper <= high * (1 + 1e-9)


def test_a_copy_with_another_prior_stays_in_its_form() -> None:
    A, x = data()
    problem = eq.Problem(eq.Free(), smooth=eq.LeastSquares(A, x))
    other = dataclasses.replace(problem, prior=eq.SoftThreshold(0.3))
    z = randn(3, N)
    value = 0.5 * (z @ A.T - x).square().sum(1) + 0.3 * z.abs().sum(1)
    torch.testing.assert_close(other.objective(z), value)


@pytest.mark.parametrize("m", [0.05, torch.tensor([0.05, 0.5, 2.0])])
def test_one_end_of_the_bounds_may_differ_by_sample(m: float | Tensor) -> None:
    x = randn(3, N)
    problem = eq.Problem(
        eq.SoftThreshold(0.1), smooth=lambda z, x: (z - x).square().sum(1), x=x, bounds=(m, 2.0)
    )
    want = eq.SoftThreshold(0.05).prox(x)
    torch.testing.assert_close(eq.minimize(problem).value, want, atol=1e-6, rtol=1e-6)


def test_a_sum_over_scales_is_one_problem() -> None:
    """Each coupling behind its own operator: value, gradient, Hessian, bounds, the minimizer."""
    A, x = data()
    K = randn(3, N, seed=4)
    coarse = eq.Linear(0.3 * randn(2, 3, seed=5), randn(3, 3, seed=6)).compose(K)
    q = eq.LeastSquares(A, x) + coarse
    z, v = randn(3, N, seed=7).requires_grad_(), randn(3, N, seed=8)
    (slope,) = torch.autograd.grad(q.value(z).sum(), z)
    torch.testing.assert_close(q.grad(z), slope)
    hessian = torch.func.hessian(lambda t: q.value(t.unsqueeze(0).expand(3, -1))[0])(z[0].detach())
    torch.testing.assert_close(q.hvp(z, v)[0].detach(), hessian @ v[0])
    ends = torch.linalg.eigvalsh(hessian)
    bounds = q.curvature()
    assert bounds.rigorous
    assert bounds.lower <= ends[0]
    assert ends[-1] <= bounds.upper
    problem = eq.Problem(eq.Free(), smooth=q)
    want = -torch.linalg.solve(hessian, q.grad(torch.zeros(3, N).double()).T).T
    torch.testing.assert_close(eq.minimize(problem).value, want, atol=1e-6, rtol=1e-6)
    for part in (problem, problem.in_double()):
        torch.testing.assert_close(part.with_inputs(*part.inputs()).gradient(z), part.gradient(z))


def test_an_upper_bound_of_zero_stays_behind_an_operator_of_unknown_norm() -> None:
    half = ModuleOperator(lambda z: 0.5 * z, lambda z: 0.5 * z, (3000,))
    c = torch.zeros(1, 3000)
    bounds = eq.Linear(IdentityOperator(c), c).compose(half).curvature()  # concave
    assert (bounds.lower, bounds.upper) == (-math.inf, 0.0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
def test_bounds_of_sums_hold(seed: int, rows: int, middle: int) -> None:
    K, W = randn(middle, N, seed=seed), randn(rows, middle, seed=seed + 1)
    q = eq.LeastSquares(W, randn(1, rows, seed=seed + 2), weight=0.7).compose(K)
    q = q + eq.Linear(0.4 * randn(2, N, seed=seed + 3), randn(1, N, seed=seed + 4))
    z = randn(1, N, seed=seed + 5)
    rows_of_hessian = torch.cat([q.hvp(z, e.unsqueeze(0)) for e in torch.eye(N).double()])
    ends = torch.linalg.eigvalsh(0.5 * (rows_of_hessian + rows_of_hessian.T))
    bounds = q.curvature()
    assert bounds.lower - 1e-12 <= float(ends[0])
    assert float(ends[-1]) <= bounds.upper + 1e-12


def test_sums_state_their_rounding_and_how_fast_they_bend() -> None:
    """Against numpy in extended precision, and the third derivative in one dimension."""
    A, x = data()
    W, c, z = randn(4, N, seed=4), randn(3, N, seed=5), randn(3, N)
    q = eq.LeastSquares(A, 1e3 * x) + eq.Linear(W, c)
    wide = [t.numpy().astype(np.longdouble) for t in (A, 1e3 * x, W, c, z)]
    a, b, w, e, point = wide
    exact = (point @ a.T - b) @ a - point @ w.T @ w - e
    error, bound = np.abs(q.grad(z).numpy() - exact), q.rounding_error(z)
    assert bound is not None
    assert (error <= bound.numpy()).all()
    assert float(bound.max()) < 1e-9
    assert eq.certify(eq.Problem(eq.Box(-1.0, 1.0), smooth=q)).rigorous
    single = eq.LeastSquares(A.float(), x.float()) + eq.Linear(W.float(), c.float())
    assert single.in_double().grad(z).dtype == torch.float64
    one, points = torch.ones(1, 1).double(), torch.linspace(-1, 1, 2001).double()[:, None]
    bent = eq.Gaussian(one, torch.zeros_like(points), 0.5).compose(3.0 * one)
    steepest = float(bent.hvp(points, torch.ones_like(points))[:, 0].diff().abs().max()) / 1e-3
    assert steepest <= float(torch.as_tensor(bent.hessian_lipschitz()).max()) <= 1.01 * steepest


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("function", marks=pytest.mark.slow), "parts"])
def test_gradients_in_weight_data_and_operator(kind: str) -> None:
    A, x = data()
    level = torch.tensor(0.4, dtype=torch.float64)

    def solved(A: Tensor, x: Tensor, level: Tensor) -> Tensor:
        prior = eq.SoftThreshold(level)
        if kind == "parts":
            problem = eq.Problem(prior, smooth=eq.LeastSquares(A, x))
        else:
            problem = eq.Problem(
                prior, smooth=squares, x=x, theta=A, state=(N,), bounds=(0.5, 25.0)
            )
        solver = eq.ProximalGradient(rtol=1e-11, max_steps=3000)
        value: Tensor = eq.minimize(problem, solver=solver).value
        return value

    inputs = [t.clone().requires_grad_() for t in (A, x, level)]
    assert gradcheck(solved, inputs, atol=1e-5, rtol=1e-4, fast_mode=True)
    if kind == "function":
        assert gradgradcheck(
            lambda x: solved(A, x, level).square(), inputs[1:2], atol=1e-4, fast_mode=True
        )


def test_a_layer_in_three_lines_trains() -> None:
    torch.manual_seed(0)
    layer = eq.nn.EquilibriumLayer(
        lambda x, A, p: eq.Problem(
            eq.SoftThreshold(p.exp()),
            smooth=lambda z, x, A: 0.5 * (A(z) - x).square().sum(1),
            x=x,
            theta=A,
            state=(6,),
        ),
        A=nn.Linear(6, 4, bias=False),
        p=nn.Parameter(torch.tensor(-2.0)),
    )
    layer(torch.randn(3, 4)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())
    certificate = eq.certify(layer, torch.randn(3, 4))
    assert certificate.kind is Guarantee.none
    assert not certificate.rigorous


# --- certificates -------------------------------------------------------------------------------


def test_parts_prove_and_estimates_do_not() -> None:
    A, x = data()
    want = eq.minimize(
        eq.Problem(eq.SoftThreshold(0.3), smooth=eq.LeastSquares(A, x)),
        solver=eq.ProximalGradient(rtol=1e-14, max_steps=5000),
    ).value
    proven = eq.certify(
        eq.Problem(eq.SoftThreshold(0.3), smooth=eq.LeastSquares(A, x)), z=want + 0.01
    )
    assert proven.rigorous
    assert proven.unique
    off = 0.01 * math.sqrt(N)
    assert bool((proven.error_bound >= off - 1e-6).all())
    assert bool((proven.error_bound < 100 * off).all())

    options: dict[str, Any] = {"smooth": squares, "x": x, "theta": A, "state": (N,)}
    told = eq.certify(eq.Problem(eq.SoftThreshold(0.3), bounds=(0.1, 40.0), **options))
    assert not told.rigorous
    assert told.unique
    assert any("given" in note for note in told.notes)
    guessed = eq.certify(eq.Problem(eq.SoftThreshold(0.3), **options))
    assert not guessed.rigorous
    assert not guessed.unique
    assert bool(guessed.error_bound.isinf().all())
    assert guessed.lipschitz is None
    assert "estimates" in str(guessed)
    assert "proven, in float64" not in str(guessed)


@pytest.mark.parametrize(
    ("bounds", "text"), [((0.1, 2.0), "above L"), ((10.0, 60.0), "below m"), ((0.0, 60.0), None)]
)
def test_wrong_bounds_are_refuted(bounds: tuple[float, float], text: str | None) -> None:
    A, x = data()
    problem = eq.Problem(eq.Free(), smooth=squares, x=x, theta=A, state=(N,), bounds=bounds)
    certificate = eq.certify(problem, z=torch.zeros(3, N).double())
    refuted = [note for note in certificate.notes if note.startswith("REFUTED")]
    assert bool(refuted) == (text is not None)
    if text is not None:
        assert text in refuted[0]
        assert not certificate.unique
        assert not certificate.rigorous
        assert bool(certificate.error_bound.isinf().all())


@pytest.mark.parametrize("scale", [2.0, -0.5])
def test_a_multiple_of_the_identity_is_estimated_right(scale: float) -> None:
    """One product exhausts the Krylov space: no Ritz value but the right one may come of it."""
    q = eq.Smooth(lambda z, x: 0.5 * scale * z.square().sum(1), randn(2, 4))
    for end in ritz_ends(q, randn(2, 4)):
        torch.testing.assert_close(end, torch.full((2,), scale).double())


def test_a_nonconvex_function_that_claims_convexity_is_found() -> None:
    x = randn(2, N)
    problem = eq.Problem(
        eq.Box(-1.0, 1.0),
        smooth=lambda z, x: (z - x).cos().sum(1) + 0.2 * z.square().sum(1),
        x=x,
        bounds=(0.0, 2.0),
    )
    found = eq.certify(problem, z=x)
    assert any("convexity is claimed" in note for note in found.notes)
    assert not found.unique


def test_a_solve_warns_of_wrong_bounds() -> None:
    A, x = data()
    options: dict[str, Any] = {"smooth": squares, "x": x, "theta": A, "state": (N,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        with pytest.warns(BoundsWarning, match="mean curvature"):
            eq.minimize(eq.Problem(eq.Free(), bounds=(0.01, 2.0), **options))
    eq.minimize(eq.Problem(eq.Free(), bounds=(0.1, 60.0), **options))  # no warning


class Doubling(JointPrior):
    """A prox that expands."""

    def value(self, z: Tensor) -> Tensor:
        return z.flatten(1).sum(1) * 0.0

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return 2.0 * v

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        return g


class Mismatched(Doubling):
    """The prox of half of its value."""

    def value(self, z: Tensor) -> Tensor:
        return z.abs().flatten(1).sum(1)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return eq.SoftThreshold(0.5).prox(v, tau)


@pytest.mark.parametrize(("prior", "text"), [(Doubling(), "nonexpansive"), (Mismatched(), "value")])
def test_a_prox_that_is_none_is_found(prior: JointPrior, text: str) -> None:
    x = randn(2, N)
    found = eq.certify(eq.Problem(prior, smooth=eq.LeastSquares(None, x)), z=x)
    assert any(text in note and note.startswith("REFUTED") for note in found.notes)
    assert not found.unique
    assert not found.rigorous


# --- errors -------------------------------------------------------------------------------------


def test_errors_say_what_to_do() -> None:
    x = randn(2, N)
    with pytest.raises(TypeError, match="one of coupling and smooth, got neither"):
        eq.Problem(eq.Free())
    with pytest.raises(TypeError, match="got both"):
        eq.Problem(eq.Free(), eq.LeastSquares(None, x), smooth=eq.LeastSquares(None, x))
    with pytest.raises(TypeError, match="bounds belongs to a smooth function"):
        eq.Problem(eq.Free(), smooth=eq.LeastSquares(None, x), bounds=(0.0, 1.0))
    with pytest.raises(TypeError, match="go with smooth"):
        eq.Problem(eq.Free(), eq.LeastSquares(None, x), x=x)
    with pytest.raises(ValueError, match="one number per sample"):
        eq.minimize(eq.Problem(eq.Free(), smooth=lambda z, x: (z - x).square().sum(), x=x))
    with pytest.raises(ValueError, match=r"shape \(2,\), takes \[B, ...\]"):
        eq.Problem(eq.Free(), smooth=lambda z, x: (z - x) ** 2, x=x[:, 0]).objective(x[:, 0])
    for state in (N, ((2,), (3,))):
        with pytest.raises(TypeError, match="the shape of one tensor"):
            eq.Problem(eq.Free(), smooth=squares, x=x, state=state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="m <= L"):
        eq.Smooth(squares, x, bounds=(2.0, 1.0))
    with pytest.raises(ValueError, match="one positive number"):
        eq.LeastSquares(None, x, weight=0.0)
    for size in (1e-30, 1e30):  # its square is 0 or infinite, and so was the step
        steep = eq.LeastSquares(size * torch.eye(x.shape[1]), x.float())
        with pytest.raises(ValueError, match=r"\|A\|² is beyond float32"):
            eq.minimize(eq.Problem(eq.Free(), smooth=steep))


def test_bad_samples_harm_no_other_and_finished_ones_are_dropped() -> None:
    A, x = data()
    x[1] = math.nan
    problem = eq.Problem(eq.SoftThreshold(0.3), smooth=squares, x=x, theta=A, state=(N,))
    solver = eq.Auto(compact=True, max_steps=500)
    with pytest.warns(eq.ConvergenceWarning):
        found = eq.minimize(problem, solver=solver)
    alone = eq.Problem(eq.SoftThreshold(0.3), smooth=squares, x=x[2:], theta=A, state=(N,))
    torch.testing.assert_close(found.value[2:], eq.minimize(alone).value, atol=1e-6, rtol=1e-6)
    assert found.result.tolist()[0] == found.result.tolist()[2] == 0


@pytest.mark.parametrize("bad", [float("nan"), 1e4], ids=["nan", "overflow"])
@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_bounds_are_estimated_beside_a_bad_sample(bad: float) -> None:
    def smooth(z: Tensor, x: Tensor) -> Tensor:
        return (z - x).cosh().sum(1)

    x = randn(3, 4, seed=21)
    spoiled = x.clone()
    spoiled[1, 2] = bad
    solved = [eq.minimize(eq.Problem(eq.NonNegative(), smooth=smooth, x=t)) for t in (x, spoiled)]
    assert solved[1].result.tolist() == [0, int(eq.Result.nonfinite), 0]
    torch.testing.assert_close(solved[1].value[::2], x[::2].relu(), atol=1e-6, rtol=0)
    torch.testing.assert_close(solved[1].value[::2], solved[0].value[::2])
