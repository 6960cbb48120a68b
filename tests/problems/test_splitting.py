"""Splittings against cvxpy and dense algebra, their gradients against finite differences."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor, nn
from torch.autograd import gradcheck

import equilibria as eq
from equilibria.certify import GapCertificate, Guarantee
from equilibria.engine.result import ConvergenceWarning
from equilibria.problems import DifferenceOperator
from equilibria.problems.splitting import SplittingOfSum
from tests.optional import optional
from tests.problems.test_operators import randn

cp = optional("cvxpy")

A, X = randn(7, 5, seed=1), randn(2, 7, seed=2)
D = torch.diff(torch.eye(5, dtype=torch.float64), dim=0)
TIGHT: dict[str, Any] = {"rtol": 1e-10, "max_steps": 20000, "patience": 20000}


def fit() -> eq.LeastSquares:
    return eq.LeastSquares(A, X)


def _squares(z: Any, x: np.ndarray) -> Any:
    return 0.5 * cp.sum_squares(A.numpy() @ z - x)


Modeled = Callable[[Any, np.ndarray], tuple[Any, list[Any]]]
CASES: dict[str, tuple[Callable[[], eq.Composite], Modeled]] = {
    "lasso": (
        lambda: eq.Composite(eq.SoftThreshold(0.5), [], fit()),
        lambda z, x: (_squares(z, x) + 0.5 * cp.norm1(z), []),
    ),
    "box": (  # constrained least squares
        lambda: eq.Composite(eq.Box(0.0, 0.3), [], fit()),
        lambda z, x: (_squares(z, x), [z >= 0, z <= 0.3]),
    ),
    "fused": (  # two terms and a constraint
        lambda: eq.Composite(
            eq.NonNegative(), [(eq.SoftThreshold(0.4), D), (eq.SoftThreshold(0.2), None)], fit()
        ),
        lambda z, x: (_squares(z, x) + 0.4 * cp.norm1(D.numpy() @ z) + 0.2 * cp.norm1(z), [z >= 0]),
    ),
    "pursuit": (  # basis pursuit: no smooth part
        lambda: eq.Composite(eq.SoftThreshold(1.0), [(eq.Box(X[:, :2], X[:, :2]), A[:2])]),
        lambda z, x: (cp.norm1(z), [A[:2].numpy() @ z == x[:2]]),
    ),
    "two sets": (
        lambda: eq.Composite(
            eq.Simplex(), [(eq.HalfSpace(A[:1], -0.1), None)], eq.LeastSquares(None, X[:, :5])
        ),
        lambda z, x: (
            0.5 * cp.sum_squares(z - x[:5]),
            [z >= 0, cp.sum(z) == 1, z @ A[0].numpy() <= -0.1],
        ),
    ),
}


def wanted(name: str) -> np.ndarray:
    rows = []
    for x in X.numpy():
        z = cp.Variable(5)
        cost, constraints = CASES[name][1](z, x)
        tight = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}
        cp.Problem(cp.Minimize(cost), constraints).solve(solver=cp.CLARABEL, **tight)
        rows.append(z.value)
    return np.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_the_minimizer_is_cvxpys(name: str) -> None:
    want = wanted(name)
    solvers: list[SplittingOfSum] = [eq.ADMM(), eq.ChambollePock()]
    if name in ("lasso", "box"):
        solvers.append(eq.DouglasRachford())
    for solver in solvers:
        found = eq.minimize(CASES[name][0](), solver=solver)
        assert found.result.tolist() == [0, 0], solver
        np.testing.assert_allclose(found.value.numpy(), want, atol=2e-5, err_msg=str(solver))


@pytest.mark.parametrize("solver", [eq.ADMM(), eq.ChambollePock()])
def test_equations_with_many_solutions_in_float32(solver: SplittingOfSum) -> None:
    """K'K is singular; rounded to float32 its zero eigenvalues are not zero."""
    K = np.random.default_rng(0).normal(size=(2, 4))
    at = torch.tensor([[0.3, -1.2]])
    problem = eq.Composite(eq.Free(), [(eq.Box(at, at), torch.tensor(K).float())])
    found = eq.minimize(problem, torch.zeros(1, 4), solver=solver)
    assert bool(found.converged.all())
    nearest = np.linalg.lstsq(K, at[0].numpy(), rcond=None)[0]  # to the start
    np.testing.assert_allclose(found.value[0].numpy(), nearest, atol=1e-5)


