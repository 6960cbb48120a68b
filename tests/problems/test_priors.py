"""Priors against functions written apart from them, minimized and integrated numerically."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import spence, xlogy
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from equilibria.problems import Prior, WithL1

Scalar = Callable[[float], float]


class Case(NamedTuple):
    prior: Prior
    f: Scalar  # written here, with numpy and scipy alone
    sigma: Scalar
    domain: tuple[float, float]


def _inside(low: float, high: float, f: Scalar) -> Scalar:
    return lambda z: f(z) if low <= z <= high else math.inf


def _tanh_f(z: float) -> float:
    return float(0.5 * (xlogy(1 + z, 1 + z) + xlogy(1 - z, 1 - z) - z * z))


def _logistic_f(z: float) -> float:
    return float(xlogy(z, z) + xlogy(1 - z, 1 - z) - 0.5 * z * z)


def _softplus_f(z: float) -> float:
    return float(spence(-math.expm1(-z)))  # scipy's spence(1 - x) is Li_2(x)


INF = math.inf
SMOOTH = {
    "tanh": Case(eq.Tanh(), _inside(-1, 1, _tanh_f), math.tanh, (-1, 1)),
    "logistic": Case(
        eq.Logistic(), _inside(0, 1, _logistic_f), lambda v: 0.5 + 0.5 * math.tanh(v / 2), (0, 1)
    ),
    "softplus": Case(
        eq.Softplus(), _inside(0, INF, _softplus_f), lambda v: float(np.logaddexp(v, 0)), (0, INF)
    ),
}


def linear_on(low: float, high: float, slope: float = 0.0) -> dict[str, object]:
    """f, sigma and the domain of f(z) = slope z on [low, high]."""
    return {
        "f": _inside(low, high, lambda z: slope * z),
        "sigma": lambda v: min(max(v - slope, low), high),
        "domain": (low, high),
    }


CASES = {
    "free": Case(eq.Free(), **linear_on(-INF, INF)),  # type: ignore[arg-type]
    "relu": Case(eq.NonNegative(), **linear_on(0, INF)),  # type: ignore[arg-type]
    "box": Case(eq.Box(-0.3, 1.2), **linear_on(-0.3, 1.2)),  # type: ignore[arg-type]
    "half-box": Case(eq.Box(-INF, 0.7), **linear_on(-INF, 0.7)),  # type: ignore[arg-type]
    "shifted": Case(eq.ShiftedNonNegative(0.4), **linear_on(0, INF, 0.4)),  # type: ignore[arg-type]
    "shifted-left": Case(eq.ShiftedNonNegative(-0.7), **linear_on(0, INF, -0.7)),  # type: ignore[arg-type]
    "soft": Case(
        eq.SoftThreshold(0.4),
        lambda z: 0.4 * abs(z),
        lambda v: math.copysign(max(abs(v) - 0.4, 0), v),
        (-INF, INF),
    ),
    "leaky": Case(
        eq.LeakyNonNegative(0.2),
        lambda z: 0.5 * (1 / 0.2 - 1) * min(z, 0) ** 2,
        lambda v: v if v > 0 else 0.2 * v,
        (-INF, INF),
    ),
    **SMOOTH,
}
# f + w|z| has no activation of its own to compare with; everything else applies.
SUMS = {
    f"{name}+l1": Case(
        WithL1(case.prior, 0.25),
        lambda z, f=case.f: f(z) + 0.25 * abs(z),  # type: ignore[misc]
        math.nan,  # type: ignore[arg-type]
        case.domain,
    )
    for name, case in CASES.items()
}
ALL = {**CASES, **SUMS}
TAUS = (1e-3, 0.1, 0.9, 1.0, 3.0, 1e3)

each = pytest.mark.parametrize("case", ALL.values(), ids=ALL)
each_plain = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_smooth = pytest.mark.parametrize("case", SMOOTH.values(), ids=SMOOTH)


def t64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def interior(case: Case) -> list[float]:
    low, high = max(case.domain[0], -4.0), min(case.domain[1], 4.0)
    return [low + (high - low) * k / 41 for k in range(1, 41)]


@each
def test_value_is_f_and_infinite_outside(case: Case) -> None:
    points = [*interior(case), -5.0, -1.0, 0.0, 1.0, 1.2, 1.2000001, -0.3, 0.7, 5.0]
    got = case.prior.value(t64(*points))
    want = t64(*(case.f(z) for z in points))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


def test_softplus_value_is_the_dilogarithm_to_full_accuracy() -> None:
    points = [*np.logspace(-12, 2, 60), math.log(2), math.nextafter(math.log(2), 1), 1e4]
    got = eq.Softplus().value(t64(*points))
    with mp.workdps(30):
        want = t64(*(float(mp.polylog(2, mp.exp(-mp.mpf(z)))) for z in points))
    torch.testing.assert_close(got, want, rtol=2e-15, atol=1e-300)


@each
@pytest.mark.parametrize("tau", TAUS)
def test_prox_minimizes(case: Case, tau: float) -> None:
    """Against a bounded scalar minimizer of f(z) + (z - v)^2 / (2 tau)."""
    points = [-30.0, -2.1, -1.0, -0.41, -0.1, 0.0, 0.2, 0.65, 1.0, 1.7, 30.0]
    got = case.prior.prox(t64(*points), tau)
    for v, z in zip(points, got.tolist(), strict=True):
        low = max(case.domain[0], -1.0 - abs(v) - 10 * tau)
        high = min(case.domain[1], 1.0 + abs(v) + 10 * tau)

        def objective(x: float, v: float = v) -> float:
            return tau * case.f(x) + 0.5 * (x - v) ** 2

        best = minimize_scalar(objective, bounds=(low, high), options={"xatol": 1e-12}).x
        # The minimizer cannot see below sqrt(eps); that our z is no worse is seen exactly.
        assert abs(z - best) < 3e-6 * max(1.0, abs(v), min(tau, 1e3) ** 0.5)
        # f itself is rounded here, at about 1e-16, and the objective carries tau f.
        assert objective(z) <= objective(best) + 1e-15 * max(100.0, abs(objective(best)), tau)


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_prox_solves_its_equation_to_the_last_digit(name: str) -> None:
    """For tau over 24 decades and v to 1e4, against bisection with 40 digits."""
    sigma = {
        "tanh": mp.tanh,
        "logistic": lambda u: 1 / (1 + mp.exp(-u)),
        "softplus": lambda u: mp.log1p(mp.exp(u)) if u < 90 else u + mp.exp(-u),
    }[name]
    rng = np.random.default_rng(0)
    taus = np.exp(rng.uniform(math.log(1e-12), math.log(1e12), 160))
    vs = np.where(rng.random(160) < 0.5, rng.uniform(-3, 3, 160), rng.uniform(-1e4, 1e4, 160))
    vs[:24] = rng.choice([1.0, -1.0, 1 - 1e-9, 1 + 1e-9, 0.0, 1e-8, 0.5], 24)
    got = SMOOTH[name].prior.prox(torch.tensor(vs), torch.tensor(taus))
    with mp.workdps(40):
        for v, tau, z in zip(vs.tolist(), taus.tolist(), got.tolist(), strict=True):
            t, target = mp.mpf(tau), mp.mpf(v)
            width = abs((1 - t) * (sigma(target) - target)) / min(mp.mpf(1), t) + mp.mpf(1e-30)
            low, high = target - width, target + width
            for _ in range(160):
                middle = (low + high) / 2
                above = t * middle + (1 - t) * sigma(middle) > target
                low, high = (low, middle) if above else (middle, high)
            want = float(sigma((low + high) / 2))
            assert abs(z - want) <= 4e-16 * max(1.0, abs(want)), (v, tau)


@each_plain
def test_activation_is_the_known_function(case: Case) -> None:
    points = [-1e4, -40.0, -3.0, -0.4, -0.1, 0.0, 0.3, 0.4, 1.0, 2.5, 25.0, 40.0, 1e4]
    want = t64(*(case.sigma(v) for v in points))
    torch.testing.assert_close(case.prior.activation(t64(*points)), want, rtol=1e-14, atol=1e-15)
    ones = torch.ones(len(points), dtype=torch.float64)
    torch.testing.assert_close(case.prior.prox(t64(*points), ones), want, rtol=1e-14, atol=1e-15)


@each
@settings(max_examples=40, deadline=None)
@given(a=st.floats(-1e3, 1e3), b=st.floats(-1e3, 1e3), tau=st.floats(1e-6, 1e6), near=st.booleans())
def test_prox_is_firmly_nonexpansive(
    case: Case, a: float, b: float, tau: float, near: bool
) -> None:
    if near:
        b = a + 1e-3 * b
    z = case.prior.prox(t64(a, b), tau)
    assert bool(case.prior.value(z).isfinite().all())
    dz, dv = float(z[0] - z[1]), a - b
    slack = 1e-12 * (1 + abs(a) + abs(b) + abs(float(z[0])))
    assert dz * dz <= dz * dv + slack * (abs(dz) + abs(dv) + 1)


@each_plain
def test_expansion_is_the_largest_slope(case: Case) -> None:
    v = torch.linspace(-16, 16, 64001, dtype=torch.float64)
    slopes = case.prior.activation(v).diff() / v.diff()
    assert float(slopes.max()) == pytest.approx(case.prior.expansion, abs=1e-5)


@each
def test_subdifferential_has_the_one_sided_derivatives_at_its_ends(case: Case) -> None:
    kinks = [e for e in (-0.3, 0.0, 0.7, 1.2) if case.f(e) < INF and e not in SMOOTH_ENDS(case)]
    points = interior(case) + kinks
    lower, upper = case.prior.subdifferential(t64(*points))
    h = 1e-6
    for z, low, high in zip(points, lower.tolist(), upper.tolist(), strict=True):
        right, left = (case.f(z + h) - case.f(z)) / h, (case.f(z) - case.f(z - h)) / h
        assert high == pytest.approx(right, abs=2e-4) or (high == INF and right == INF)
        assert low == pytest.approx(left, abs=2e-4) or (low == -INF and left == -INF)
    outside = t64(*(e for e in (case.domain[0] - 0.1, case.domain[1] + 0.1) if math.isfinite(e)))
    lower, upper = case.prior.subdifferential(outside)
    assert bool((lower == INF).all() & (upper == -INF).all())


def distance(prior: Prior, z: Tensor, g: Tensor) -> Tensor:
    """dist(0, df(z) + g), entrywise."""
    lower, upper = prior.subdifferential(z)
    return torch.maximum(lower + g, -(upper + g)).clamp(min=0.0)


def SMOOTH_ENDS(case: Case) -> tuple[float, ...]:
    """Ends where the derivative is infinite, which differences cannot show."""
    plain = case.prior.prior if isinstance(case.prior, WithL1) else case.prior
    return case.domain if any(plain is c.prior for c in SMOOTH.values()) else ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@each_smooth
def test_a_saturated_activation_is_stationary(case: Case, dtype: torch.dtype) -> None:
    """sigma(v) rounds to an end of the domain, where v - z must still count as a subgradient."""
    v = torch.tensor([-1000.0, 1000.0], dtype=dtype)
    z = case.prior.activation(v)
    ends = [k for k in (0, 1) if math.isfinite(case.domain[k])]
    assert all(float(z[k]) == case.domain[k] for k in ends)
    residual = distance(case.prior, z, z - v)
    assert bool((residual <= 1e-3).all())
    wrong = distance(case.prior, z, z + v)  # the force pulls back inside
    assert all(float(wrong[k]) > 100 for k in ends)


@each_smooth
@pytest.mark.parametrize("tau", [1e-3, 0.3, 1.0, 1.7, 40.0])
def test_prox_has_right_first_and_second_derivatives_in_v_and_tau(case: Case, tau: float) -> None:
    v = t64(-20.0, -1.3, -1.0, -0.2, 0.0, 0.3, 0.5, 1.0, 4.0).requires_grad_()
    steps = torch.full_like(v, tau, requires_grad=True)
    eps = 1e-6 * min(1.0, tau)
    assert gradcheck(case.prior.prox, (v, steps), eps=eps, atol=1e-5)
    loose = {"atol": 1e-4, "rtol": 1e-3, "fast_mode": True}
    assert gradgradcheck(case.prior.prox, (v, steps), eps=eps, **loose)


@each_smooth
def test_prox_has_the_right_third_derivative(case: Case) -> None:
    def f(v: Tensor) -> Tensor:
        return case.prior.prox(v, torch.tensor(0.4, dtype=torch.float64))

    second = torch.func.grad(torch.func.grad(f))
    for point in (-0.7, 0.2, 0.9):
        h = 1e-5
        want = (second(t64(point + h)[0]) - second(t64(point - h)[0])) / (2 * h)
        got = torch.func.grad(second)(t64(point)[0])
        assert float(got) == pytest.approx(float(want), rel=1e-6, abs=1e-6)


@each_smooth
def test_value_has_right_derivatives_inside(case: Case) -> None:
    z = t64(0.05, 0.2, 0.5, 0.6931, 0.6932, 0.9).requires_grad_()
    assert gradcheck(case.prior.value, z, eps=1e-7)
    assert gradgradcheck(case.prior.value, z, eps=1e-7, atol=1e-4)


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_nan_at_edges_and_extremes(case: Case, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    raw = [-1e4, -1.0, -0.3, -info.tiny, 0.0, info.tiny, 0.5, 1.0 - info.eps / 2, 1.0, 1.2, 1e4]
    z = torch.tensor(raw, dtype=dtype, requires_grad=True)
    value = case.prior.value(z)
    assert value.dtype in (torch.float32, torch.float64)
    assert not bool(value.isnan().any())
    assert not bool((value == -INF).any())
    finite = value.isfinite()
    (slope,) = torch.autograd.grad(value[finite].sum(), z)
    assert bool(slope.isfinite().all())
    for end in case.prior.subdifferential(z):
        assert not bool(end.isnan().any())
    for tau in (1e-6, 0.5, 1.0, 2.0, 1e6):
        moved = case.prior.prox(z, tau)
        assert moved.dtype == dtype
        assert not bool(moved.isnan().any())
        fits = case.prior.prox(z.detach().double(), tau).abs() < info.max
        assert bool(case.prior.value(moved)[fits].isfinite().all())
        (slope,) = torch.autograd.grad(moved.sum(), z)
        assert bool(slope.isfinite().all())
        assert float(slope.min()) >= -info.eps
        assert float(slope.max()) <= 1 + 4 * info.eps


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tau", [0.3, 1.0, 4.0])
def test_low_precision_agrees_with_float64(case: Case, dtype: torch.dtype, tau: float) -> None:
    v = torch.linspace(-6, 6, 97).to(dtype)
    eps = torch.finfo(dtype).eps
    want = case.prior.prox(v.double(), tau)
    for step in (tau, torch.full((97,), tau)):
        got = case.prior.prox(v, step)
        assert got.dtype == dtype
        assert float((got.double() - want).abs().max()) <= 4 * eps * 6
    z = want.to(dtype)
    assert bool(case.prior.value(z).isfinite().all())  # a rounded end of a box is still inside
    inside = case.prior.value(z.double()).isfinite()
    error = case.prior.value(z).double() - case.prior.value(z.double())
    assert float(error[inside].abs().max()) <= 1e-5


def test_vmap_and_compile() -> None:
    v = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4)
    tau = t64(0.4, 1.0, 2.5)
    priors = [case.prior for case in (*CASES.values(), SUMS["tanh+l1"])]

    def everything(v: Tensor, tau: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = [(prior, prior.prox(v, tau[:, None])) for prior in priors]
        return [(z, prior.value(z), distance(prior, z, z - v)) for prior, z in found]

    plain = everything(v, tau)
    for prior, (z, _, _) in zip(priors, plain, strict=True):
        torch.testing.assert_close(z, torch.stack(list(map(prior.prox, v, tau.tolist()))))
        torch.testing.assert_close(z, torch.func.vmap(prior.prox)(v, tau))
    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(v, tau), plain)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: eq.Box(1.0, 1.0), ["Box", "lower", "upper", "1.0"]),
        (lambda: eq.Box(math.nan, 1.0), ["Box", "nan"]),
        (lambda: eq.SoftThreshold(-0.1), ["SoftThreshold", "weight", "-0.1"]),
        (lambda: eq.SoftThreshold("a"), ["SoftThreshold", "weight", "'a'"]),
        (lambda: eq.ShiftedNonNegative(math.inf), ["ShiftedNonNegative", "weight", "inf"]),
        (lambda: eq.LeakyNonNegative(0.0), ["LeakyNonNegative", "slope", "0.0"]),
        (lambda: eq.LeakyNonNegative(1.1), ["slope", "1.1"]),
        (lambda: WithL1(eq.Free(), -1.0), ["WithL1", "weight", "-1.0"]),
        (lambda: eq.NonNegative().prox(t64(1.0), 0.0), ["tau", "0.0", "positive"]),
        (lambda: eq.Tanh().prox(t64(1.0), -2.0), ["tau", "-2.0"]),
        (lambda: eq.SoftThreshold(1.0).prox(t64(1.0), math.nan), ["tau", "nan"]),
        (lambda: eq.NonNegative().value(torch.tensor([1, 2])), ["floating point", "int64"]),
    ],
)
def test_bad_options_are_named(make: Callable[[], object], names: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make()
    assert all(name in str(error.value) for name in names)


def test_a_slope_whose_inverse_overflows() -> None:
    prior, z = eq.LeakyNonNegative(2.0**-129), torch.tensor([-(2.0**-62), 0.0, 2.0])
    assert prior.value(z).tolist() == [16.0, 0.0, 0.0]
    assert prior.subdifferential(z)[0].tolist() == [-(2.0**67), 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", [1e-12, 1e-6, 1e-3, 0.1, 0.9, 3.0, 1e3])
def test_logistic_prox_keeps_the_digits_of_small_values(tau: float, dtype: torch.dtype) -> None:
    """Against bisection of (1 - tau) sigma(u) + tau u = v in long doubles."""
    sizes = torch.logspace(-20, 0, 81, dtype=torch.float64)
    v = torch.cat([sizes, -sizes, 1.0 - sizes]).to(dtype)
    level, step = v.double().numpy().astype(np.longdouble), np.longdouble(float(torch.tensor(tau)))
    step = step if dtype == torch.float32 else np.longdouble(tau)
    low = -100.0 - np.abs(level) / step
    high = -low
    for _ in range(200):
        middle = (low + high) / 2
        fade = np.exp(-np.abs(middle))
        over = (1 - step) * np.where(middle > 0, 1.0, fade) / (1 + fade) + step * middle > level
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    fade = np.exp(-np.abs(low))
    wanted = torch.from_numpy((np.where(low > 0, 1.0, fade) / (1 + fade)).astype(float))
    found = eq.Logistic().prox(v, tau).double()
    # e^u of u = -27 has half as many units of rounding
    assert bool(((found - wanted).abs() <= 14 * torch.finfo(dtype).eps * (v.abs() + wanted)).all())


def test_a_bad_sample_with_an_l1_regularizer_is_no_answer() -> None:
    """NaN is neither above nor below 0, and was taken for 0: converged, with a NaN gradient."""
    torch.manual_seed(0)
    weight = torch.full((1, 6), 0.2, dtype=torch.float64).requires_grad_()
    A, b = torch.randn(8, 6, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    bad = b.clone()
    bad[1] = math.nan
    found = []
    for right in (b, bad):
        problem = eq.Problem(WithL1(eq.Tanh(), weight), smooth=eq.LeastSquares(A, right))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)
            sol = eq.minimize(problem)
        (grad,) = torch.autograd.grad(sol.value[[0, 2]].square().sum(), weight)
        found.append((sol, grad))
    assert found[1][0].converged.tolist() == [True, False, True]
    torch.testing.assert_close(found[1][1], found[0][1])
    assert bool(WithL1(eq.Tanh(), 0.2).prox(torch.tensor([math.nan]), 0.5).isnan())


def test_the_value_of_a_sample_that_is_one_number() -> None:
    z = torch.tensor([3.0, -2.0, 0.0])
    torch.testing.assert_close(eq.SoftThreshold(2.0).sample_value(z), 2.0 * z.abs())
