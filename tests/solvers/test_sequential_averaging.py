"""SequentialAveraging: Eq 11 step by step, Theorem 5's limit, and the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria import HSIC, L1, Decorrelation, FeatureIncay, SquaredNorm
from equilibria.solvers import SequentialAveraging
from tests.contracts import problems
from tests.contracts.solver_contract import SolverContract
from tests.optional import optional

cp = optional("cvxpy")


class TestSequentialAveragingAsASolver(SolverContract):
    """With R = ½·1e-14‖z‖² the averaging is there at every step but its bias, about β_k = 5e-15,
    lies below every tolerance of the contract. With R = ½‖z‖² the residual of z_k is about
    β_k/2 ≥ 0.03 after 10⁴ steps, by design: no test that asks for convergence could pass.
    """

    accelerated = False

    def solver(self, **options: Any) -> SequentialAveraging:
        return SequentialAveraging(
            regularizer=SquaredNorm(1e-14), **{"rtol": None, "max_steps": 100, **options}
        )


# ---------------------------------------------------------------------- Eq 11


class Toward:
    """R(z) = ½‖M(z − target)‖² for each sample, as anything with a gradient may be given."""

    def __init__(self, target: Tensor, matrix: Tensor | None = None) -> None:
        self.target = target
        eye = torch.eye(target.shape[-1], dtype=target.dtype)
        self.gram = eye if matrix is None else matrix.mT @ matrix

    def grad(self, z: Tensor) -> Tensor:
        return (z - self.target) @ self.gram


def numpy_sam(
    t: Any, grad: Any, z: np.ndarray, steps: int, lipschitz: float, rho: float, c: float
) -> np.ndarray:
    """Eq 11 as it stands in the paper, one sample."""
    gamma = 1 / (2 * lipschitz)
    eta = min(np.sqrt(2 * lipschitz), lipschitz / 2, 0.5)
    for k in range(1, steps + 1):
        beta, lam = eta * k**-rho, eta * k**-c
        s = (1 - gamma * lam) * z - gamma * grad(z)
        z = beta * s + (1 - beta) * t(z)
    return z


NUMPY_GRADIENTS = {
    "none": (None, 1.0, lambda z: z),
    "squared": (SquaredNorm(0.4), 0.4, lambda z: 0.4 * z),
    "steep": (SquaredNorm(9.0), 9.0, lambda z: 9.0 * z),
    # The Hessian of 2w/(‖z‖² + 2ε) lies in [−w/ε², w/4ε²].
    "incay": (FeatureIncay(0.5, 2.0), 0.125, lambda z: -2.0 * z / (z @ z + 4.0) ** 2),
}


@pytest.mark.parametrize("kind", list(NUMPY_GRADIENTS))
@pytest.mark.parametrize(("rho", "c"), [(0.3, 0.3), (0.5, 0.2), (0.05, 0.4)])
def test_steps_are_equation_11(kind: str, rho: float, c: float) -> None:
    regularizer, lipschitz, gradient = NUMPY_GRADIENTS[kind]
    problem = problems.tanh()
    solver = SequentialAveraging(regularizer=regularizer, rho=rho, c=c, max_steps=13)
    z0 = problems.randn(*problem.z0.shape, seed=3)
    found = eq.fixed_point(problem.fn, z0, problem.args, solver=solver).value
    for i, (w, x) in enumerate(zip(*(a.numpy() for a in problem.args), strict=True)):
        expected = numpy_sam(
            lambda z, w=w, x=x: np.tanh(w @ z + x), gradient, z0[i].numpy(), 13, lipschitz, rho, c
        )
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------- Theorem 5


def plane(seed: int = 0, rows: int = 2, size: int = 5) -> tuple[Any, np.ndarray, np.ndarray]:
    """T = projection to {z: Az = b}, and A, b. Every point of the plane is fixed."""
    source = np.random.default_rng(seed)
    a, b = source.standard_normal((rows, size)), source.standard_normal(rows)
    lift = torch.from_numpy(np.linalg.pinv(a))
    matrix, right = torch.from_numpy(a), torch.from_numpy(b)
    return (lambda z: z - (z @ matrix.mT - right) @ lift.mT), a, b


def errors_along(
    t: Any, start: Tensor, answer: np.ndarray, moments: list[int], **options: Any
) -> list[float]:
    found: dict[int, float] = {}

    def watch(step: int, z: Tensor, residual: Tensor) -> None:
        if step - 1 in moments:
            found[step - 1] = float((z[0] - torch.from_numpy(answer)).norm())

    solver = SequentialAveraging(max_steps=max(moments) + 1, **options)
    eq.fixed_point(t, start, solver=solver, callback=watch)
    return [found[k] for k in moments]


@pytest.mark.parametrize(("rho", "c"), [(0.3, 0.3), (0.6, 0.15)])
@pytest.mark.parametrize("far", [0.0, 30.0])
def test_theorem_5_the_minimum_norm_point_of_a_plane(rho: float, c: float, far: float) -> None:
    """From anywhere to A⁺b, the error falling as γβ_k‖A⁺b‖: the bias of the averaging."""
    t, a, b = plane()
    nearest = np.linalg.pinv(a) @ b
    start = far * problems.randn(1, 5, seed=4)
    moments = [30, 300, 3000]
    errors = errors_along(t, start, nearest, moments, rho=rho, c=c)
    assert errors[0] > errors[1] > errors[2]
    # Along the plane z shrinks by 1 − β_kγ(1 + λ_k) a step: gone by 3000 steps, from anywhere.
    # Across it, z solves z = β(1 − s)z + (1 − β)n with s = γ(1 + λ): z = n(1 − β)/(1 − β + βs).
    k = moments[-1]
    beta, s = 0.5 * k**-rho, 0.5 * (1 + 0.5 * k**-c)
    predicted = beta * s / (1 - beta + beta * s) * np.linalg.norm(nearest)
    assert errors[-1] == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize(
    ("target", "weights"),
    [
        pytest.param([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], id="least norm"),
        pytest.param([0.9, -1.0, 0.3, 0.4], [1.0, 1.0, 1.0, 1.0], id="nearest to a point"),
        # R does not see the second entry; on the fixed points its minimizer is unique even so.
        pytest.param([0.0, 0.0, 0.0, 0.2], [1.0, 0.0, 0.8, 1.0], id="not strongly convex"),
    ],
)
def test_theorem_5_on_an_intersection_of_convex_sets(
    target: list[float], weights: list[float]
) -> None:
    """T = P_box ∘ P_halfspace is nonexpansive, its fixed points are the intersection; cvxpy."""
    normal = np.array([1.0, 2.0, -1.0, 0.5])
    low, high, level = -0.5, 0.9, 2.0
    direction = torch.from_numpy(normal)

    def t(z: Tensor) -> Tensor:
        short = (level - z @ direction).clamp_min(0.0) / direction.square().sum()
        return (z + short[:, None] * direction).clamp(low, high)

    z = cp.Variable(4)
    limits = [normal @ z >= level, z >= low, z <= high]
    goal = cp.sum_squares(cp.multiply(weights, z - target))
    cp.Problem(cp.Minimize(goal), limits).solve(solver=cp.CLARABEL)
    wanted, matrix = (torch.tensor(v, dtype=torch.float64) for v in (target, weights))
    errors = errors_along(
        t,
        torch.full((1, 4), 2.0, dtype=torch.float64),
        z.value,
        [30, 300, 3000],
        regularizer=Toward(wanted, torch.diag(matrix)),
        lipschitz=1.0,
        rho=0.45,
        c=0.25,
    )
    # λ_k pulls toward 0 and β_k away from the sets: a decade gains 10^{−0.25} = 0.56 or better.
    assert errors[1] < 0.6 * errors[0]
    assert errors[2] < 0.6 * errors[1]
    assert errors[2] < 0.05


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    "regularizer",
    [None, SquaredNorm(0.7), FeatureIncay(0.5, 1.0), Decorrelation(0.1), HSIC(0.1)],
    ids=lambda r: type(r).__name__,
)
def test_gradients_of_the_unrolled_steps(regularizer: Any) -> None:
    problem = problems.tanh(batch=3, size=3)
    solver = SequentialAveraging(regularizer=regularizer, lipschitz=1.0, max_steps=4)
    z0 = problems.randn(3, 3, seed=7)

    def run(z0: Tensor, *args: Tensor) -> Tensor:
        return eq.fixed_point(problem.fn, z0, args, solver=solver, adjoint=eq.Unrolled()).value

    inputs = [t.clone().requires_grad_() for t in (z0, *problem.args)]
    assert torch.autograd.gradcheck(run, inputs)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lipschitz=st.floats(1e-3, 1e3),
    rho=st.floats(0.05, 0.5),
    c=st.floats(0.05, 0.2),
    seed=st.integers(0, 10**6),
)
def test_a_step_is_nonexpansive(lipschitz: float, rho: float, c: float, seed: int) -> None:
    """βS + (1 − β)T of a nonexpansive T and R with 0 ⪯ ∇²R ⪯ L is nonexpansive, at every k."""
    solver = SequentialAveraging(regularizer=SquaredNorm(lipschitz), rho=rho, c=c, max_steps=6)
    matrix = problems.orthogonal(1, 4, seed)[0]
    a, b = problems.randn(2, 1, 4, seed=seed + 1)
    ends = [eq.fixed_point(lambda z: z @ matrix, z, solver=solver).value for z in (a, b)]
    assert float((ends[0] - ends[1]).norm()) <= float((a - b).norm()) * (1 + 1e-12)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("rho", "c"), [(0.5, 0.25), (1.0, 0.1), (0.2, 0.4)])
def test_schedules_that_break_theorem_5(rho: float, c: float) -> None:
    with pytest.raises(ValueError, match=r"rho=.* c=.*Theorem 5 needs rho \+ 2c < 1, got"):
        SequentialAveraging(rho=rho, c=c)


@pytest.mark.parametrize("regularizer", [L1(1.0), Decorrelation(), HSIC(), SquaredNorm(0.0)])
def test_a_regularizer_without_a_bound_asks_for_one(regularizer: Any) -> None:
    with pytest.raises(ValueError, match=r"Lipschitz constant .* Give one .*lipschitz="):
        SequentialAveraging(regularizer=regularizer)
    assert SequentialAveraging(regularizer=regularizer, lipschitz=2.0).smoothness == 2.0


def test_something_that_is_no_regularizer() -> None:
    with pytest.raises(TypeError, match=r"regularizer='l2'.*grad\(z\)"):
        SequentialAveraging(regularizer="l2")
    bare = Toward(torch.zeros(3))
    with pytest.raises(ValueError, match="lipschitz="):
        SequentialAveraging(regularizer=bare)
