"""Problems against independent minimizers: scipy L-BFGS-B, cvxpy, and a coupling of our own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from equilibria.problems import Coupling, Curvature, HiddenProblem, Prior, Regularizer, WithL1
from tests.optional import optional
from tests.problems.test_operators import randn

cp = optional("cvxpy")

Array = np.ndarray
N = 5


class Quadratic(Coupling):
    """``q(z) = z'Hz/2 - c'z`` with any symmetric H, apart from the library's own couplings."""

    def value(self, z: Tensor) -> Tensor:
        return (0.5 * z * self.operator(z) - self.c * z).sum(1)

    def grad(self, z: Tensor) -> Tensor:
        return self.operator(z) - self.c

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        return self.operator(v)

    def curvature(self) -> Curvature:
        values = torch.linalg.eigvalsh(self.operator(torch.eye(self.c.shape[1]).to(self.c)))
        return Curvature(float(values[0]), float(values[-1]), True, "eigenvalues")

    def check_state(self, z: Tensor) -> None:
        if z.shape != self.c.shape:
            raise ValueError("shape")

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        return torch.zeros_like(self.c)


def weight(norm: float, rows: int = 4, seed: int = 0) -> Tensor:
    w = randn(rows, N, seed=seed)
    return norm * w / torch.linalg.matrix_norm(w, 2)


def quadratic(seed: int = 0, low: float = -0.8, high: float = 1.5) -> Quadratic:
    q, _ = torch.linalg.qr(randn(N, N, seed=seed))
    return Quadratic(
        q @ torch.diag(torch.linspace(low, high, N, dtype=torch.float64)) @ q.T,
        1.5 * randn(3, N, seed=seed + 1),
    )


def solve(problem: HiddenProblem, start: Tensor, tau: float | None = None) -> Tensor:
    """Plain proximal-gradient iteration with the step the curvature gives."""
    bounds = problem.curvature()
    step = tau or 2.0 / float(torch.as_tensor(bounds.lower + bounds.upper).max())
    z = start
    for _ in range(4000):
        new = problem.step(z, step)
        if float((new - z).abs().max()) < 1e-14:
            return new
        z = new
    return z


# --- against scipy and cvxpy --------------------------------------------------------------------


def scipy_minimizer(problem: eq.Problem, bounds: tuple[float | None, float | None]) -> Array:
    """L-BFGS-B with bounds per sample on the coupling alone, f and ½|z|² written here."""
    shape = problem.coupling.default_start().shape

    def fun(flat: Array) -> tuple[float, Array]:
        z = torch.tensor(flat.reshape(shape))
        value = float(problem.coupling.value(z).sum()) + 0.5 * float(flat @ flat)
        return value, (flat + problem.coupling.grad(z).numpy().ravel())

    best = minimize(
        fun,
        np.full(math.prod(shape), 0.1),
        jac=True,
        method="L-BFGS-B",
        bounds=[bounds] * math.prod(shape),
        options={"ftol": 1e-16, "gtol": 1e-11, "maxiter": 5000, "maxcor": 30},
    )
    return np.asarray(best.x.reshape(shape))


BOUNDED: dict[str, tuple[Prior, tuple[float | None, float | None]]] = {
    "free": (eq.Free(), (None, None)),
    "relu": (eq.NonNegative(), (0.0, None)),
    "box": (eq.Box(-0.2, 0.3), (-0.2, 0.3)),
}


def couplings() -> dict[str, Coupling]:
    image = randn(2, 4, 4, 4, seed=5)
    kernel = randn(4, 2, 3, 3, seed=6)
    return {
        "quadratic": quadratic(),
        "linear": eq.Linear(weight(0.95), randn(3, N, seed=2)),
        "sigmoid": eq.Sigmoidal(
            weight(0.6), 0.6 * torch.nn.functional.normalize(randn(3, N), dim=1)
        ),
        "gaussian": eq.Gaussian(weight(1.3), 1.5 * randn(3, 4, seed=3), gamma=0.5),
        "gaussian patches": eq.Gaussian(
            1.2 * kernel / kernel.abs().sum((1, 2, 3)).max(),
            image,
            gamma=0.3,
            patches=eq.Patches(channels=2, size=2),
            hidden=torch.linalg.qr(randn(8, 8))[0][:, :5],
        ),
    }


@pytest.mark.parametrize("prior", BOUNDED)
@pytest.mark.parametrize("name", couplings())
def test_solution_is_the_minimizer_scipy_finds(name: str, prior: str) -> None:
    coupling = couplings()[name]
    problem = eq.Problem(BOUNDED[prior][0], coupling)
    shape = (2, 2, 4, 4) if name == "gaussian patches" else (3, N)
    start = problem.default_start()
    assert start.shape == shape
    z = solve(problem, start)
    want = scipy_minimizer(problem, BOUNDED[prior][1])
    np.testing.assert_allclose(z.numpy(), want, atol=1e-6)
    assert float(problem.stationarity(z).max()) < 1e-11
    assert float(problem.stationarity(start).max()) > 1e-2
    ours, theirs = problem.objective(z), problem.objective(torch.tensor(want))
    assert bool((ours <= theirs + 1e-12).all())


