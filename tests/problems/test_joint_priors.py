"""Priors that are not elementwise: against cvxpy, scikit-learn, and the laws of a prox."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import isotonic_regression
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from equilibria.problems import Activated, JointPrior, WithL1
from tests.optional import optional
from tests.problems.test_operators import randn

cp = optional("cvxpy")

NORMAL = [1.0, -2.0, 0.5, 0.0, 1.0, 0.7]


class Case(NamedTuple):
    prior: JointPrior
    shape: tuple[int, ...]  # of a state
    modeled: Callable[[Any], tuple[Any, list[Any]]]  # for cvxpy: f(z), and constraints


def _entropy(z: Any) -> tuple[Any, list[Any]]:
    return -0.4 * cp.sum(cp.entr(z)), [cp.sum(z) == 1]


CASES = {
    "simplex": Case(eq.Simplex(), (6,), lambda z: (0, [z >= 0, cp.sum(z) == 1])),
    "simplex-columns": Case(
        eq.Simplex(total=2.5, dim=1), (4, 2), lambda z: (0, [z >= 0, cp.sum(z, axis=0) == 2.5])
    ),
    "entropy": Case(eq.Entropy(0.4), (6,), _entropy),
    "half-space": Case(
        eq.HalfSpace(torch.tensor([NORMAL], dtype=torch.float64), 0.3),
        (6,),
        lambda z: (0, [z @ np.array(NORMAL) <= 0.3]),
    ),
    "ball": Case(eq.Ball(0.8), (2, 3), lambda z: (0, [cp.norm(z, "fro") <= 0.8])),
    "ball-rows": Case(eq.Ball(0.8, dim=-1), (2, 3), lambda z: (0, [cp.norm(z, axis=1) <= 0.8])),
    "group": Case(eq.GroupSoftThreshold(0.7), (6,), lambda z: (0.7 * cp.norm(z), [])),
    "group-columns": Case(
        eq.GroupSoftThreshold(0.7, dim=1), (3, 4), lambda z: (0.7 * cp.sum(cp.norm(z, axis=0)), [])
    ),
    "nuclear": Case(eq.NuclearNorm(0.6), (3, 4), lambda z: (0.6 * cp.normNuc(z), [])),
    "nuclear-tall": Case(eq.NuclearNorm(0.6), (4, 2), lambda z: (0.6 * cp.normNuc(z), [])),
    "tv": Case(eq.TotalVariation(0.3), (9,), lambda z: (0.3 * cp.sum(cp.abs(cp.diff(z))), [])),
    "tv-columns": Case(
        eq.TotalVariation(0.3, dim=1),
        (5, 2),
        lambda z: (0.3 * cp.sum(cp.abs(z[1:, :] - z[:-1, :])), []),
    ),
    "isotonic": Case(eq.Isotonic(), (9,), lambda z: (0, [cp.diff(z) >= 0])),
}
SETS = ("simplex", "simplex-columns", "half-space", "ball", "ball-rows", "isotonic")
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def state(case: Case, batch: int = 3, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * randn(batch, *case.shape, seed=seed)


# --- against cvxpy and scikit-learn -------------------------------------------------------------


@each
@pytest.mark.parametrize("tau", [0.3, 1.0, 4.0])
def test_prox_is_the_minimizer_of_cvxpy(case: Case, tau: float) -> None:
    v = state(case, seed=1)
    got = case.prior.prox(v, tau)
    for row, found in zip(v.numpy(), got.numpy(), strict=True):
        z = cp.Variable(case.shape)
        f, constraints = case.modeled(z)
        cost = f + cp.sum_squares(z - row) / (2 * tau)
        cp.Problem(cp.Minimize(cost), constraints).solve(solver=cp.CLARABEL)
        # An interior point stops at a gap of about 1e-8, its square root in z.
        assert np.abs(found - z.value).max() < 2e-4


@each
def test_value_is_that_of_cvxpy(case: Case) -> None:
    z = case.prior.prox(state(case, seed=2))
    for row, got in zip(z.numpy(), case.prior.value(z).tolist(), strict=True):
        variable = cp.Variable(case.shape)
        f, constraints = case.modeled(variable)
        variable.value = row
        assert got == pytest.approx(0.0 if isinstance(f, int) else float(f.value), abs=1e-12)
        assert all(c.value(1e-9) for c in constraints)


@pytest.mark.parametrize("name", [*SETS, "entropy"])
def test_value_is_infinite_outside(name: str) -> None:
    case = CASES[name]
    z = case.prior.prox(3 * state(case, seed=2))
    step = torch.linspace(1, -1, z[0].numel(), dtype=torch.float64).reshape(z.shape[1:])
    if name == "half-space":
        step = 1e9 * torch.tensor(NORMAL, dtype=torch.float64)
    if name == "entropy":
        step = torch.ones(6, dtype=torch.float64)
    outside = z + 1e-6 * step + (z if name.startswith("ball") else 0.0)
    assert bool(case.prior.value(outside).isinf().all())
    assert bool(case.prior.value(case.prior.into_domain(outside)).isfinite().all())
    assert bool(case.prior.least_subgradient(outside, z).isinf().all())


@pytest.mark.parametrize("n", [1, 2, 5, 300])
def test_isotonic_is_that_of_scikit_learn(n: int) -> None:
    v = randn(4, n, seed=3) + torch.linspace(0, 2, n, dtype=torch.float64)
    want = np.stack([isotonic_regression(row) for row in v.numpy()])
    np.testing.assert_allclose(eq.Isotonic().prox(v).numpy(), want, atol=1e-13)


@pytest.mark.parametrize("lam", [0.0, 1e-3, 0.2, 3.0, 1e3])
@pytest.mark.parametrize("n", [1, 2, 3, 64, 501])
def test_total_variation_satisfies_its_optimality_conditions(n: int, lam: float) -> None:
    """z = v - D'u with |u| <= lam, and u = lam sign(Dz) where z jumps; ties and steps included."""
    rows = [randn(1, n, seed=4), randn(1, n, seed=5).round(), randn(1, n, seed=6).cumsum(1)]
    rows.append(torch.arange(n, dtype=torch.float64)[None] % 7)
    rows.append(1e8 + randn(1, n, seed=7))
    v = torch.cat(rows)
    z = eq.TotalVariation(lam).prox(v)
    dual = (v - z).cumsum(1)
    off = 1e-13 * (1 + v.abs().amax(1, keepdim=True)) * n
    assert bool((dual[:, -1:].abs() <= off).all())
    dual, jump = dual[:, :-1], z.diff(dim=1)
    assert bool((dual.abs() <= lam + off).all())
    real = jump.abs() > 1e-12 * v.abs().amax(1, keepdim=True)
    assert bool(((dual + lam * jump.sign()).abs() <= off)[real].all())


