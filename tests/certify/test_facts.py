"""Facts 2–6 (fact 1: test_gaussian.py) about Gaussian, linear and sigmoid layers, on random ones.

The oracle is numpy: A as one dense array of blocks, the map and seven proxes from their formulas,
and equilibria by the damped step to the last digit. Nothing here computes what the library does by
the way the library does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import Tensor

import equilibria as eq
from equilibria.certify import Guarantee, certify
from equilibria.problems.gamma import GammaPolicy
from equilibria.problems.operators import ConvOperator, DenseOperator, LinearOperator
from equilibria.problems.priors import Prior
from tests.certify.test_lipschitz import supremum
from tests.oracles import PROXES, Prox
from tests.problems.test_operators import conv_matrix
from tests.problems.test_patches import rows_by_loops

Array = np.ndarray
CONCAVITY = 2 * math.exp(-1.5)
THRESHOLD = math.sqrt(math.exp(1.5) / 2)  # μ below which the equilibrium is unique: 1.4969


@dataclass
class Case:
    """A Gaussian layer of our own (dense A, c̃) beside the library's."""

    operator: LinearOperator
    hidden: Tensor
    patches: eq.Patches | None
    state: tuple[int, ...]
    out: tuple[int, ...]
    blocks: Array  # A, [P, h, n]

    def features(self, c: Array) -> Array:
        """c [B, *out] → c̃ [B, P, h]."""
        if self.patches is None:
            rows = c.reshape(len(c), 1, -1)
        else:
            rows = rows_by_loops(c, self.patches.channels, self.patches.size)
        return rows @ self.hidden.numpy()

    def problem(self, prior: Prior, c: Array, gamma: Array | GammaPolicy) -> eq.Problem:
        kernel = gamma if isinstance(gamma, GammaPolicy) else torch.from_numpy(gamma)
        coupling = eq.Gaussian(
            self.operator, torch.from_numpy(c), kernel, patches=self.patches, hidden=self.hidden
        )
        return eq.Problem(prior, coupling)

    def tensor(self, z: Array) -> Tensor:
        return torch.from_numpy(z).reshape(len(z), *self.state)

    def step(self, z: Array, features: Array, gamma: Array, prox: Prox, tau: float = 1.0) -> Array:
        """T_τ from its formula. z [B, n]."""
        h = features - np.einsum("phn,bn->bph", self.blocks, z)
        weight = np.exp(-gamma[:, None] * np.square(h).sum(-1))
        pull = np.einsum("phn,bph,bp->bn", self.blocks, h, weight)
        return prox((1 - tau) * z + tau * pull, tau)

    def solve(self, c: Array, gamma: Array, prox: Prox, mu: float, z: Array | None = None) -> Array:
        """The equilibrium to the last digits, by T_τ with τ = 2/(m + L)."""
        tau = 2.0 / (2.0 + (1.0 - CONCAVITY) * mu**2)
        z = np.zeros((len(c), self.blocks.shape[2])) if z is None else z
        features = self.features(c)
        for _ in range(20000):
            new = self.step(z, features, gamma, prox, tau)
            moved = np.abs(new - z).max()
            z = new
            if moved <= 1e-15 * (1 + np.abs(z).max()):
                break
        return z


