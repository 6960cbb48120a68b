"""The bound on float64 rounding, against the same formulas in 80-bit arithmetic.

The oracle takes the float64 numbers of the problem as exact and evaluates T and ‖z − T(z)‖ in
numpy's longdouble, whose own rounding is 2048 times finer than what is bounded.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.certify.rounding import residual_rounding, subgradient_rounding
from equilibria.problems.kernels import Activated, Coupling
from equilibria.problems.operators import (
    ConvOperator,
    DenseOperator,
    SeparableConvOperator,
    TransposedOperator,
)
from equilibria.problems.priors import WithL1
from equilibria.problems.regularizers import Regularizer
from tests import oracles
from tests.problems.test_operators import conv_matrix, randn
from tests.problems.test_patches import rows_by_loops

Long = np.longdouble
needs_long = pytest.mark.skipif(np.finfo(Long).nmant < 63, reason="longdouble is no wider here")

PROXES = {
    **oracles.PROXES,
    "with_l1": (WithL1(eq.NonNegative(), 0.2), lambda v, t: np.maximum(v - t * Long(0.2), 0)),
}


def wide(t: Tensor) -> np.ndarray:
    return t.detach().numpy().astype(Long)


def gaussian_force(q: eq.Gaussian, matrix: np.ndarray, z: Tensor) -> np.ndarray:
    """−∇q in longdouble. matrix: W, dense."""
    w = matrix.astype(Long)
    r = wide(q.c).reshape(len(z), -1) - wide(z).reshape(len(z), -1) @ w.T
    flat = r.astype(np.float64).reshape(q.c.shape)  # for the order of the entries alone
    order = np.arange(flat[0].size, dtype=float).reshape(1, *q.c.shape[1:])
    if q.patches is None:
        index = order.reshape(1, 1, -1)
    else:
        index = rows_by_loops(order, q.patches.channels, q.patches.size)
    index = index[0].astype(int)
    rows = r[:, index]  # [B, P, k]
    v = rows if q.metric is None else rows @ wide(q.metric)
    s = (rows * v).sum(-1)
    message = np.exp(-wide(q.gamma)[:, None] * s)[..., None] * v
    merged = np.zeros_like(r)
    merged[:, index.reshape(-1)] = message.reshape(len(z), -1)
    return merged @ w


def make_gaussian(kind: str, scale: float, gamma: float) -> tuple[eq.Gaussian, np.ndarray, tuple]:
    if kind == "dense":
        weight, hidden = randn(7, 5, seed=1), randn(7, 4, seed=2)
        c = randn(6, 7, seed=3) * scale
        return eq.Gaussian(weight, c, gamma, hidden=hidden), weight.numpy(), (5,)
    patches, c = eq.Patches(channels=2, size=2), randn(6, 4, 4, 4, seed=3) * scale
    hidden = randn(8, 5, seed=2) * 0.4
    if kind == "conv":
        weight = randn(4, 2, 3, 3, seed=1) * 0.4
        matrix = conv_matrix(weight, 4, 4, padding=1)
        operator: ConvOperator | SeparableConvOperator = ConvOperator(weight)
    else:
        depth, point = randn(2, 1, 3, 3, seed=1), randn(4, 2, 1, 1, seed=4)
        operator = SeparableConvOperator(depth, point)
        matrix = conv_matrix(point, 4, 4).astype(Long) @ conv_matrix(
            depth, 4, 4, padding=1, groups=2
        ).astype(Long)
    return eq.Gaussian(operator, c, gamma, patches=patches, hidden=hidden), matrix, (2, 4, 4)


def check(problem: eq.Problem, z: Tensor, force: np.ndarray, prox, tau: float = 1.0) -> float:
    """Assert that the bound holds; how much of it the true error used at most."""
    image = problem.step(z, tau)
    bound, derived = residual_rounding(problem, z, image, tau)
    assert derived
    computed = torch.linalg.vector_norm((z - image).flatten(1), dim=1)
    state = wide(z).reshape(len(z), -1)
    t = Long(tau)
    exact = state - prox((1 - t) * state + t * force, t)
    off = np.abs(computed.numpy().astype(Long) - np.sqrt(np.square(exact).sum(1)))
    # The entries too: |fl T(z) − T(z)| in norm is what the bound is made of.
    moved = state - exact - wide(image).reshape(len(z), -1)
    used = np.maximum(off, np.sqrt(np.square(moved).sum(1))) / bound.numpy()
    assert used.max() <= 1.0
    size = float(torch.linalg.vector_norm(z) + torch.linalg.vector_norm(problem.gradient(z)))
    assert float(bound.max()) <= 1e-9 * (size + 1)  # a bound of a size that is of use
    return float(used.max())


@needs_long
@pytest.mark.parametrize("name", list(PROXES))
@pytest.mark.parametrize("kind", ["dense", "conv", "separable"])
def test_gaussian_residuals_are_within_the_bound(kind: str, name: str) -> None:
    prior, prox = PROXES[name]
    used = []
    for gamma, scale in [(1e-3, 30.0), (0.5, 1.0), (1.0, 1e-3), (1e3, 0.03), (1e3, 1.0)]:
        q, matrix, state = make_gaussian(kind, scale, gamma)
        for seed in range(4):
            z = randn(6, *state, seed=seed) * scale
            force = gaussian_force(q, matrix, z)
            used.append(check(eq.Problem(prior, q), z, force, prox))
            if name not in ("tanh", "logistic", "softplus"):
                used.append(check(eq.Problem(prior, q), z, force, prox, tau=0.37))
    assert max(used) > 1e-4  # loose by less than four digits in the worst case


@needs_long
@pytest.mark.parametrize("name", ["relu", "identity", "tanh"])
def test_other_couplings_are_within_the_bound(name: str) -> None:
    prior, prox = PROXES[name]
    w = randn(6, 4, seed=1)
    big = w.numpy().astype(Long)
    for scale in (1e-3, 1.0, 30.0):
        c, z = randn(8, 4, seed=2) * scale, randn(8, 4, seed=3)
        cl, zl = wide(c), wide(z)
        t = (cl * zl).sum(1, keepdims=True)
        gram = zl @ big.T @ big
        cases: list[tuple[Coupling, np.ndarray]] = [
            (eq.Linear(w, c), gram + cl),
            (eq.Linear(TransposedOperator(DenseOperator(w.T.contiguous())), c), gram + cl),
            (eq.Sigmoidal(w, c), gram + cl / np.cosh(t) ** 2),
            (eq.Polynomial(w, c, degree=2), gram + 2 * (1 + t) * cl),
            (eq.Polynomial(w, c, degree=3), gram + 3 * (1 + t) ** 2 * cl),
        ]
        for q, force in cases:
            check(eq.Problem(prior, q), z, force, prox)
        before = zl @ big.T + wide(randn(8, 6, seed=4)) * 1
        inner = Activated(w, randn(8, 6, seed=4), prior, nu=1.7)
        force = prox(before, Long(1)) @ big / Long(1.7)
        check(eq.Problem(eq.Free(), inner), z, force, lambda v, t: v)


@needs_long
@pytest.mark.parametrize(
    ("regularizer", "form"),
    [
        (eq.SquaredNorm(0.3), "gradient"),
        (eq.SquaredNorm(0.3), "prox"),
        (eq.FeatureIncay(0.5, 0.7), "gradient"),
        (eq.L1(0.2), "prox"),
        (eq.L1(0.2), "gradient"),
    ],
)
def test_regularizers_are_within_the_bound(regularizer: Regularizer, form: str) -> None:
    q, matrix, state = make_gaussian("dense", 1.0, 0.5)
    z = randn(6, *state, seed=9)
    zl, prox = wide(z), PROXES["relu"][1]
    if isinstance(regularizer, eq.SquaredNorm):
        w = Long(0.3)
        extra = w * zl if form == "gradient" else zl - zl / (1 + w)
    elif isinstance(regularizer, eq.FeatureIncay):
        size = np.square(zl).sum(1, keepdims=True) + 2 * Long(0.7)
        extra = -4 * Long(0.5) * zl / size**2
    elif form == "prox":
        extra = np.clip(zl, -Long(0.2), Long(0.2))
    else:
        extra, prox = 0 * zl, PROXES["with_l1"][1]
    problem = eq.Problem(eq.NonNegative(), q, regularizer, regularize=form)  # type: ignore[arg-type]
    check(problem, z, gaussian_force(q, matrix, z) - extra, prox)


@needs_long
@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_the_least_subgradient_is_within_its_bound(kind: str) -> None:
    """For z ≥ 0 with zeros: dist(0, ∂G) entrywise, g where z > 0 and min(g, 0) where z = 0."""
    for gamma, scale in [(0.5, 1.0), (1e3, 0.03), (1e-3, 30.0)]:
        q, matrix, state = make_gaussian(kind, scale, gamma)
        z = torch.relu(randn(6, *state, seed=5)) * scale
        problem = eq.Problem(eq.NonNegative(), q)
        least = problem.minimal_subgradient(z)
        bound = subgradient_rounding(problem, z, least)
        zl = wide(z).reshape(6, -1)
        g = zl - gaussian_force(q, matrix, z)
        exact = np.sqrt(np.square(np.where(zl > 0, g, np.minimum(g, 0))).sum(1))
        off = np.abs(wide(problem.stationarity(z)) - exact)
        assert (off <= bound.numpy()).all()
        assert float(bound.max()) <= 1e-9 * float(exact.max())


@needs_long
def test_the_error_of_the_exponent_is_counted() -> None:
    """c ≈ Wz, both large: what cancels in r is doubled and multiplied by γs in the weight."""
    count = 2000
    rng = np.random.default_rng(0)
    w, z = 1e3, torch.from_numpy(rng.uniform(0.5, 2, (count, 1)))
    gamma = 1e6
    apart = torch.from_numpy(rng.uniform(2.5, 3.5, (count, 1)) / math.sqrt(gamma))
    q = eq.Gaussian(torch.tensor([[w]], dtype=torch.float64), w * z + apart, gamma)
    used = check(eq.Problem(eq.Free(), q), z, gaussian_force(q, np.array([[w]]), z), lambda v, t: v)
    assert used > 0.1


@needs_long
def test_the_error_of_a_cancelling_inner_product_is_counted() -> None:
    """t = ⟨c, z⟩ is small and its terms are not: the slope φ′(t) carries their rounding."""
    rng = np.random.default_rng(1)
    c = rng.uniform(1e3, 2e3, (500, 6))
    z = rng.uniform(0.5, 1, (500, 6))
    z[:, 3:] = -z[:, :3] * c[:, :3] / c[:, 3:] * (1 + 1e-8 * rng.standard_normal((500, 3)))
    w = torch.full((6, 6), 1e-4, dtype=torch.float64)
    cl, zl = c.astype(Long), z.astype(Long)
    t = (cl * zl).sum(1, keepdims=True)
    gram = zl @ w.numpy().astype(Long).T @ w.numpy().astype(Long)
    state, features = torch.from_numpy(z), torch.from_numpy(c)
    for q, slope in [
        (eq.Sigmoidal(w, features), 1 / np.cosh(t) ** 2),
        (eq.Polynomial(w, features, degree=3), 3 * (1 + t) ** 2),
    ]:
        check(eq.Problem(eq.Free(), q), state, gram + slope * cl, lambda v, t: v)


def test_no_bound_is_derived_for_smooth_priors_away_from_step_one() -> None:
    q, _, state = make_gaussian("dense", 1.0, 0.5)
    z = torch.rand(6, *state, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    problem = eq.Problem(eq.Tanh(), q)
    assert residual_rounding(problem, z, problem.step(z))[1]
    assert not residual_rounding(problem, z, problem.step(z, 0.5), 0.5)[1]
    assert subgradient_rounding(problem, z, problem.minimal_subgradient(z)) is None


def test_weights_that_overflow_or_underflow_leave_a_finite_or_infinite_bound_never_nan() -> None:
    for scale in (1e-160, 1e8, 1e150):
        q, _, state = make_gaussian("dense", scale, 1.0)
        z = randn(6, *state, seed=0) * scale
        problem = eq.Problem(eq.NonNegative(), q)
        bound, _ = residual_rounding(problem, z, problem.step(z))
        assert not bound.isnan().any()