def test_long_signals_in_float32() -> None:
    v = randn(3, 3000, seed=21).cumsum(1).float()
    for prior in (eq.TotalVariation(1e-4), eq.TotalVariation(0.3), eq.Isotonic()):
        off = (prior.prox(v).double() - prior.prox(v.double())).abs().max()
        assert float(off) <= 1e-7 * float(v.abs().max())


def test_the_entropy_prox_is_softmax_for_a_large_weight_and_a_projection_for_a_small_one() -> None:
    v = randn(5, 40, seed=8)
    got = eq.Entropy(1e9).prox(1e9 * v)
    torch.testing.assert_close(got, v.softmax(-1), rtol=1e-6, atol=1e-9)
    small = eq.Entropy(1e-12).prox(v)
    torch.testing.assert_close(small, eq.Simplex().prox(v), rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    log_weight=st.floats(-9, 4),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_the_entropy_prox_is_stationary(n: int, log_weight: float, scale: float, seed: int) -> None:
    prior, v = eq.Entropy(10.0**log_weight), scale * randn(2, n, seed=seed)
    z = prior.prox(v)
    assert bool(((z.sum(1) - 1).abs() < 1e-14 * n).all())
    off = prior.least_subgradient(z, z - v).abs().max()
    assert float(off) <= 1e-13 * (1 + scale * 10 + 10.0**log_weight * 30)


# --- the laws of a prox -------------------------------------------------------------------------


@each
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    log_tau=st.floats(-4, 3),
    log_scale=st.floats(-3, 3),
    near=st.booleans(),
)
def test_prox_is_firmly_nonexpansive_stays_in_the_domain_and_minimizes(
    case: Case, seed: int, log_tau: float, log_scale: float, near: bool
) -> None:
    scale, tau = 10.0**log_scale, 10.0**log_tau
    v, w = (state(case, 2, seed + k, scale) for k in (0, 1))
    z = case.prior.prox(v, tau)
    assert bool(case.prior.value(z).isfinite().all())
    dv = (-1e-3 * w if near else v - w).flatten(1)
    dz = (z - case.prior.prox(v - dv.reshape(v.shape), tau)).flatten(1)
    slack = 1e-11 * (1 + scale) * (dv.norm(dim=1) + dz.norm(dim=1) + 1e-6)
    assert bool(((dz * dz).sum(1) <= (dz * dv).sum(1) + slack).all())

    def cost(point: Tensor) -> Tensor:
        return case.prior.value(point) + ((point - v) ** 2).flatten(1).sum(1) / (2 * tau)

    other = case.prior.prox(z + (1e-2 if near else 1.0) * w, 1e-3)
    strong = ((other - z) ** 2).flatten(1).sum(1) / (2 * tau)  # by strong convexity
    size = 1 + cost(z).abs() + scale * scale / tau
    assert bool((cost(z) + strong <= cost(other) + 1e-10 * size).all())
    least = case.prior.least_subgradient(z, (z - v) / tau).flatten(1).norm(dim=1)
    assert bool((least <= 1e-10 * (1 + scale) / tau + 1e-10).all())