@pytest.mark.parametrize("solver", [eq.ADMM(), eq.ChambollePock()])
def test_an_operator_that_is_zero(solver: SplittingOfSum) -> None:
    terms = [(eq.SoftThreshold(1.0), torch.zeros(2, 5).double())]
    fit = eq.LeastSquares(None, X[:, :5])
    found = eq.minimize(eq.Composite(eq.Free(), terms, fit), solver=solver)
    torch.testing.assert_close(found.value, X[:, :5])


@pytest.mark.parametrize("solver", [eq.DouglasRachford(), eq.ADMM(), eq.ChambollePock()])
def test_a_point_where_sets_meet_has_converged(solver: SplittingOfSum) -> None:
    """The duals are 0 there, and what is left of them is rounding."""
    problem = eq.Composite(eq.Simplex(), [(eq.HalfSpace(A[:1], -0.1), None)])
    found = eq.minimize(problem, randn(30, 5, seed=3), solver=solver)
    assert bool(found.converged.all())
    z = found.value
    torch.testing.assert_close(z.sum(1), torch.ones(30).double())
    assert bool((z >= 0).all())
    assert bool((z @ A[0] <= -0.1 + 1e-7).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_duals_that_are_small_beside_their_images_tell_a_minimum(dtype: torch.dtype) -> None:
    """``min |z|_1`` with ``|1000 z_1 + 2000 z_2 - 3e5| <= 15000``: the dual is 1/2000."""
    at, A = torch.tensor([[3e5]], dtype=dtype), torch.tensor([[1000.0, 2000.0]], dtype=dtype)
    problem = eq.Composite(eq.SoftThreshold(1.0), [(eq.Box(at - 15e3, at + 15e3), A)])
    found = eq.minimize(problem, torch.zeros(1, 2, dtype=dtype))
    assert found.converged.all()
    wanted = torch.tensor([[0.0, 142.5]], dtype=dtype)
    torch.testing.assert_close(found.value, wanted, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_transport_takes_hundreds_of_steps(seed: int) -> None:
    """Most singular values of the sums are far below the largest, and most long steps go wrong."""
    source = np.random.default_rng(seed)
    cost, a, b = source.random(12), source.random(3) + 0.1, source.random(4) + 0.1
    sums = np.vstack([np.kron(np.eye(3), np.ones((1, 4))), np.kron(np.ones((1, 3)), np.eye(4))])
    masses = np.concatenate([a / a.sum(), b / b.sum()])
    wanted = linprog(cost, A_eq=sums, b_eq=masses).x
    masses = torch.from_numpy(masses)[None]
    prior = eq.ShiftedNonNegative(torch.from_numpy(cost)[None])
    problem = eq.Composite(prior, [(eq.Box(masses, masses), torch.from_numpy(sums))])
    found = eq.minimize(problem, torch.zeros(1, 12, dtype=torch.float64), throw=True)
    np.testing.assert_allclose(found.value[0].numpy(), wanted, atol=1e-6)
    assert int(found.stats.steps) < 500


@pytest.mark.parametrize(
    "solver",
    [eq.ADMM(**TIGHT), eq.DouglasRachford(**TIGHT), eq.ChambollePock(**TIGHT)],
    ids=lambda s: type(s).__name__,
)
def test_gradients_in_weight_data_and_operator(solver: SplittingOfSum) -> None:
    level = torch.tensor(0.4, dtype=torch.float64)

    def solved(a: Tensor, x: Tensor, level: Tensor) -> Tensor:
        smooth = eq.LeastSquares(a, x)
        problem = eq.Composite(eq.SoftThreshold(level), [], smooth)
        if not isinstance(solver, eq.DouglasRachford):
            problem = eq.Composite(eq.NonNegative(), [(eq.SoftThreshold(level), a[:3])], smooth)
        value: Tensor = eq.minimize(problem, solver=solver).value
        return value

    inputs = [t.clone().requires_grad_() for t in (A, X, level)]
    assert gradcheck(solved, inputs, atol=1e-5, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize(
    "solver", [eq.ADMM(**TIGHT), eq.ChambollePock(**TIGHT)], ids=["admm", "cp"]
)
@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_a_sample_with_nan_leaves_the_gradients_of_the_others(solver: SplittingOfSum) -> None:
    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        a, k = A.clone().requires_grad_(), D.clone().requires_grad_()
        problem = eq.Composite(eq.Free(), [(eq.SoftThreshold(0.4), k)], eq.LeastSquares(a, x))
        value = eq.minimize(problem, solver=solver).value
        return torch.autograd.grad(value[0].square().sum(), (a, k))

    spoiled = X.clone()
    spoiled[1, 2] = torch.nan
    for found, alone in zip(gradients(spoiled), gradients(X[:1]), strict=True):
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "solver", [eq.ADMM(**TIGHT), eq.ChambollePock(**TIGHT)], ids=["admm", "cp"]
)
@pytest.mark.parametrize("scale", [1e-30, 1e15, 1e25])
def test_an_objective_in_other_units_has_the_same_minimizer(
    solver: SplittingOfSum, scale: float
) -> None:
    """With A, x in one unit and the weight in its square: L is 1e-60 to 1e50."""

    def solved(s: float) -> Tensor:
        fits = eq.LeastSquares(s * A, s * X)
        problem = eq.Composite(eq.NonNegative(), [(eq.SoftThreshold(0.4 * s * s), D)], fits)
        solution = eq.minimize(problem, solver=solver)
        assert bool(solution.converged.all())
        return solution.value

    torch.testing.assert_close(solved(scale), solved(1.0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-10, 1e4])
def test_an_operator_in_other_units_has_the_same_minimizer(scale: float) -> None:
    """Beside Kz or z, whichever is larger, the other does not count in the norm of the state."""
    terms = [(eq.SoftThreshold(0.4 / scale), scale * D), (eq.SoftThreshold(0.2), None)]
    want = torch.from_numpy(wanted("fused"))
    for solver in (eq.ADMM(), eq.ChambollePock()):
        found = eq.minimize(eq.Composite(eq.NonNegative(), terms, fit()), solver=solver)
        assert found.result.tolist() == [0, 0]
        torch.testing.assert_close(found.value, want, rtol=0, atol=2e-5)

    def inverse(rhs: Tensor, rho: float) -> Tensor:
        gram = A.mT @ A + rho * (scale**2 * D.mT @ D + 2.0 * torch.eye(5, dtype=A.dtype))
        return torch.linalg.solve(gram, rhs.mT).mT

    # With an inverse of the user's there is one rho for all terms.
    with pytest.warns(ConvergenceWarning):
        found = eq.minimize(eq.Composite(eq.NonNegative(), terms, fit(), inverse=inverse))
    off = (found.value - want).abs().amax(1)
    assert bool(((off < 2e-5) | ~found.converged).all())


@pytest.mark.parametrize("solver", [eq.ADMM(), eq.ChambollePock()], ids=["admm", "cp"])
@pytest.mark.parametrize("scale", [1e6, 1e200])
def test_without_a_smooth_part_nothing_is_called_converged_that_is_not(
    solver: SplittingOfSum, scale: float
) -> None:
    """The default steps do not know that z is ``scale`` times a subgradient."""
    b = scale * X[:, :2]
    problem = eq.Composite(eq.SoftThreshold(1e-3), [(eq.Box(b, b), A[:2])])
    with pytest.warns(ConvergenceWarning):
        found = eq.minimize(problem, solver=solver)
    off = (found.value / scale - torch.from_numpy(wanted("pursuit"))).abs().amax(1)
    assert bool((off > 1e-2).any())
    assert bool(((off < 1e-5) | ~found.converged).all())


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 2.0))
def test_the_bound_of_a_certificate_holds(seed: int, level: float) -> None:
    """Of an answer that is off: in distance and in value, against a solve to twelve digits."""
    x, w = randn(2, 4, seed=seed), randn(3, 4, seed=seed + 1)
    problem = eq.Composite(eq.Free(), [(eq.SoftThreshold(level), w)], eq.LeastSquares(None, x))
    best = eq.minimize(problem, solver=eq.ADMM(rtol=1e-13, max_steps=20000)).value
    z = best + 10.0 ** -(seed % 5) * randn(2, 4, seed=seed + 2)
    found = eq.certify(problem, z=z)
    assert isinstance(found, GapCertificate)
    assert found.unique
    assert not found.rigorous
    far = (z - best).norm(dim=1)
    assert bool((far <= found.error_bound * (1 + 1e-6)).all())
    assert bool((problem.objective(z) - problem.objective(best) <= found.value_bound + 1e-12).all())