def make_case(kind: str, mu: float, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    if kind == "dense":
        weight = torch.from_numpy(rng.standard_normal((5, 4)))
        hidden = torch.from_numpy(rng.standard_normal((5, 3)))
        matrix = weight.numpy()
        blocks = (hidden.numpy().T @ matrix)[None]
        scale = mu / np.linalg.norm(blocks.reshape(-1, 4), 2)
        operator: LinearOperator = DenseOperator(weight * scale)
        return Case(operator, hidden, None, (4,), (5,), blocks * scale)
    patches = eq.Patches(channels=2, size=2)
    weight = torch.from_numpy(rng.standard_normal((4, 2, 3, 3)))
    hidden = torch.from_numpy(rng.standard_normal((8, 5)))
    matrix = conv_matrix(weight, 4, 4, padding=1)
    rows = rows_by_loops(matrix.T.reshape(-1, 4, 4, 4), 2, 2)  # [n, P, k]
    blocks = np.moveaxis(rows @ hidden.numpy(), 0, -1)
    scale = mu / np.linalg.norm(blocks.reshape(-1, blocks.shape[2]), 2)
    return Case(ConvOperator(weight * scale), hidden, patches, (2, 4, 4), (4, 4, 4), blocks * scale)


def draw_inputs(case: Case, seed: int, batch: int, gammas: Array | None = None) -> tuple:
    """c and γ, γ log-uniform from 1e-3 to 1e3, c such that γ‖c̃ᵢ‖² is about 0 to 6."""
    rng = np.random.default_rng(seed)
    gamma = 10 ** rng.uniform(-3, 3, batch) if gammas is None else gammas
    c = rng.standard_normal((batch, *case.out))
    energy = np.square(case.features(c)).sum(-1).mean(-1)
    wanted = rng.uniform(0, 6, batch)
    c *= np.sqrt(wanted / (gamma * energy)).reshape(-1, *[1] * (c.ndim - 1))
    return c, gamma


KINDS = ["dense", "conv"]
EVERY_PRIOR = pytest.mark.parametrize("name", list(PROXES)[:7])
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def flat(t: Tensor) -> Array:
    return t.flatten(1).numpy()


# Fact 2


@EVERY_KIND
@EVERY_PRIOR
def test_fact_2_the_map_contracts_with_factor_mu2_whatever_gamma(kind: str, name: str) -> None:
    prior, _ = PROXES[name]
    rng = np.random.default_rng(5)
    for seed, mu in enumerate([0.1, 0.5, 0.8, 0.95, 1.3, 3.0]):
        case = make_case(kind, mu, seed)
        c, gamma = draw_inputs(case, seed + 10, 128)
        problem = case.problem(prior, c, gamma)
        spread = 1.5 / np.sqrt(gamma)[:, None]
        a = rng.standard_normal((128, case.blocks.shape[2])) * spread
        b = a + rng.standard_normal(a.shape) * spread * 10 ** rng.uniform(-3, 0.5, (128, 1))
        moved = flat(problem.step(case.tensor(a)) - problem.step(case.tensor(b)))
        ratio = np.linalg.norm(moved, axis=1) / np.linalg.norm(a - b, axis=1)
        assert ratio.max() <= mu**2 * (1 + 1e-9)
        found = certify(problem, z=case.tensor(a))
        assert found.contraction >= mu**2
        if found.numbers.mu is not None and found.numbers.mu.upper < 1:
            assert set(found.kinds) == {Guarantee.contraction}
            assert found.contraction < 1
        if mu > 1:
            assert Guarantee.contraction not in found.kinds


def test_fact_2_the_factor_is_attained() -> None:
    """At s = 0 the derivative of T is exactly −WᵀW: two points around it show μ²."""
    w = torch.tensor([[0.9]], dtype=torch.float64)
    problem = eq.Problem(eq.Free(), eq.Gaussian(w, torch.zeros(1, 1, dtype=torch.float64), 2.0))
    a, b = (torch.full((1, 1), v, dtype=torch.float64) for v in (1e-5, -1e-5))
    ratio = float((problem.step(a) - problem.step(b)).abs() / 2e-5)
    assert ratio == pytest.approx(0.81, rel=1e-8)
    assert certify(problem, z=a).contraction == pytest.approx(0.81, rel=1e-12)


# Fact 3


@EVERY_KIND
@EVERY_PRIOR
def test_fact_3_one_equilibrium_from_many_starts_up_to_149(kind: str, name: str) -> None:
    prior, prox = PROXES[name]
    starts = 24
    for seed, mu in enumerate([1.2, 1.49] if kind == "dense" else [1.1, 1.4]):
        case = make_case(kind, mu, seed + 20)
        c, gamma = draw_inputs(case, seed + 30, 1, np.array([0.8]))
        rng = np.random.default_rng(seed)
        z = rng.standard_normal((starts, case.blocks.shape[2])) * 4
        many = np.repeat(c, starts, 0)
        found = case.solve(many, np.repeat(gamma, starts), prox, mu, z)
        assert np.abs(found - found[0]).max() <= 1e-11
        certificate = certify(case.problem(prior, c, gamma), z=case.tensor(found[:1]))
        if kind == "dense":  # μ is known exactly there
            assert certificate.unique
            assert certificate.kind is Guarantee.strong_convexity
            assert certificate.modulus == pytest.approx(1 - CONCAVITY * mu**2, abs=1e-12)
        assert certificate.smoothness >= 1 + mu**2


def test_fact_3_is_certified_up_to_the_threshold_and_not_beyond() -> None:
    c, z = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    for mu, certain in [(THRESHOLD * (1 - 1e-12), True), (THRESHOLD * (1 + 1e-12), False)]:
        w = torch.tensor([[mu]], dtype=torch.float64)
        assert certify(eq.Problem(eq.Free(), eq.Gaussian(w, c, 1.0)), z=z).unique is certain


def gap_beyond(z: Array) -> Array:
    """G′ of a layer of one unit just beyond the threshold, γ = 1: it has three zeros."""
    r = 1.880956005 - 1.55 * z
    return z - 1.55 * r * np.exp(-r * r)


def layer_beyond(z: Array, prior: Prior) -> tuple[eq.Problem, Tensor]:
    """The same of the library, for the states z [B]."""
    w = torch.tensor([[1.55]], dtype=torch.float64)
    c = torch.full((len(z), 1), 1.880956005, dtype=torch.float64)
    return eq.Problem(prior, eq.Gaussian(w, c, 1.0)), torch.from_numpy(z)[:, None]


def equilibria_beyond() -> Array:
    grid = np.linspace(0, 2, 4001)
    edges = np.nonzero(np.diff(np.sign(gap_beyond(grid))))[0]
    roots = [brentq(gap_beyond, grid[i], grid[i + 1], xtol=1e-15) for i in edges]
    np.testing.assert_allclose(roots, [0.2396931, 0.4203373, 0.5820372], atol=5e-8)
    return np.array(roots)


@pytest.mark.parametrize("prior", [eq.Free(), eq.NonNegative()], ids=["identity", "relu"])
def test_fact_3_three_equilibria_just_beyond_are_found_and_not_certified(prior: Prior) -> None:
    problem, z = layer_beyond(equilibria_beyond(), prior)
    found = certify(problem, z=z)
    assert not found.unique
    assert not found.certified.any()
    assert found.modulus < 0
    # The outer two are strict minimizers, proven to exist; the middle one is a maximum.
    assert found.kinds == (Guarantee.local, Guarantee.none, Guarantee.local)
    assert found.residual.max() < 1e-15
    assert found.error_bound[[0, 2]].max() < 1e-12
    assert found.error_bound[1] == math.inf
    assert found.lipschitz is None
    text = str(found)
    local = "local: one equilibrium within the bound below, a strict local minimizer; others may"
    assert f"{local} exist (2 of 3 samples)" in text
    assert "none: nothing is proven (1 of 3 samples)" in text
    assert "certified for 0 of 3 samples" in text


@given(st.floats(-30.0, 30.0))
@settings(max_examples=40, deadline=None)
def test_fact_3_a_local_guarantee_has_an_equilibrium_within_its_bound(at: float) -> None:
    """z = 10 used to be called a strict local minimizer, with an infinite bound."""
    roots = equilibria_beyond()
    states = np.array([at, 10.0, *(roots + 1e-5 * at)])
    problem, z = layer_beyond(states, eq.Free())
    found = certify(problem, z=z)
    assert found.kinds[1] is Guarantee.none
    for state, kind, bound in zip(states, found.kinds, found.error_bound.tolist(), strict=True):
        near = np.abs(roots - state) <= bound
        assert kind in (Guarantee.local, Guarantee.none)
        assert kind is Guarantee.none or near.sum() == 1
        if kind is Guarantee.local:
            root = roots[near][0]
            assert gap_beyond(root - 1e-6) < 0 < gap_beyond(root + 1e-6)  # a minimum of G


@EVERY_KIND
@EVERY_PRIOR
def test_fact_3_one_step_at_the_optimal_step_gains_the_stated_factor(kind: str, name: str) -> None:
    prior, prox = PROXES[name]
    rng = np.random.default_rng(9)
    for seed, mu in enumerate([0.4, 0.9, 1.2, 1.45]):
        case = make_case(kind, mu, seed + 40)
        c, gamma = draw_inputs(case, seed, 96)
        exact = case.solve(c, gamma, prox, mu)
        m, smooth = 1 - CONCAVITY * mu**2, 1 + mu**2
        far = rng.standard_normal(exact.shape) * 10 ** rng.uniform(-4, 1, (96, 1))
        problem = case.problem(prior, c, gamma)
        new = flat(problem.step(case.tensor(exact + far), 2 / (m + smooth)))
        ratio = np.linalg.norm(new - exact, axis=1) / np.linalg.norm(far, axis=1)
        assert ratio.max() <= (smooth - m) / (smooth + m) * (1 + 1e-6)


# Fact 4


@EVERY_KIND
@EVERY_PRIOR
def test_fact_4_the_error_bound_holds_at_any_iteration_count(kind: str, name: str) -> None:
    """384 cases a prior and kind, 5,376 in all: μ from 0.1 to 1.45, γ from 1e-3 to 1e3, 0 to 60
    steps of the map from a random start. In the contractive case at most 5.62 times the error."""
    prior, prox = PROXES[name]
    worst, loosest = 0.0, 0.0
    for seed, mu in enumerate([0.1, 0.5, 0.9, 0.99, 1.2, 1.45]):
        case = make_case(kind, mu, seed + 60)
        c, gamma = draw_inputs(case, seed + 70, 64)
        rng = np.random.default_rng(seed)
        exact = case.solve(c, gamma, prox, mu)
        z = exact + rng.standard_normal(exact.shape) / np.sqrt(gamma)[:, None]
        stop = rng.integers(0, 60, 64)
        features = case.features(c)
        for k in range(60):
            z = np.where((k < stop)[:, None], case.step(z, features, gamma, prox), z)
        found = certify(case.problem(prior, c, gamma), z=case.tensor(z))
        true = np.linalg.norm(z - exact, axis=1)
        bound = found.error_bound.numpy()
        known = 1e-13 * (1 + np.abs(exact).max(1))  # the oracle's own accuracy, times 1/m
        known = known / max(1 - CONCAVITY * mu**2, 0.05)
        if kind == "dense" or mu < 1.3:
            assert np.isfinite(bound).all()
        assert (true <= bound + known).all()
        clear = np.isfinite(bound) & (true > 1e4 * known)
        worst = max(worst, float((true[clear] / bound[clear]).max(initial=0.0)))
        if found.contraction < 1:
            loosest = max(loosest, float((bound[clear] / true[clear]).max(initial=0.0)))
    assert 0.5 < worst <= 1.0  # the bound is not only safe: some cases come close
    assert 1.0 <= loosest <= 5.62


def test_fact_4_the_factor_is_attained() -> None:
    """G quadratic on both sides (linear coupling, n = 1): bound and error agree."""
    for w in (0.3, 0.9, 0.99):
        weight = torch.tensor([[w]], dtype=torch.float64)
        c = torch.ones(1, 1, dtype=torch.float64)
        exact = 1 / (1 - w * w)
        z = torch.tensor([[exact + 0.1]], dtype=torch.float64)
        bound = float(certify(eq.Problem(eq.Free(), eq.Linear(weight, c)), z=z).error_bound[0])
        assert bound == pytest.approx(0.1, rel=1e-9)


# Fact 5


@pytest.mark.parametrize("mu", [0.1, 0.4, 0.6, 0.6188, 0.63, 0.7, 0.9, 0.9263, 0.93, 1.2, 1.45])
def test_fact_5_the_constant_is_the_supremum_and_two_patches_attain_it(mu: float) -> None:
    """n = 1, one patch at s = 0 and one at s = 1.5, the weight between them chosen best."""
    weights = np.linspace(0, 1, 2001)
    x = weights + (1 - weights) * CONCAVITY**2
    y = weights - (1 - weights) * CONCAVITY
    share = float(weights[np.argmax(mu * np.sqrt(x) / (1 + mu**2 * y))])
    a = mu * np.sqrt([share, 1 - share])
    gamma = 0.6
    h = np.array([0.0, math.sqrt(1.5 / gamma)])
    blocks = np.array([1.0, -CONCAVITY])  # e^{−s}(1 − 2s)
    start = float(a @ (np.exp(-gamma * h**2) * h))
    c = h + a * start
    best = a * blocks
    direction = best / np.linalg.norm(best)

    def equilibrium(features: Array) -> float:
        def gap(z: float) -> float:
            r = features - a * z
            return z - float(a @ (np.exp(-gamma * r**2) * r))

        return float(brentq(gap, -20, 20, xtol=1e-15))

    size = 1e-5
    slope = equilibrium(c + size * direction) - equilibrium(c - size * direction)
    attained = abs(slope) / (2 * size)

    operator = ConvOperator(torch.from_numpy(a).reshape(2, 1, 1, 1))
    coupling = eq.Gaussian(
        operator,
        torch.from_numpy(c).reshape(1, 2, 1, 1),
        gamma,
        patches=eq.Patches(channels=1, size=1),
    )
    z = torch.tensor([[[[start]]]], dtype=torch.float64)
    found = certify(eq.Problem(eq.Free(), coupling), z=z)
    assert found.lipschitz == pytest.approx(supremum(mu, CONCAVITY, 1.0, 1.0), rel=2e-5)
    assert found.lipschitz >= attained * (1 - 1e-8)
    assert attained >= 0.9995 * found.lipschitz
    assert float(found.lipschitz_local[0]) == pytest.approx(attained, rel=1e-3)


@dataclass
class PairLayer:
    """x → c = Ux + b → z*, with numpy's SVD for the norm of x → c̃."""

    case: Case
    prior: Prior
    gamma: Array | GammaPolicy
    u: Array  # [out, d]
    b: Array

    def problem(self, x: Tensor) -> eq.Problem:
        return self.case.problem(self.prior, self.features(x.numpy()), self.gamma)

    def features(self, x: Array) -> Array:
        return (x @ self.u.T + self.b).reshape(-1, *self.case.out)

    def energy(self, x: Array) -> Array:
        return np.square(self.case.features(self.features(x))).sum(-1).mean(-1)

    def equilibrium(self, x: Array, prox: Prox, mu: float) -> Array:
        """z* for γ by the rule, in numpy."""
        fixed = isinstance(self.gamma, eq.FixedGamma)
        gamma = np.full(len(x), self.gamma.value) if fixed else 0.2 / self.energy(x)
        return self.case.solve(self.features(x), gamma, prox, mu)

    def solve(self, x: Tensor) -> object:
        raise AssertionError("z is given in these tests")

    def input_norm_upper(self) -> float:
        columns = self.case.features(self.u.T.reshape(-1, *self.case.out))
        return float(np.linalg.norm(columns.reshape(len(columns), -1), 2))


def pairs(case: Case, seed: int, batch: int) -> tuple[Array, Array, Array, Array]:
    """U, b and pairs of inputs, close and far."""
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((math.prod(case.out), 6))
    b = rng.standard_normal(math.prod(case.out)) * rng.uniform(0, 2)
    x = rng.standard_normal((batch, 6)) * 10 ** rng.uniform(-1, 0.3, (batch, 1))
    other = x + rng.standard_normal(x.shape) * 10 ** rng.uniform(-4, 0.5, (batch, 1))
    return u, b, x, other


@EVERY_KIND
@pytest.mark.parametrize(
    ("name", "fixed"),
    [*((name, True) for name in list(PROXES)[:7]), ("relu", False), ("identity", False),
     ("tanh", False)],
)  # fmt: skip
def test_fact_5_the_bound_holds_for_a_fixed_gamma_and_the_mean_rule(
    kind: str, name: str, fixed: bool
) -> None:
    prior, prox = PROXES[name]
    worst = 0.0
    for seed, mu in enumerate([0.3, 0.6, 0.9, 1.2]):
        case = make_case(kind, mu, seed + 80)
        u, b, x, other = pairs(case, seed, 64)
        layer = PairLayer(case, prior, eq.MeanPatchEnergy(0.2), u, b)
        if fixed:
            scale = 10 ** np.random.default_rng(seed).uniform(-1, 0.5)
            layer.gamma = eq.FixedGamma(scale / float(layer.energy(x).mean()))
        z = layer.equilibrium(x, prox, mu)
        found = certify(layer, torch.from_numpy(x), case.tensor(z))
        assert found.lipschitz_in == "x"
        apart = np.linalg.norm(x - other, axis=1)
        ratio = np.linalg.norm(z - layer.equilibrium(other, prox, mu), axis=1) / apart
        assert ratio.max() <= found.lipschitz * (1 + 1e-6)
        worst = max(worst, ratio.max() / found.lipschitz)
        if kind == "dense":
            factor = 1 + 2 * (1.5 / math.e) ** 1.5 / math.sqrt(0.2)
            assert factor == pytest.approx(2.833, abs=1e-3)
            wanted, close = factor * mu / (1 - CONCAVITY * mu**2), 1e-9
            if fixed:
                wanted, close = supremum(mu, CONCAVITY, 1.0, 1.0), 1e-4
            assert found.lipschitz == pytest.approx(wanted * layer.input_norm_upper(), rel=close)
        if fixed:  # the local constant bounds the derivative: short pairs, up to their curvature
            local = found.lipschitz_local.numpy()
            assert (local <= found.lipschitz * (1 + 1e-12)).all()
            moved = z - layer.equilibrium(x + 1e-6 * (other - x) / apart[:, None], prox, mu)
            assert (np.linalg.norm(moved, axis=1) <= 1e-6 * local * (1 + 1e-3) + 1e-13).all()
    assert worst > 0.05


def test_fact_5_no_constant_for_the_min_rule() -> None:
    """P patches at s = 1.5 and one at the minimum that moves γ for all: slope grows like √P."""
    mu, scale = 0.6, 0.2
    ratios = []
    for count in (1, 4, 16, 64):
        a = np.append(np.full(count, mu / math.sqrt(count)), 0.0)
        h = np.append(np.full(count, math.sqrt(1.5)), math.sqrt(scale))
        start = float(a @ (np.exp(-(h**2)) * h))
        c = h + a * start

        def equilibrium(features: Array, a: Array = a) -> float:
            gamma = scale / np.square(features).min()

            def gap(state: float) -> float:
                r = features - a * state
                return state - float(a @ (np.exp(-gamma * r**2) * r))

            return float(brentq(gap, -20, 20, xtol=1e-15))

        assert equilibrium(c) == pytest.approx(start, abs=1e-12)
        bump = np.eye(count + 1) * 1e-6
        slopes = [(equilibrium(c + e) - equilibrium(c - e)) / 2e-6 for e in bump]
        ratios.append(np.linalg.norm(slopes) / (mu / (1 - CONCAVITY * mu**2)))

        operator = ConvOperator(torch.from_numpy(a).reshape(-1, 1, 1, 1))
        coupling = eq.Gaussian(
            operator,
            torch.from_numpy(c).reshape(1, -1, 1, 1),
            eq.MinPatchEnergy(scale),
            patches=eq.Patches(channels=1, size=1),
        )
        z = torch.full((1, 1, 1, 1), start, dtype=torch.float64)
        found = certify(eq.Problem(eq.NonNegative(), coupling), z=z)
        assert found.kind is Guarantee.contraction
        assert float(found.error_bound[0]) < 1e-12
        assert found.lipschitz is None
        assert "patches" in found.lipschitz_note
        assert "γ held fixed" in found.lipschitz_local_note
    growth = np.array(ratios) / np.sqrt([1, 4, 16, 64])
    assert growth.min() > 1.6
    assert growth.max() / growth.min() < 1.1


# Fact 6


@pytest.mark.parametrize("name", ["relu", "identity", "soft", "tanh"])
def test_fact_6_the_linear_layer(name: str) -> None:
    prior, prox = PROXES[name]
    rng = np.random.default_rng(0)
    for size in (0.2, 0.7, 0.97):
        w = rng.standard_normal((6, 4))
        w *= size / np.linalg.norm(w, 2)
        c, other = rng.standard_normal((2, 256, 4)) * 2
        z = []
        for features in (c, other):
            found = np.zeros_like(features)
            for _ in range(1500):
                found = prox(found @ w.T @ w + features, 1.0)
            z.append(found)
        off = rng.standard_normal(c.shape) * 10 ** rng.uniform(-6, 1, (256, 1))
        problem = eq.Problem(prior, eq.Linear(torch.from_numpy(w), torch.from_numpy(c)))
        got = certify(problem, z=torch.from_numpy(z[0] + off))
        assert got.kind is Guarantee.contraction
        assert got.modulus == pytest.approx(1 - size**2, abs=1e-12)
        assert got.contraction == pytest.approx(size**2, abs=1e-12)
        assert got.lipschitz == pytest.approx(1 / (1 - size**2), rel=1e-10)
        assert (np.linalg.norm(off, axis=1) <= got.error_bound.numpy() + 1e-11).all()
        ratio = np.linalg.norm(z[0] - z[1], axis=1) / np.linalg.norm(c - other, axis=1)
        assert ratio.max() <= got.lipschitz * (1 + 1e-9)


def test_fact_6_the_sigmoid_layer_is_unique_where_w2_and_c2_leave_room() -> None:
    """Per input: m = 1 − ‖W‖² − 4‖c‖²/(3√3); bounds hold where it is positive."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((5, 4))
    w *= 0.6 / np.linalg.norm(w, 2)
    c = rng.standard_normal((200, 4))
    c *= (rng.uniform(0, 1.5, 200) / np.linalg.norm(c, axis=1))[:, None]

    def solve(z: Array, c: Array) -> Array:
        for _ in range(4000):  # damped: converges beyond the contractive inputs too
            t = np.tanh((c * z).sum(1, keepdims=True))
            z = 0.5 * z + 0.5 * (z @ w.T @ w + (1 - t**2) * c)
        return z

    z = solve(np.zeros_like(c), c)
    off = rng.standard_normal(c.shape) * 10 ** rng.uniform(-6, 0, (200, 1))
    problem = eq.Problem(eq.Free(), eq.Sigmoidal(torch.from_numpy(w), torch.from_numpy(c)))
    found = certify(problem, z=torch.from_numpy(z + off))
    room = 1 - 0.36 - 4 / (3 * math.sqrt(3)) * np.square(c).sum(1)
    np.testing.assert_array_equal(found.certified.numpy(), room > 0)
    assert 50 < (room > 0).sum() < 150
    np.testing.assert_allclose(found.modulus.numpy(), room, atol=1e-12)
    bound = found.error_bound.numpy()
    assert np.isfinite(bound[room > 0]).all()
    assert (np.linalg.norm(off, axis=1) <= bound + 1e-10)[room > 0].all()
    assert found.lipschitz is None
    # Near z the equilibrium is known to be the only one for inputs beyond, too.
    near = z + 1e-4 * rng.standard_normal(z.shape)
    found = certify(problem, z=torch.from_numpy(near))
    bound = found.error_bound.numpy()
    assert (np.linalg.norm(near - z, axis=1) <= bound).all()
    assert bound[np.isfinite(bound)].max() < 0.05
    assert found.kinds.count(Guarantee.local) > 10
    # The local Lipschitz constant in c, against differences of the equilibrium.
    local = found.lipschitz_local.numpy()
    direction = rng.standard_normal(c.shape)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    slope = np.linalg.norm(solve(z, c + 1e-6 * direction) - z, axis=1) / 1e-6
    assert np.isfinite(local[room > 0]).all()
    assert (slope <= local * (1 + 1e-3))[np.isfinite(local)].all()