@each
@pytest.mark.parametrize("seed", range(6))
def test_least_subgradient_is_the_slope_of_steepest_descent(case: Case, seed: int) -> None:
    """dist(0, df(z) + g) = lim |z - prox_{t f}(z - t g)|/t as t -> 0, at a z on a kink."""
    z = case.prior.prox(state(case, 2, seed), 1.0)
    g = state(case, 2, seed + 7)
    least = case.prior.least_subgradient(z, g)
    t = 1e-8
    moved = (z - case.prior.prox(z - t * g, t)) / t
    if isinstance(case.prior, eq.Entropy) and float(z.min()) < 0.05:
        return  # its derivative changes within t
    torch.testing.assert_close(moved, least, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(torch.float32, (1e-30, 1e25)), (torch.float64, (1e-250, 1e200))],
    ids=["float32", "float64"],
)
def test_norms_at_any_scale(dtype: torch.dtype, scales: tuple[float, ...]) -> None:
    """Squares of these numbers leave the dtype."""
    v = 2 * randn(3, 6, seed=11)
    length = v.norm(dim=1, keepdim=True)
    for s in scales:
        given = (v * s).to(dtype)
        ball, shrunk = eq.Ball(s).prox(given), eq.GroupSoftThreshold(0.5 * s).prox(given)
        torch.testing.assert_close(ball.double() / s, v / length, atol=1e-6, rtol=0)
        torch.testing.assert_close(shrunk.double() / s, v - 0.5 * v / length, atol=1e-6, rtol=0)
        least = eq.GroupSoftThreshold(0.5 * s).least_subgradient(given, given)
        torch.testing.assert_close(least.double() / s, v + 0.5 * v / length, atol=1e-6, rtol=0)
        ramp = torch.arange(6, dtype=dtype).expand(3, 1, 6) * s
        ends = torch.tensor([-0.5, 0.0, 0.0, 0.0, 0.0, 0.5], dtype=torch.float64)
        for total in (eq.TotalVariation(0.5 * s), eq.TotalVariation2d(0.5 * s)):
            least = total.least_subgradient(ramp, 0 * ramp)
            torch.testing.assert_close(least.double() / s, ends.expand(3, 1, 6), atol=1e-6, rtol=0)
        normal = torch.tensor([NORMAL], dtype=torch.float64)
        over = (v @ normal.mT - 0.3).clamp(min=0.0) / normal.square().sum()
        inside = eq.HalfSpace((normal * s).to(dtype), 0.3 * s).prox(v.to(dtype)).double()
        torch.testing.assert_close(inside, v - over * normal, atol=1e-6, rtol=0)
    small, large = scales
    far = eq.Ball(small).prox((v * large).to(dtype)).double() / small
    torch.testing.assert_close(far, v / length, atol=1e-6, rtol=0)


