"""A user's activation: the prior it gets must be the one known in closed form, or the true one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from equilibria.problems import NonMonotoneActivation, NotNonexpansive, Prior
from tests.problems.test_priors import distance, t64

F = torch.nn.functional

KNOWN: dict[str, tuple[Callable[[Tensor], Tensor], Prior]] = {
    "relu": (torch.relu, eq.NonNegative()),
    "hardtanh": (F.hardtanh, eq.Box(-1.0, 1.0)),
    "box off the grid": (lambda v: v.clamp(-0.30011, 0.71234), eq.Box(-0.30011, 0.71234)),
    "softshrink": (lambda v: F.softshrink(v, 0.40003), eq.SoftThreshold(0.40003)),
    "shifted": (lambda v: torch.relu(v - 0.3), eq.ShiftedNonNegative(0.3)),
    "leaky": (lambda v: F.leaky_relu(v, 0.2), eq.LeakyNonNegative(0.2)),
    "identity": (lambda v: 1.0 * v, eq.Free()),
    "tanh": (torch.tanh, eq.Tanh()),
    "sigmoid": (torch.sigmoid, eq.Logistic()),
    "softplus": (lambda v: torch.logaddexp(v, torch.zeros_like(v)), eq.Softplus()),
}
BUILT = {name: eq.CustomPrior(sigma) for name, (sigma, _) in KNOWN.items()}
each_known = pytest.mark.parametrize("name", KNOWN)


def span() -> Tensor:
    return torch.cat([torch.linspace(-14, 14, 281, dtype=torch.float64), t64(-300.0, 300.0)])


@each_known
def test_value_agrees_with_the_closed_form(name: str) -> None:
    ours, known = BUILT[name], KNOWN[name][1]
    z = known.activation(span())
    difference = ours.value(z) - known.value(z)
    constant = difference[140]  # f is defined up to a constant
    # f can be no better than rounding of u^2, u = sigma^{-1}(z).
    scale = span().square().clamp(min=1.0)
    assert float(((difference - constant) / scale).abs().max()) < 1e-12
    if name not in ("sigmoid", "softplus"):  # these two carry another constant by convention
        assert abs(float(constant)) < 1e-13
    grid = torch.linspace(-3, 3, 301, dtype=torch.float64)
    assert torch.equal(ours.value(grid).isinf(), known.value(grid).isinf())


@each_known
@pytest.mark.parametrize("tau", [1e-6, 0.1, 0.8, 1.0, 2.0, 1e3])
def test_prox_agrees_with_the_closed_form(name: str, tau: float) -> None:
    ours, known = BUILT[name], KNOWN[name][1]
    v = torch.cat([span(), t64(-1e4, 1e4)])
    got, want = ours.prox(v, tau), known.prox(v, tau)
    scale = v.abs().clamp(min=1.0) * max(1.0, tau)
    assert float(((got - want) / scale).abs().max()) < 1e-14
    tensor = torch.full_like(v, tau)
    torch.testing.assert_close(ours.prox(v, tensor), got, rtol=1e-13, atol=1e-13)


@each_known
def test_subdifferential_agrees_with_the_closed_form(name: str) -> None:
    """Flat pieces of sigma are jumps: the whole interval, half infinite at the ends."""
    ours, known = BUILT[name], KNOWN[name][1]
    special = [-1.0, -0.30011, 0.0, 0.71234, 1.0]
    inside = [z for z in special if math.isfinite(float(known.value(t64(z))))]
    smooth_ends = {"tanh": (-1.0, 1.0), "sigmoid": (0.0, 1.0), "softplus": (0.0,)}.get(name, ())
    points = [z for z in inside if z not in smooth_ends] + [0.05, 0.3, 0.55, 0.7]
    for got, want in zip(
        ours.subdifferential(t64(*points)), known.subdifferential(t64(*points)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    if name in ("relu", "sigmoid"):
        assert [float(end) for end in ours.subdifferential(t64(-50.0))] == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each_known
def test_what_the_activation_returns_is_stationary(name: str, dtype: torch.dtype) -> None:
    """v - sigma(v) in df(sigma(v)), also on flat pieces whose height the type cannot hold."""
    ours = BUILT[name]
    v = torch.linspace(-30, 30, 121).to(dtype)
    z = ours.activation(v)
    force = z.double() - v.double()
    assert float(distance(ours, z, force).max()) <= 4 * 30 * torch.finfo(dtype).eps
    # The distance must be able to fail: no subgradient is that far, except at an upper jump.
    assert float(distance(ours, z, force + 100.0).max()) > 10


def steps(v: Tensor) -> Tensor:
    """Slopes 1, 0, 1/2, 0, 1/4 with kinks off the grid: two flats inside the domain."""
    middle, right = 0.5 * (v.clamp(-0.4, 0.61803) + 0.4), 0.25 * torch.relu(v - 1.41421)
    return v.clamp(max=-1.00003) + middle + right - 0.1


@pytest.mark.parametrize(
    ("sigma", "points"),
    [
        (torch.special.ndtr, [0.01, 0.2, 0.5, 0.77, 0.999]),
        (steps, [-3.0, -1.10003, -0.9, -0.7, -0.591015 + 1e-9, -0.3, 0.4]),
        (torch.asinh, [-4.0, -0.5, 0.0, 1.0, 5.0]),
    ],
    ids=["normal cdf", "steps", "asinh"],
)
def test_value_of_an_unknown_activation_by_scipy(
    sigma: Callable[[Tensor], Tensor], points: list[float]
) -> None:
    """f(z) = sup_u z u - int_0^u sigma - z^2/2, with scipy's root finder and quadrature."""
    prior = eq.CustomPrior(sigma)

    def plain(u: float) -> float:
        return float(sigma(t64(u)))

    for z in points:
        u = brentq(lambda u, z=z: plain(u) - z, -200, 200, xtol=1e-13)
        kinks = [k for k in (-1.00003, -0.4, 0.0, 0.61803, 1.41421) if min(0, u) < k < max(0, u)]
        area, _ = quad(plain, 0, u, points=kinks or None, epsabs=1e-13, epsrel=1e-13)
        assert float(prior.value(t64(z))) == pytest.approx(z * u - area - z * z / 2, abs=1e-11)