def test_a_bound_is_as_close_in_units_beyond_those_of_float32() -> None:
    def bound(unit: float) -> Tensor:
        fit = eq.LeastSquares(None, X[:, :5], unit)
        problem = eq.Composite(eq.Free(), [(eq.SoftThreshold(0.3 * unit), D)], fit)
        return eq.certify(problem, z=eq.TotalVariation(0.3).prox(X[:, :5])).error_bound

    torch.testing.assert_close(bound(1e60), bound(1.0), rtol=1.0, atol=1e-5)


def test_a_bound_contains_the_rounding_of_an_answer_that_is_as_good_as_exact() -> None:
    """Against fractions: where the computed residual is 0, the answer still has its rounding."""
    rows = np.random.default_rng(0)
    for _ in range(40):
        a, b, c, d = (int(t) for t in rows.integers(1, 50, 4))
        if a * d == b * c:
            continue
        x = [Fraction(float(t)) for t in rows.standard_normal(2)]
        det = a * d - b * c
        exact = [(d * x[0] - b * x[1]) / det, (a * x[1] - c * x[0]) / det]
        matrix = torch.tensor([[a, b], [c, d]], dtype=torch.float64)
        image = torch.tensor([[float(t) for t in x]], dtype=torch.float64)
        z = torch.tensor([[float(t) for t in exact]], dtype=torch.float64)
        problem = eq.Composite(eq.Free(), [], eq.LeastSquares(matrix, image))
        found = eq.certify(problem, z=z)
        off = sum((Fraction(float(t)) - e) ** 2 for t, e in zip(z[0], exact, strict=True))
        assert math.sqrt(off) <= float(found.error_bound)