@pytest.mark.parametrize("tau", [0.4, 1.0, 2.5])
def test_moreau_identity(tau: float) -> None:
    """prox_{tau f}(v) + tau prox_{f*/tau}(v/tau) = v, with the prox of f* from other priors."""
    v = 2 * randn(4, 6, seed=9)
    ball = eq.Ball(0.7).prox(v / tau)
    torch.testing.assert_close(eq.GroupSoftThreshold(0.7).prox(v, tau) + tau * ball, v)
    matrix = 2 * randn(4, 3, 5, seed=10)
    u, sigma, vh = torch.linalg.svd(matrix / tau, full_matrices=False)
    spectral = u @ torch.diag_embed(sigma.clamp(max=0.7)) @ vh  # the ball of the spectral norm
    torch.testing.assert_close(eq.NuclearNorm(0.7).prox(matrix, tau) + tau * spectral, matrix)
    # The polar of the monotone cone: cumulative sums that are not negative, total 0.
    rest = v - eq.Isotonic().prox(v)
    sums = rest.cumsum(1)
    assert bool((sums[:, :-1] >= -1e-13).all())
    torch.testing.assert_close(sums[:, -1], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(eq.Isotonic().prox(rest), torch.zeros_like(rest))


@each
def test_projections_repeat_and_do_not_depend_on_the_batch(case: Case) -> None:
    v = state(case, seed=11)
    z = case.prior.prox(v)
    for k in range(3):
        torch.testing.assert_close(case.prior.prox(v[k : k + 1])[0], z[k], rtol=0, atol=0)
    if any(case is CASES[name] for name in SETS):
        torch.testing.assert_close(case.prior.prox(z), z, atol=1e-14, rtol=1e-14)
        torch.testing.assert_close(case.prior.prox(v, 7.0), z, rtol=0, atol=0)
    v[1].view(-1)[2] = math.nan
    spoiled = case.prior.prox(v)
    torch.testing.assert_close(spoiled[[0, 2]], z[[0, 2]], rtol=0, atol=0)
    assert bool(spoiled[1].isnan().any())


@pytest.mark.parametrize("per", ["number", "sample", "channel"])
def test_maps_of_features(per: str) -> None:
    """[B, C, H, W]: along rows, over the channels of a pixel, with a weight of each kind."""
    v = randn(2, 3, 4, 5, seed=20)
    weight = {"number": torch.tensor(0.3), "sample": torch.tensor([0.2, 0.6])}.get(
        per, torch.tensor([[0.2, 0.4, 0.6]])
    )
    weight = weight.double()
    full = weight.reshape(*weight.shape, *[1] * (2 - weight.ndim)).expand(2, 3)
    got = eq.TotalVariation(weight, dim=2).prox(v)
    for b in range(2):
        for c in range(3):
            one = eq.TotalVariation(float(full[b, c])).prox(v[b, c].T).T
            torch.testing.assert_close(got[b, c], one)
    if per == "channel":
        with pytest.raises(ValueError, match="weight"):
            eq.GroupSoftThreshold(weight, dim=1).prox(v)
        return
    pixels = v.permute(0, 2, 3, 1).reshape(2, 20, 3)
    makers: list[Callable[[Any, int], JointPrior]] = [
        lambda t, d: eq.Simplex(t, dim=d),
        lambda t, d: eq.Entropy(t, dim=d),
        lambda t, d: eq.GroupSoftThreshold(t, dim=d),
        lambda t, d: eq.Ball(t, dim=d),
    ]
    for make in makers:
        got = make(weight, 1).prox(v).permute(0, 2, 3, 1).reshape(2, 20, 3)
        for b in range(2):
            torch.testing.assert_close(got[b], make(float(full[b, 0]), 1).prox(pixels[b]))


# --- derivatives --------------------------------------------------------------------------------


@each
def test_prox_has_right_derivatives(case: Case) -> None:
    v = state(case, 2, seed=12, scale=1.3).requires_grad_()
    tau = torch.tensor([0.6, 1.4], dtype=torch.float64, requires_grad=True)
    check = {"eps": 1e-7, "atol": 1e-5}
    assert gradcheck(case.prior.prox, (v, tau), **check, check_forward_ad=True)
    if isinstance(case.prior, eq.NuclearNorm):
        out = case.prior.prox(v, tau)
        (slope,) = torch.autograd.grad(out.sum(), v, create_graph=True)
        with pytest.raises(NotImplementedError, match="once"):
            slope.sum().backward()
        with pytest.raises(NotImplementedError, match="once"):
            torch.func.hessian(lambda v: case.prior.prox(v).square().sum())(v.detach())
    else:
        assert gradgradcheck(case.prior.prox, (v, tau), eps=1e-6, atol=1e-4)


LEARNED: dict[str, tuple[Callable[[Tensor], JointPrior], tuple[int, ...]]] = {
    "simplex": (lambda t: eq.Simplex(t), (6,)),
    "entropy": (lambda t: eq.Entropy(t), (6,)),
    "half-space": (lambda t: eq.HalfSpace(torch.ones(1, 6).double(), -t), (6,)),
    "ball": (lambda t: eq.Ball(t), (6,)),
    "group": (lambda t: eq.GroupSoftThreshold(t, dim=1), (3, 4)),
    "nuclear": (lambda t: eq.NuclearNorm(t), (3, 4)),
    "tv": (lambda t: eq.TotalVariation(t), (9,)),
}


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_parameters_may_be_tensors(name: str, per_sample: bool) -> None:
    make, shape = LEARNED[name]
    v = 1.5 * randn(3, *shape, seed=13)
    numbers = [0.3, 0.7, 0.5] if per_sample else [0.4]
    t = torch.tensor(numbers, dtype=torch.float64).squeeze().requires_grad_()
    got = make(t).prox(v)
    for k in range(3):
        one = make(t.detach()[k : k + 1] if per_sample else t.detach())
        torch.testing.assert_close(got[k : k + 1], one.prox(v[k : k + 1]))
    assert gradcheck(lambda v, t: make(t).prox(v), (v.requires_grad_(), t), eps=1e-7, atol=1e-5)


def test_nuclear_norm_differentiates_at_equal_and_zero_singular_values() -> None:
    x = torch.diag_embed(torch.tensor([[2.0, 2.0, 0.1, 0.0]], dtype=torch.float64))
    x.requires_grad_()
    assert gradcheck(eq.NuclearNorm(0.5).prox, x, eps=1e-6, atol=1e-5)


@each
def test_vmap(case: Case) -> None:
    v = state(case, 2, seed=14)
    stacked = torch.stack([v, 2 * v, v - 0.3])
    want = torch.stack([case.prior.prox(part) for part in stacked])
    torch.testing.assert_close(torch.func.vmap(case.prior.prox)(stacked), want)
    rows = torch.func.jacrev(case.prior.prox)(v)
    columns = torch.func.jacfwd(case.prior.prox)(v)
    torch.testing.assert_close(rows, columns)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile() -> None:
    points = [state(case, 2, seed=14) for case in CASES.values()]

    def proxes(points: list[Tensor]) -> list[Tensor]:
        return [case.prior.prox(v) for case, v in zip(CASES.values(), points, strict=True)]

    torch.compiler.reset()
    compiled = torch.compile(proxes, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(points), proxes(points))


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(case: Case, dtype: torch.dtype) -> None:
    v = state(case, seed=15).to(dtype)
    prior = case.prior
    if isinstance(prior, eq.HalfSpace):
        prior = eq.HalfSpace(torch.tensor([NORMAL]), 0.3)
    got = prior.prox(v)
    assert got.dtype == dtype
    assert (
        float((got.double() - case.prior.prox(v.double())).abs().max()) < 8 * torch.finfo(dtype).eps
    )
    for answer in (prior.value(got), prior.least_subgradient(got, v)):
        assert answer.dtype == torch.float32
        assert bool(answer.isfinite().all())
    moved = prior.into_domain(v)
    assert bool(prior.value(moved).isfinite().all())


# --- in problems and certificates ---------------------------------------------------------------


def pull(c: Tensor) -> eq.LeastSquares:
    """``q(z) = |z|^2/4 - <c, z>``, and a constant."""
    return eq.LeastSquares(None, 2.0 * c, weight=0.5)


@each
def test_minimize_and_certificate(case: Case) -> None:
    """Stationary, the bound on the error holds, and nothing is called proven that is not."""
    c = state(case, seed=17)
    problem = eq.Problem(case.prior, pull(c))
    sol = eq.minimize(problem, solver=eq.Picard(rtol=1e-13, max_steps=500))
    torch.testing.assert_close(sol.value, case.prior.prox(c / 1.5, 1 / 1.5), atol=1e-11, rtol=0)
    assert float(problem.stationarity(problem.step(sol.value)).max()) < 1e-9
    far = problem.into_domain(sol.value + 0.05 * state(case, seed=18))
    found = eq.certify(problem, z=far)
    distance = (far - sol.value).flatten(1).norm(dim=1)
    assert bool((distance <= found.error_bound + 1e-10).all())
    assert bool(found.error_bound.isfinite().all())
    assert not found.rigorous
    assert any("rounding is an estimate" in note for note in found.notes)


def test_what_needs_an_elementwise_prior_refuses() -> None:
    simplex, c = eq.Simplex(), randn(3, 6, seed=19)
    for make in (
        lambda: WithL1(simplex, 0.1),
        lambda: eq.Problem(simplex, pull(c), eq.L1(0.1)),
        lambda: Activated(torch.eye(6, dtype=torch.float64), c, simplex),
        lambda: eq.nn.GEQ(6, 6, prior=simplex),
        lambda: eq.nn.OptEq(6, 6, prior=simplex),
        lambda: simplex.subdifferential(c),
    ):
        with pytest.raises(TypeError, match="Simplex"):
            make()
    smooth = eq.Problem(simplex, pull(c), eq.L1(0.1), regularize="prox")
    assert bool(eq.minimize(smooth).value.isfinite().all())


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda v: eq.Simplex(dim=0).prox(v), ["Simplex", "dim=0", "batch"]),
        (lambda v: eq.TotalVariation(dim=5).prox(v), ["TotalVariation", "dim=5", "(3, 6)"]),
        (lambda v: eq.Ball(dim=(0, 1)).prox(v), ["Ball", "dim=(0, 1)"]),
        (lambda v: eq.NuclearNorm().prox(v), ["NuclearNorm", "(3, 6)"]),
        (lambda v: eq.TotalVariation(-1.0), ["TotalVariation", "weight", "-1.0"]),
        (lambda v: eq.TotalVariation(torch.tensor([0.1, -0.2])), ["weight", "-0.2", "softplus"]),
        (lambda v: eq.TotalVariation(torch.ones(1, 6)).prox(v), ["weight", "(1, 6)", "(3, 1)"]),
        (lambda v: eq.Entropy(0.0), ["Entropy", "weight", "0.0"]),
        (lambda v: eq.Simplex(0.0), ["Simplex", "total"]),
        (lambda v: eq.HalfSpace(0), ["HalfSpace", "normal"]),
        (lambda v: eq.HalfSpace(torch.zeros(1, 6)), ["HalfSpace", "normal", "0"]),
        (lambda v: eq.HalfSpace(1.0, torch.ones(3, 6)).prox(v), ["HalfSpace", "offset", "(3, 6)"]),
        (lambda v: eq.Simplex().prox(v, torch.ones(3, 6)), ["tau", "(3, 6)", "one per sample"]),
        (lambda v: eq.Isotonic().prox(v, 0.0), ["tau", "0.0"]),
    ],
)
def test_bad_options_are_named(make: Callable[[Tensor], object], names: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make(randn(3, 6))
    assert all(name in str(error.value) for name in names), str(error.value)