def test_derivatives() -> None:
    prior = BUILT["tanh"]
    v = t64(-3.0, -0.4, 0.0, 0.6, 2.0).requires_grad_()
    for tau in (0.3, 1.0, 5.0):
        step = torch.full_like(v, tau, requires_grad=True)
        assert gradcheck(prior.prox, (v, step))
        assert gradgradcheck(prior.prox, (v, step), atol=1e-4, fast_mode=True)
    z = t64(-0.9, -0.2, 0.3, 0.8).requires_grad_()
    assert gradcheck(prior.value, z)
    assert gradgradcheck(prior.value, z, atol=1e-4)


def test_an_activation_that_overflows_is_cut_where_it_stops_being_finite() -> None:
    prior = eq.CustomPrior(lambda v: torch.log1p(torch.exp(v)))  # inf beyond 709
    z = t64(0.1, 1.0, 20.0)
    difference = prior.value(z) - eq.Softplus().value(z)
    assert float((difference - difference[0]).abs().max()) < 1e-12
    assert not bool(prior.value(t64(-1.0, 1e5)).isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [torch.atan, F.softsign])
def test_a_state_far_outside_is_moved_to_where_f_is_finite(
    activation: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    prior = eq.CustomPrior(activation)
    z = torch.tensor([-1e3, -2.0, 0.5, 1.6, 1e3], dtype=dtype)
    moved = prior.into_domain(z)
    assert bool(prior.value(moved).isfinite().all())
    end = float(activation(torch.tensor(1e8).double()))
    torch.testing.assert_close(moved, z.clamp(-end, end))


def test_expansion_is_measured_also_outside_of_the_domain() -> None:
    def steep_far_out(v: Tensor) -> Tensor:
        return 0.1 * v.clamp(-20, 20) + F.relu(v - 20) - F.relu(-v - 20)

    assert eq.CustomPrior(steep_far_out).expansion == pytest.approx(1.0)
    assert BUILT["sigmoid"].expansion == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize(
    ("sigma", "kind", "at", "slope"),
    [
        (F.gelu, NonMonotoneActivation, -1.414, -0.1289),  # GELU falls steepest at -sqrt 2
        (lambda v: -v, NonMonotoneActivation, None, -1.0),
        (lambda v: 2 * torch.tanh(v), NotNonexpansive, 0.0, 2.0),
        (lambda v: torch.where(v > 1.5, v + 1, v), NotNonexpansive, 1.5, 251.0),  # a jump
        (lambda v: torch.where(v > 100, 100 - v, v.clamp(max=100)), NonMonotoneActivation, None, 0),
    ],
    ids=["gelu", "minus", "2 tanh", "jump", "far away"],
)
def test_a_wrong_activation_is_refused_with_place_and_slope(
    sigma: Callable[[Tensor], Tensor], kind: type[ValueError], at: float | None, slope: float
) -> None:
    with pytest.raises(kind) as error:
        eq.CustomPrior(sigma)
    text = str(error.value)
    assert ("not monotone" in text) == (kind is NonMonotoneActivation)
    left = float(text.split("between ")[1].split(" and ")[0])
    right = float(text.split(" and ")[1].split(" ")[0])
    said = float(text.split("slope is ")[1].split(",")[0])
    if at is not None:
        assert left - 1e-2 <= at <= right + 1e-2
        assert said == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: eq.CustomPrior(lambda v: torch.softmax(v, 0)), ["elementwise"]),
        (lambda: eq.CustomPrior(lambda v: v.sum()), ["elementwise", "(4001,)", "()"]),
        (lambda: eq.CustomPrior(lambda v: v.float()), ["float32", "float64"]),
        (lambda: eq.CustomPrior(torch.log), ["not finite", "-8"]),
        (lambda: eq.CustomPrior(torch.relu, domain=(1.0, 1.0)), ["domain", "(1.0, 1.0)"]),
        (lambda: eq.CustomPrior(torch.relu, samples=2), ["samples", "2"]),
        (lambda: BUILT["tanh"].prox(t64(0.0), -1.0), ["tau", "-1.0"]),
    ],
)
def test_bad_options_are_named(make: Callable[[], object], names: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked below
        make()
    assert all(name in str(error.value) for name in names)