def _half(z: cp.Variable) -> cp.Expression:
    return 0.5 * cp.sum_squares(z)


# f + ½|z|² as cvxpy writes it, an entropy for tanh and sigmoid, and the domain of f.
CVX: dict[str, tuple[Prior, Callable[[cp.Variable], tuple[Any, list[Any]]]]] = {
    "free": (eq.Free(), lambda z: (_half(z), [])),
    "relu": (eq.NonNegative(), lambda z: (_half(z), [z >= 0])),
    "box": (eq.Box(-0.2, 0.3), lambda z: (_half(z), [z >= -0.2, z <= 0.3])),
    "soft": (eq.SoftThreshold(0.4), lambda z: (_half(z) + 0.4 * cp.norm1(z), [])),
    "shifted": (eq.ShiftedNonNegative(0.3), lambda z: (_half(z) + 0.3 * cp.sum(z), [z >= 0])),
    "leaky": (eq.LeakyNonNegative(0.2), lambda z: (_half(z) + 4 * _half(cp.neg(z)), [])),
    "tanh": (eq.Tanh(), lambda z: (-0.5 * cp.sum(cp.entr(1 + z) + cp.entr(1 - z)), [])),
    "logistic": (eq.Logistic(), lambda z: (-cp.sum(cp.entr(z) + cp.entr(1 - z)), [])),
}
CVX_REGULARIZERS: dict[str, tuple[Regularizer | None, Callable[[cp.Variable], cp.Expression]]] = {
    "none": (None, lambda z: 0.0),
    "squared": (eq.SquaredNorm(0.6), lambda z: 0.3 * cp.sum_squares(z)),
    "l1": (eq.L1(0.35), lambda z: 0.35 * cp.norm1(z)),
}