def test_what_is_not_proven_is_said() -> None:
    found = eq.certify(CASES["pursuit"][0]())
    assert found.kind is Guarantee.none
    assert bool(found.error_bound.isinf().all())
    assert any("strongly convex" in note for note in found.notes)
    assert any("infinite" in note for note in found.notes)


def test_a_smooth_function_and_a_layer() -> None:
    torch.manual_seed(0)
    layer = eq.nn.EquilibriumLayer(
        lambda x, p: eq.Composite(
            eq.Free(),
            [(eq.GroupSoftThreshold(p.exp(), dim=1), DifferenceOperator())],
            eq.Smooth(
                lambda z, x: (1 + (z - x).square()).sqrt().flatten(1).sum(1), x, bounds=(0, 1)
            ),
        ),
        p=nn.Parameter(torch.tensor(-1.0)),
    )
    x = torch.randn(2, 4, 4)
    found = layer.solve(x)
    assert "ChambollePock" in (found.choice or "")
    found.value.square().sum().backward()
    step = 1e-3
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            layer.p += sign * step
            ends.append(layer.double().solve(x.double()).value.square().sum())
            layer.p -= sign * step
    assert layer.p.grad is not None
    assert float(layer.p.grad) == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=2e-2)


def test_samples_are_independent_and_errors_say_what_to_do() -> None:
    problem = CASES["fused"][0]()
    both = eq.minimize(problem).value
    one = eq.Composite(problem.prior, problem.terms, eq.LeastSquares(A, X[1:]))
    torch.testing.assert_close(eq.minimize(one).value, both[1:], atol=1e-6, rtol=1e-6)
    alone = eq.Composite(eq.Free(), [], eq.LeastSquares(None, X))
    torch.testing.assert_close(eq.minimize(alone).value, X)
    with pytest.raises(TypeError, match="ADMM"):
        problem.stationarity(both)
    with pytest.raises(TypeError, match="no single prox"):
        eq.minimize(problem, solver=eq.Anderson())
    with pytest.raises(TypeError, match="splits a Composite"):
        eq.fixed_point(lambda z: 0.5 * z, both, solver=eq.ADMM())
    with pytest.raises(TypeError, match="sum of two"):
        eq.minimize(problem, solver=eq.DouglasRachford())
    with pytest.raises(ValueError, match="rho"):
        eq.ADMM(rho=-1.0)
    with pytest.raises(ValueError, match="too large"):
        eq.minimize(problem, solver=eq.ChambollePock(tau=100.0))
    smooth = eq.Smooth(lambda z, x: (z - x).cosh().sum(1), X[:, :5])
    with pytest.raises(TypeError, match="quadratic"):
        eq.minimize(eq.Composite(eq.NonNegative(), [], smooth), solver=eq.ADMM())
    with pytest.raises(TypeError, match="give z0"):
        eq.minimize(eq.Composite(eq.NonNegative(), [(eq.Free(), A)]))


