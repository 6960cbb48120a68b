"""Lipschitz constants: the closed forms against brute force, and how fast Hessians turn."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria.certify import global_lipschitz, local_lipschitz
from equilibria.problems.gamma import FixedGamma, LearnedGamma, MeanPatchEnergy, MinPatchEnergy
from equilibria.problems.gaussian import Gaussian, gaussian_sensitivity
from equilibria.problems.kernels import Activated, Coupling, Linear, Polynomial, Sigmoidal
from equilibria.problems.operators import ModuleOperator
from equilibria.problems.priors import Free, Logistic, NonNegative
from equilibria.problems.problem import Problem
from equilibria.problems.regularizers import HSIC, FeatureIncay, SquaredNorm
from tests.problems.test_operators import randn

B = 2 * math.exp(-1.5)


def supremum(mu: float, b: float, top: float, a: float) -> float:
    """sup ρ√((β − b)Y + bβ)/(a + ρ²Y) over a grid of ρ ≤ μ and −b ≤ Y ≤ β."""
    y = np.linspace(-b, top, 4001)
    rho = np.linspace(0, mu, 201)[1:, None]
    inside = np.maximum((top - b) * y + b * top, 0)
    return float((rho * np.sqrt(inside) / (a + rho**2 * y)).max())


@given(
    mu=st.floats(0.05, 3.0),
    b=st.floats(0.0, 0.45),
    top=st.floats(0.02, 1.0),
    a=st.floats(0.3, 3.0),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_the_closed_form_is_the_supremum(mu: float, b: float, top: float, a: float) -> None:
    found = float(gaussian_sensitivity(mu, concavity=b, top=top, modulus=a))
    if b * mu**2 >= a * (1 - 1e-9):
        assert found == math.inf or b * mu**2 < a
        return
    wanted = supremum(mu, b, top, a)
    assert found >= wanted * (1 - 1e-12)  # a grid only falls short
    if b * mu**2 < 0.99 * a:
        assert found <= wanted * (1 + 1e-3)


def make_coupling(kind: str, w: torch.Tensor, c: torch.Tensor) -> Coupling:
    if kind == "linear":
        return Linear(w, c)
    if kind == "sigmoid":
        return Sigmoidal(w, c)
    return Polynomial(w, c, degree={"square": 2, "cube": 3}[kind])


@pytest.mark.parametrize("kind", ["gaussian", "linear", "sigmoid", "square", "cube"])
def test_hessians_turn_no_faster_than_stated(kind: str) -> None:
    """‖∇²q(z) − ∇²q(z′)‖ ≤ K‖z − z′‖ on random pairs; nearly attained for n = 1."""
    worst = 0.0
    for seed in range(12):
        n = 1 if seed % 2 else 4
        w, batch = randn(n + 1, n, seed=seed), 64
        z = randn(batch, n, seed=seed + 50) * 0.7
        other = z + randn(batch, n, seed=seed + 60) * 0.05
        c = randn(batch, n, seed=seed + 70)
        q: Coupling
        if kind == "gaussian":
            w = w[:n] if n == 1 else w
            features = randn(batch, w.shape[0], seed=seed + 70)
            gamma = 10 ** torch.empty(batch, dtype=torch.float64).uniform_(
                -1, 1, generator=torch.Generator().manual_seed(seed)
            )
            q = Gaussian(w, features, gamma)
        else:
            q = make_coupling(kind, w, c)
        eye = torch.eye(n, dtype=torch.float64)
        turned = torch.stack(
            [q.hvp(z, e.expand_as(z)) - q.hvp(other, e.expand_as(z)) for e in eye], -1
        )
        size = torch.linalg.matrix_norm(turned, 2)
        allowed = q.hessian_lipschitz() * (z - other).norm(dim=1)
        assert (size <= allowed * (1 + 1e-9) + 1e-12).all()
        if kind in ("gaussian", "sigmoid"):
            worst = max(worst, float((size / allowed).max()))
    if kind in ("gaussian", "sigmoid"):
        assert worst > 0.8


def constant(problem: Problem, input_norm: float | None = 2.0) -> tuple[float | None, str]:
    lower = problem.curvature().lower
    return global_lipschitz(problem, lower, input_norm)


def scaled(rows: int, columns: int, norm: float, seed: int = 0) -> torch.Tensor:
    w = randn(rows, columns, seed=seed)
    return w * (norm / torch.linalg.matrix_norm(w, 2))


def test_a_gamma_policy_decides_which_constant_holds() -> None:
    w, c = scaled(5, 4, 0.7), randn(3, 5, seed=1)
    sharp = (1 - B) / (2 * math.sqrt(1 - B - B * 0.49))
    loose = 0.7 / (1 - B * 0.49)
    learned = LearnedGamma(0.5).bind(torch.tensor(0.1))
    for policy, wanted in [
        (FixedGamma(0.3), sharp),
        (0.3, sharp),
        (learned, sharp),
        (MeanPatchEnergy(0.2), 2.8332 * loose),
        (MeanPatchEnergy(0.8), (1 + 2 * (1.5 / math.e) ** 1.5 / math.sqrt(0.8)) * loose),
    ]:
        found, _ = constant(Problem(NonNegative(), Gaussian(w, c, policy)))
        assert found == pytest.approx(2.0 * wanted, rel=1e-4)
    found, why = constant(Problem(NonNegative(), Gaussian(w, c, MinPatchEnergy())))
    assert found is None
    assert "MinPatchEnergy" in why
    # A tensor may depend on x; as a problem of its own, γ is a constant.
    given_ = Problem(NonNegative(), Gaussian(w, c, torch.tensor(0.3)))
    assert constant(given_)[0] is None
    assert constant(given_, None)[0] == pytest.approx(sharp, rel=1e-10)


def test_a_constant_in_c_counts_the_hidden_weight() -> None:
    w, hidden = scaled(5, 4, 1.0), randn(5, 3, seed=3)
    mu = float(torch.linalg.matrix_norm(hidden.T @ w, 2))
    problem = Problem(Free(), Gaussian(w * (0.5 / mu), randn(2, 5), 0.4, hidden=hidden))
    found, _ = constant(problem, None)
    assert found == pytest.approx(0.4 * float(torch.linalg.matrix_norm(hidden, 2)), rel=1e-10)


def test_reasons_where_there_is_no_constant() -> None:
    w, c = scaled(5, 4, 0.7), randn(3, 5, seed=1)
    steep = Problem(Free(), Gaussian(w * 3, c, 0.5))
    assert constant(steep) == (
        None,
        "the equilibrium is not certified to be unique for every input",
    )
    assert constant(Problem(Free(), Gaussian(w, c, 0.5)), math.inf)[0] is None
    square = randn(3, 4)
    for q in (Sigmoidal(w, square), Polynomial(w, square)):
        found, why = constant(Problem(Free(), q))
        assert found is None
        assert "input" in why
    together = Problem(Free(), Linear(w, square), HSIC(0.1))
    assert global_lipschitz(together, 0.5, 1.0)[0] is None
    unknown = ModuleOperator(
        lambda z: torch.cat([z] * 2, 1), lambda y: y[:, :3000] + y[:, 3000:], (3000,)
    )
    wide = Problem(Free(), Gaussian(unknown, torch.zeros(1, 6000), 0.5))
    assert constant(wide)[0] is None
    local, _ = local_lipschitz(
        wide, torch.zeros(1, 3000), torch.zeros(1, dtype=torch.float64), -math.inf, 1.0
    )
    assert local.isinf().all()


@pytest.mark.parametrize("regularizer", [SquaredNorm(0.5), FeatureIncay(0.2, 1.0)])
def test_a_regularizer_enters_the_sharp_constant_through_its_modulus(
    regularizer: SquaredNorm | FeatureIncay,
) -> None:
    """Against equilibria for pairs of c, found by a plain damped iteration in numpy."""
    w, gamma = scaled(5, 4, 0.8, seed=4), 0.7
    wn = w.numpy()
    c = randn(400, 5, seed=5).numpy()
    other = c + 10 ** np.random.default_rng(0).uniform(-4, 0.5, (400, 1)) * randn(400, 5).numpy()

    def pull(z: np.ndarray) -> np.ndarray:
        if isinstance(regularizer, SquaredNorm):
            return 0.5 * z
        size = np.square(z).sum(1, keepdims=True) + 2.0
        return -4 * 0.2 * z / size**2

    def solve(features: np.ndarray) -> np.ndarray:
        z = np.zeros((400, 4))
        for _ in range(600):
            r = features - z @ wn.T
            force = (np.exp(-gamma * np.square(r).sum(1, keepdims=True)) * r) @ wn
            z = 0.5 * z + 0.5 * (force - pull(z))
        return z

    found, _ = constant(Problem(Free(), Gaussian(w, torch.from_numpy(c), gamma), regularizer), None)
    ratio = np.linalg.norm(solve(c) - solve(other), axis=1) / np.linalg.norm(c - other, axis=1)
    assert ratio.max() <= found
    assert found <= 2.5 * ratio.max()
    a = 1.5 if isinstance(regularizer, SquaredNorm) else 0.8
    assert found == pytest.approx(supremum(0.8, B, 1.0, a), rel=1e-3)


def test_the_activated_coupling_of_opteq() -> None:
    """z = (1/ν)Wᵀσ(Wz + c): L_σ‖W‖/(νm), against equilibria of random pairs."""
    w = scaled(6, 4, 1.1, seed=2)
    wn, nu = w.numpy(), 1.5
    c = randn(300, 6, seed=3).numpy()
    other = c + 10 ** np.random.default_rng(1).uniform(-4, 0.5, (300, 1)) * randn(300, 6).numpy()
    for prior, sigma, steep in [
        (NonNegative(), lambda v: np.maximum(v, 0), 1.0),
        (Logistic(), lambda v: 1 / (1 + np.exp(-v)), 0.25),
    ]:

        def solve(features: np.ndarray, sigma=sigma) -> np.ndarray:  # type: ignore[no-untyped-def]
            z = np.zeros((300, 4))
            for _ in range(500):
                z = sigma(z @ wn.T + features) @ wn / nu
            return z

        problem = Problem(Free(), Activated(w, torch.from_numpy(c), prior, nu))
        found, _ = constant(problem, None)
        assert found == pytest.approx(steep * 1.1 / nu / (1 - steep * 1.21 / nu), rel=1e-10)
        ratio = np.linalg.norm(solve(c) - solve(other), axis=1) / np.linalg.norm(c - other, axis=1)
        assert ratio.max() <= found
        local, _ = local_lipschitz(
            problem, torch.zeros(300, 4), torch.zeros(300).double(), 0.2, 1.0
        )
        assert local.shape == (300,)


def test_the_local_constant_widens_with_the_error_and_ends_at_the_global_one() -> None:
    w, c = scaled(5, 4, 0.8), randn(16, 5, seed=1)
    problem = Problem(NonNegative(), Gaussian(w, c, 0.5))
    z = torch.relu(randn(16, 4, seed=2))
    errors = torch.tensor([0.0, 1e-3, 1e-1, 1e2, math.inf], dtype=torch.float64)
    found = [local_lipschitz(problem, z, e.expand(16), 0.7, 1.0)[0] for e in errors]
    for tight, loose in itertools.pairwise(found):
        assert (tight <= loose).all()
    wanted = constant(problem, None)[0]
    torch.testing.assert_close(found[-1], torch.full_like(found[-1], wanted))


def test_a_polynomial_at_one_input_against_differences() -> None:
    """d = 2, offset 1, small c: z*(c) from the linear system (I − WᵀW − 2ccᵀ)z = 2c."""
    w = scaled(4, 4, 0.5).numpy()
    c = randn(50, 4, seed=8).numpy() * 0.1

    def solve(features: np.ndarray) -> np.ndarray:
        left = np.eye(4) - w.T @ w - 2 * features[:, :, None] * features[:, None, :]
        return np.linalg.solve(left, 2 * features[..., None])[..., 0]

    z = solve(c)
    problem = Problem(Free(), Polynomial(torch.from_numpy(w), torch.from_numpy(c), degree=2))
    m = problem.curvature().lower
    assert (m > 0).all()
    local, _ = local_lipschitz(
        problem, torch.from_numpy(z), torch.full((50,), 1e-12, dtype=torch.float64), m, 1.0
    )
    jacobian = np.stack([(solve(c + e) - solve(c - e)) / 2e-6 for e in np.eye(4) * 1e-6], -1)
    slope = np.linalg.norm(jacobian, 2, axis=(1, 2))
    assert (slope <= local.numpy() * (1 + 1e-6)).all()
    assert (local.numpy() <= 4 * slope).all()


class OwnWidth(eq.nn.EquilibriumLayer):
    """γ = e^{50x}, one for each sample."""

    def problem(self, x: torch.Tensor) -> Problem:
        gamma = LearnedGamma().bind(50.0 * x[:, 0])
        return Problem(Free(), Gaussian(0.5 * torch.ones(1, 1).to(x), x, gamma))

    def input_norm_upper(self) -> float:
        return 1.0


def test_a_gamma_of_each_sample_may_depend_on_the_input() -> None:
    x = torch.tensor([[0.1], [0.1 + 1e-6]], dtype=torch.float64)
    layer = OwnWidth(solver=eq.Picard(rtol=1e-13, max_steps=500))
    slope = float(layer(x).diff(dim=0).abs()) / 1e-6
    assert slope > 1.0
    found = eq.certify(layer, x)
    assert found.lipschitz is None or found.lipschitz >= slope