def cvx_solve(program: cp.Problem) -> None:
    """As far as the solver gets. With exponential cones it stops short of 1e-12 and warns; how
    good the answer is, the comparison at 1e-6 says.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        tolerance = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-12)
        program.solve(solver=cp.CLARABEL, **tolerance)


@pytest.mark.parametrize("regularizer", CVX_REGULARIZERS)
@pytest.mark.parametrize("prior", CVX)
def test_solution_is_the_minimizer_cvxpy_finds(prior: str, regularizer: str) -> None:
    """Convex quadratic q, every prior cvxpy can write, gradient-form regularizers (Theorem 4)."""
    coupling = quadratic(seed=4, low=0.05, high=1.4)
    ours, theirs = CVX_REGULARIZERS[regularizer]
    f, modeled = CVX[prior]
    problem = eq.Problem(f, coupling, ours)
    z = solve(problem, torch.full((3, N), 0.1, dtype=torch.float64))
    assert float(problem.stationarity(z).max()) < 1e-9
    h, values = coupling.operator.weight.numpy(), problem.objective(z)
    for k in range(3):
        x = cp.Variable(N)
        cost, constraints = modeled(x)
        goal = cost + 0.5 * cp.quad_form(x, cp.psd_wrap(h)) - coupling.c[k].numpy() @ x + theirs(x)
        program = cp.Problem(cp.Minimize(goal), constraints)
        cvx_solve(program)
        np.testing.assert_allclose(z[k].numpy(), x.value, atol=1e-6)
        assert float(values[k]) == pytest.approx(program.value, abs=1e-8)


@pytest.mark.parametrize("regularizer", [eq.SquaredNorm(0.6), eq.L1(0.35)], ids=["squared", "l1"])
def test_prox_form_minimizes_the_moreau_envelope(regularizer: Regularizer) -> None:
    """min over z and u of G(z) + R(u) + |u - z|²/2 jointly, by cvxpy: not the gradient form."""
    coupling = quadratic(seed=4, low=0.05, high=1.4)
    problem = eq.Problem(eq.NonNegative(), coupling, regularizer, regularize="prox")
    z = solve(problem, torch.zeros(3, N, dtype=torch.float64))
    assert float(problem.stationarity(z).max()) < 1e-11
    h = coupling.operator.weight.numpy()
    for k in range(3):
        x, u = cp.Variable(N), cp.Variable(N)
        r = (
            0.3 * cp.sum_squares(u)
            if isinstance(regularizer, eq.SquaredNorm)
            else 0.35 * cp.norm1(u)
        )
        q = 0.5 * cp.quad_form(x, cp.psd_wrap(h)) - coupling.c[k].numpy() @ x
        goal = 0.5 * cp.sum_squares(x) + q + r + 0.5 * cp.sum_squares(u - x)
        program = cp.Problem(cp.Minimize(goal), [x >= 0])
        cvx_solve(program)
        np.testing.assert_allclose(z[k].numpy(), x.value, atol=1e-6)
        assert float(problem.objective(z)[k]) == pytest.approx(program.value, abs=1e-8)
    other = solve(eq.Problem(eq.NonNegative(), coupling, regularizer), torch.zeros_like(z))
    assert float((z - other).abs().max()) > 2e-2


# --- the parts --------------------------------------------------------------------------------

PRIORS: dict[str, Prior] = {
    **{name: prior for name, (prior, _) in CVX.items()},
    "softplus": eq.Softplus(),
    "relu+l1": WithL1(eq.NonNegative(), 0.2),
}
REGULARIZERS: dict[str, tuple[Regularizer | None, str]] = {
    "none": (None, "gradient"),
    "squared": (eq.SquaredNorm(0.6), "gradient"),
    "squared prox": (eq.SquaredNorm(0.6), "prox"),
    "l1": (eq.L1(0.2), "gradient"),
    "l1 prox": (eq.L1(0.2), "prox"),
    "incay": (eq.FeatureIncay(0.2, 0.5), "gradient"),
    "decorrelation": (eq.Decorrelation(0.05), "gradient"),
    "hsic": (eq.HSIC(0.05), "gradient"),
}


def build(prior: str, regularizer: str, coupling: Coupling | None = None) -> eq.Problem:
    r, form = REGULARIZERS[regularizer]
    if coupling is None and r is not None and r.couples_batch:
        # Features away from zero rows, where the Hessian of decorrelation is unbounded.
        coupling = Quadratic(0.1 * torch.eye(N, dtype=torch.float64), 1 + randn(3, N, seed=3).abs())
    coupling = coupling or eq.Gaussian(weight(0.9), randn(3, 4, seed=3), gamma=0.5)
    return eq.Problem(PRIORS[prior], coupling, r, form)  # type: ignore[arg-type]


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("prior", PRIORS)
def test_every_step_has_the_same_fixed_point_and_it_is_stationary(
    prior: str, regularizer: str
) -> None:
    problem = build(prior, regularizer)
    z = solve(problem, torch.full((3, N), 0.3, dtype=torch.float64), tau=0.8)
    assert float(problem.stationarity(z).max()) < 1e-8
    for tau in (0.2, 1.0, 1.7):
        assert float((problem.step(z, tau) - z).abs().max()) < 1e-10
    per_sample = torch.tensor([0.2, 1.0, 1.7], dtype=torch.float64)
    moved = torch.stack([problem.step(z + 0.1, float(t))[k] for k, t in enumerate(per_sample)])
    torch.testing.assert_close(problem.step(z + 0.1, per_sample), moved)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_gradient_is_the_derivative_of_the_smooth_part(regularizer: str) -> None:
    problem = build("free", regularizer)
    z = randn(3, N, seed=7).requires_grad_()
    value = problem.objective(z).sum()
    if regularizer == "l1":  # in gradient form it is part of the prior
        value = value - 0.2 * z.abs().sum()
    (want,) = torch.autograd.grad(value, z)
    torch.testing.assert_close(problem.gradient(z), want, rtol=1e-10, atol=1e-12)


def test_stationarity_is_the_distance_to_the_subdifferential() -> None:
    """Against the least norm over random elements of the normal cone, at a point with zeros."""
    z = torch.relu(randn(1, N, seed=3)) * torch.tensor([1.0, 0, 1, 0, 1], dtype=torch.float64)
    problem = eq.Problem(
        eq.NonNegative(), eq.Gaussian(weight(0.9), randn(1, 4, seed=3), gamma=0.5), eq.L1(0.2)
    )
    g = problem.gradient(z)[0].numpy()
    x = cp.Variable(N)
    zero = z[0].numpy() == 0
    constraints = [x[k] <= 0.2 if zero[k] else x[k] == 0.2 for k in range(N)]
    program = cp.Problem(cp.Minimize(cp.norm(x + g)), constraints)
    program.solve(solver=cp.CLARABEL)
    assert float(problem.stationarity(z)) == pytest.approx(program.value, abs=1e-7)
    assert float(problem.stationarity(z - 5.0)) == math.inf
    assert float(problem.objective(z - 5.0)) == math.inf


@pytest.mark.parametrize("regularizer", ["none", "squared", "squared prox", "l1 prox", "incay"])
def test_curvature_holds_on_the_hessian(regularizer: str) -> None:
    coupling = eq.Gaussian(weight(1.1), 0.8 * randn(3, 4, seed=3), gamma=0.5)
    problem = build("free", regularizer, coupling)
    bounds = problem.curvature()
    assert bounds.rigorous
    for seed in range(30):
        z = 2 * randn(3, N, seed=seed)
        local = problem.local_curvature(z)
        for k in range(3):
            one = torch.func.jacrev(problem.gradient)(z)[k, :, k]
            values = torch.linalg.eigvalsh(0.5 * (one + one.T))
            for end in (bounds, local):
                low = torch.as_tensor(end.lower).expand(3)[k]
                high = torch.as_tensor(end.upper).expand(3)[k]
                assert float(low) - 1e-9 <= float(values[0])
                assert float(values[-1]) <= float(high) + 1e-9
    if regularizer == "squared prox":
        assert float(bounds.upper) == pytest.approx(1 + 1.1**2 + 0.6 / 1.6, abs=1e-6)


# --- derivatives, types, compilation, errors ----------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "regularizer"),
    [
        ("tanh", "none"),
        ("logistic", "squared prox"),
        ("softplus", "incay"),
        ("tanh", "decorrelation"),
        ("softplus", "hsic"),
    ],
)
def test_step_is_twice_differentiable(prior: str, regularizer: str) -> None:
    c = randn(2, 4, seed=3).requires_grad_()
    w = weight(0.9).requires_grad_()
    z = (0.3 + 0.1 * randn(2, N).abs()).requires_grad_()
    tau = torch.tensor([0.6, 1.4], dtype=torch.float64, requires_grad=True)

    def step(z: Tensor, c: Tensor, w: Tensor, tau: Tensor) -> Tensor:
        return build(prior, regularizer, eq.Gaussian(w, c, gamma=0.5)).step(z, tau)

    assert gradcheck(step, (z, c, w, tau))
    fixed = (w.detach(), tau.detach())
    assert gradgradcheck(lambda z, c: step(z, c, *fixed), (z, c), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_low_precision(dtype: torch.dtype, regularizer: str) -> None:
    w, c, z = weight(0.9), randn(3, 4, seed=3), randn(3, N).abs()
    low = build("relu", regularizer, eq.Gaussian(w.to(dtype), c.to(dtype), gamma=0.5))
    high = build(
        "relu", regularizer, eq.Gaussian(w.to(dtype).double(), c.to(dtype).double(), gamma=0.5)
    )
    state, wide = z.to(dtype), z.to(dtype).double()
    eps = torch.finfo(dtype).eps
    for tau in (1.0, 0.7, torch.tensor([0.5, 1.0, 1.5])):
        got = low.step(state, tau)
        assert got.dtype == dtype
        assert float((got.double() - high.step(wide, tau)).abs().max()) <= 16 * eps
    for name in ("objective", "stationarity"):
        got, want = getattr(low, name)(state), getattr(high, name)(wide)
        assert got.dtype == torch.float32
        assert got.shape == (3,)
        assert float((got.double() - want).abs().max()) <= 32 * eps


def test_a_step_of_one_does_not_touch_the_old_state() -> None:
    """T(z) = prox_f(-grad q(z)) exactly: no (1 - 1) z that turns an infinity into NaN."""

    class Constant(Quadratic):
        def grad(self, z: Tensor) -> Tensor:
            return -self.c

    problem = eq.Problem(eq.NonNegative(), Constant(torch.zeros(N, N), randn(3, N)))
    z = torch.full((3, N), math.inf, dtype=torch.float64)
    torch.testing.assert_close(problem.step(z), torch.relu(randn(3, N)))


@pytest.mark.parametrize(
    ("make", "kind", "names"),
    [
        (lambda q: eq.Problem("relu", q), TypeError, ["prior", "str", "Prior"]),  # type: ignore[arg-type]
        (lambda q: eq.Problem(eq.NonNegative(), torch.ones(2)), TypeError, ["coupling", "Tensor"]),  # type: ignore[arg-type]
        (lambda q: eq.Problem(eq.Free(), q, 0.1), TypeError, ["regularizer", "float"]),  # type: ignore[arg-type]
        (lambda q: eq.Problem(eq.Free(), q, eq.L1(), "grad"), ValueError, ["'grad'", "'gradient'"]),  # type: ignore[arg-type]
        (lambda q: eq.Problem(eq.Free(), q, eq.HSIC(), "prox"), ValueError, ["prox", "HSIC", "L1"]),
        (lambda q: eq.Problem(eq.Free(), q).step(q.c, -1.0), ValueError, ["tau", "-1.0"]),
        (
            lambda q: eq.Problem(eq.Free(), q).step(q.c, torch.ones(2)),
            ValueError,
            ["tau", "(2,)", "3"],
        ),
    ],
)
def test_bad_input_is_named(
    make: Callable[[Quadratic], object], kind: type[Exception], names: list[str]
) -> None:
    with pytest.raises(kind) as error:
        make(quadratic())
    assert all(name in str(error.value) for name in names)