def test_an_inverse_that_solves_another_system_is_refused() -> None:
    terms, c = [(eq.SoftThreshold(0.4), A)], X[:, :5]

    def inverse(shift: float, rhs: Tensor, rho: float) -> Tensor:
        matrix = (1.0 + shift * rho) * torch.eye(5).to(A) + rho * A.T @ A
        return torch.linalg.solve(matrix, rhs.mT).mT

    def solved(prior: eq.Prior, **options: Any) -> Tensor:
        problem = eq.Composite(prior, terms, eq.LeastSquares(None, c), **options)
        return eq.minimize(problem, solver=eq.ADMM(rtol=1e-10)).value

    for prior, right in ((eq.NonNegative(), 1.0), (eq.Free(), 0.0)):
        found = solved(prior, inverse=partial(inverse, right))
        torch.testing.assert_close(found, solved(prior), atol=1e-8, rtol=0)
        with pytest.raises(ValueError, match="does not solve"):
            solved(prior, inverse=partial(inverse, 1.0 - right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "solver",
    [
        *(eq.ADMM(rho=rho) for rho in (1e-6, 1e-3, 1e3, 1e5)),
        *(eq.ChambollePock(sigma=sigma) for sigma in (1e-8, 1e-4, 1e3)),
        eq.ChambollePock(tau=1e-5),
        *(eq.DouglasRachford(gamma=gamma) for gamma in (1e-5, 1e-3, 1e4)),
    ],
)
def test_steps_far_from_the_default_call_nothing_converged_that_is_not(
    solver: Any, dtype: torch.dtype
) -> None:
    """Against the optimality conditions of the lasso, coordinate by coordinate, in float64."""
    torch.manual_seed(3)
    A, b = torch.randn(8, 6, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    terms = [] if isinstance(solver, eq.DouglasRachford) else [(eq.SoftThreshold(0.2), None)]
    weight = 0.5 + 0.2 * len(terms)
    problem = eq.Composite(eq.SoftThreshold(0.5), terms, eq.LeastSquares(A, b))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        sol = eq.minimize(problem, solver=solver)
    z, wide, target = sol.value.double(), A.double(), b.double()
    slope = (z @ wide.T - target) @ wide
    tolerance = 1e-4 if dtype == torch.float32 else 1e-8
    still = z.abs() <= tolerance  # two thresholds in turn leave rounding where the answer is 0
    off = torch.where(still, (slope.abs() - weight).clamp_min(0), slope + weight * z.sign())
    right = off.norm(dim=1) <= 500 * tolerance * ((target @ wide).norm(dim=1) + weight)
    assert (right | ~sol.converged).all()
    assert bool(heard) is not bool(sol.converged.all())
    usual = eq.minimize(problem, solver=type(solver)())
    assert usual.converged.all()


@pytest.mark.parametrize("weight", [0.0, 1e-12, 1e-5, 100.0])
@pytest.mark.parametrize("solver", [eq.ADMM(rho=1.0), eq.ChambollePock(tau=0.5, sigma=0.5)])
def test_an_answer_that_little_pulls_at_has_converged(solver: Any, weight: float) -> None:
    """At the minimum both slopes are rounding, of which a long step makes much; or z is, for 0."""
    x = torch.randn(4, 6, dtype=torch.float64)
    problem = eq.Composite(eq.Free(), [(eq.SoftThreshold(weight), None)], eq.LeastSquares(None, x))
    sol = eq.minimize(problem, solver=solver)
    assert sol.converged.all()
    torch.testing.assert_close(sol.value, x.sign() * (x.abs() - weight).clamp_min(0))


def test_a_step_near_the_default_converges_and_throw_raises_far_from_it() -> None:
    torch.manual_seed(3)
    A, b = torch.randn(8, 6), torch.randn(5, 8)
    problem = eq.Composite(eq.SoftThreshold(0.5), [], eq.LeastSquares(A, b))
    assert eq.minimize(problem, solver=eq.ADMM(rho=20.0)).converged.all()
    with pytest.raises(eq.NotConvergedError, match=r"stagnated|step limit"):
        eq.minimize(problem, solver=eq.DouglasRachford(gamma=1e-6), throw=True)
