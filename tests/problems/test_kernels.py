"""Couplings against objectives written apart from them, quadrature and dense Hessians."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria import problems
from equilibria.problems import (
    Activated,
    ConvOperator,
    Coupling,
    Curvature,
    DegenerateKernelWarning,
    DenseOperator,
)
from tests.oracles import PROXES
from tests.problems.test_operators import conv_matrix, randn


def _silent_printed(W: object, c: Tensor, degree: int) -> eq.Polynomial:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateKernelWarning)
        return eq.Polynomial(W, c, degree, offset=0.0)  # type: ignore[arg-type]


Scalar = Callable[[float], float]
# Table 4: the kernel, φ and φ″.
CASES: dict[str, tuple[Callable[..., Coupling], Scalar, Scalar]] = {
    "linear": (eq.Linear, lambda t: t, lambda t: 0.0),
    "polynomial-2": (eq.Polynomial, lambda t: (1 + t) ** 2, lambda t: 2.0),
    "polynomial-3": (
        lambda W, c: eq.Polynomial(W, c, 3),
        lambda t: (1 + t) ** 3,
        lambda t: 6 * (1 + t),
    ),
    "polynomial-4": (
        lambda W, c: eq.Polynomial(W, c, 4, 1.0),
        lambda t: (1 + t) ** 4,
        lambda t: 12 * (1 + t) ** 2,
    ),
    "printed-2": (lambda W, c: _silent_printed(W, c, 2), lambda t: t**2, lambda t: 2.0),
    "printed-3": (lambda W, c: _silent_printed(W, c, 3), lambda t: t**3, lambda t: 6 * t),
    "sigmoid": (eq.Sigmoidal, math.tanh, lambda t: -2 * math.tanh(t) / math.cosh(t) ** 2),
}


def central_gradient(f: Callable[[np.ndarray], float], z: np.ndarray, h: float) -> np.ndarray:
    """Fourth-order central differences."""
    grad = np.zeros_like(z)
    for i in range(z.size):
        e = np.zeros_like(z)
        e[i] = h
        grad[i] = (8 * (f(z + e) - f(z - e)) - (f(z + 2 * e) - f(z - 2 * e))) / (12 * h)
    return grad


def dense_hessian(name: str, m: np.ndarray, c: np.ndarray, z: np.ndarray) -> np.ndarray:
    """∇²q by hand: −φ″(⟨c, z⟩)ccᵀ − WᵀW."""
    return -CASES[name][2](float(c @ z)) * np.outer(c, c) - m.T @ m


def _example(conv: bool, seed: int) -> tuple[object, np.ndarray, Tensor, Tensor]:
    """(W, its matrix, c, z), batch 2."""
    if conv:
        weight = 0.4 * randn(3, 2, 3, 3, seed=seed)
        c, z = 0.3 * randn(2, 2, 3, 2, seed=seed + 1), randn(2, 2, 3, 2, seed=seed + 2)
        return ConvOperator(weight), conv_matrix(weight, 3, 2, padding=1), c, z
    weight = 0.5 * randn(4, 5, seed=seed)
    return weight, weight.numpy(), 0.5 * randn(2, 5, seed=seed + 1), randn(2, 5, seed=seed + 2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("conv", [False, True], ids=["dense", "conv"])
def test_value_gradient_and_hvp(name: str, conv: bool) -> None:
    make, phi, _ = CASES[name]
    W, matrix, c, z = _example(conv, seed=11)
    coupling = make(W, c)
    v = randn(*z.shape, seed=5)
    value, grad, hvp = coupling.value(z), coupling.grad(z), coupling.hvp(z, v)
    for b in range(2):
        own, at = c[b].flatten().numpy(), z[b].flatten().numpy()
        f = lambda t, own=own: -phi(float(own @ t)) - 0.5 * float(np.square(matrix @ t).sum())
        assert float(value[b]) == pytest.approx(f(at), rel=1e-12)
        np.testing.assert_allclose(
            grad[b].flatten().numpy(), central_gradient(f, at, 1e-3), rtol=1e-7, atol=1e-7
        )
        product = dense_hessian(name, matrix, own, at) @ v[b].flatten().numpy()
        np.testing.assert_allclose(hvp[b].flatten().numpy(), product, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_autograd_agrees_to_third_order(name: str) -> None:
    make = CASES[name][0]
    weight, _, c, z = _example(False, seed=3)
    assert isinstance(weight, Tensor)
    z = z.requires_grad_()
    coupling = make(weight, c)
    (grad,) = torch.autograd.grad(coupling.value(z).sum(), z, create_graph=True)
    torch.testing.assert_close(grad, coupling.grad(z), rtol=1e-12, atol=1e-12)
    v = randn(*z.shape, seed=9)
    (hv,) = torch.autograd.grad((coupling.grad(z) * v).sum(), z)
    torch.testing.assert_close(hv, coupling.hvp(z, v), rtol=1e-12, atol=1e-12)
    args = (weight.clone().requires_grad_(), c.clone().requires_grad_(), z)
    run = lambda w, c, z: make(w, c).grad(z)
    assert torch.autograd.gradcheck(run, args)
    assert torch.autograd.gradgradcheck(run, args)


def _check_within(curvature: Curvature, eigenvalues: np.ndarray, b: int) -> None:
    lower, upper = (
        float(t[b]) if isinstance(t, Tensor) else t for t in (curvature.lower, curvature.upper)
    )
    size = max(1.0, float(np.abs(eigenvalues).max()))
    assert lower <= eigenvalues[0] + 1e-12 * size
    assert eigenvalues[-1] <= upper + 1e-12 * size
    assert curvature.rigorous


@given(seed=st.integers(0, 10**6), scale=st.floats(0.1, 5.0), name=st.sampled_from(sorted(CASES)))
@settings(max_examples=80, deadline=None)
def test_curvature_bounds_hold(seed: int, scale: float, name: str) -> None:
    weight, matrix, c, z = _example(False, seed)
    c, z = scale * c, scale * z
    coupling = CASES[name][0](weight, c)
    glob, local = coupling.curvature(), coupling.local_curvature(z)
    for b in range(2):
        hessian = dense_hessian(name, matrix, c[b].numpy(), z[b].numpy())
        eigenvalues = np.linalg.eigvalsh(hessian)
        _check_within(glob, eigenvalues, b)
        _check_within(local, eigenvalues, b)


def test_bounds_are_attained() -> None:
    """c along the top singular direction of W: nothing is left between spectrum and bound."""
    weight = torch.diag(torch.tensor([1.5, 0.2], dtype=torch.float64))
    c = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    assert eq.Linear(weight, c).curvature().lower == pytest.approx(-2.25, rel=1e-12)
    assert float(eq.Polynomial(weight, c).curvature().lower) == pytest.approx(-10.25, rel=1e-12)
    k = 4 / (3 * math.sqrt(3))
    bound = eq.Sigmoidal(weight, c).curvature()
    assert float(bound.lower) == pytest.approx(-2.25 - 4 * k, rel=1e-12)
    for sign in (1, -1):  # 2t(1 − t²) is extreme at t = ±1/√3
        z = torch.tensor([[sign * math.atanh(1 / math.sqrt(3)) / 2, 0.0]], dtype=torch.float64)
        top = float(eq.Sigmoidal(weight, c).hvp(z, torch.eye(2, dtype=torch.float64)[:1])[0, 0])
        assert top == pytest.approx(sign * 4 * k - 2.25, rel=1e-12)


def test_polynomials_of_higher_degree_say_that_they_are_unbounded() -> None:
    W, _, c, _ = _example(False, 0)
    odd, even = eq.Polynomial(W, c, 3).curvature(), eq.Polynomial(W, c, 4).curvature()  # type: ignore[arg-type]
    assert (odd.lower, odd.upper) == (-math.inf, math.inf)
    assert (even.lower, even.upper) == (-math.inf, 0.0)
    assert "local_curvature" in odd.note


def test_printed_polynomial_warns_and_starts_away_from_zero() -> None:
    W, _, c, _ = _example(False, 0)
    with pytest.warns(DegenerateKernelWarning, match="degenerate"):
        printed = eq.Polynomial(W, c, 2, offset=0.0)  # type: ignore[arg-type]
    zero = torch.zeros_like(c)
    assert not printed.grad(zero).any(), "T(0) = 0 is the degeneracy"
    start = printed.default_start(c.shape)
    torch.testing.assert_close(start.norm(dim=1), torch.ones(2, dtype=torch.float64))
    assert (torch.relu(-printed.grad(start)).norm(dim=1) > 0.1).all()
    blank = _silent_printed(W, torch.zeros_like(c), 2)
    assert torch.equal(blank.default_start(), zero)
    usable = eq.Polynomial(W, c)  # type: ignore[arg-type]
    assert torch.equal(usable.default_start(), zero)
    assert usable.grad(zero).any()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda W, c: eq.Polynomial(W, c, 1), ValueError, "degree=1"),
        (lambda W, c: eq.Polynomial(W, c, 2.0), TypeError, r"degree=2\.0"),
        (lambda W, c: eq.Polynomial(W, c, True), TypeError, "degree=True"),
        (lambda W, c: eq.Polynomial(W, c, 2, 0.5), ValueError, r"offset=0\.5"),
        (lambda W, c: eq.Linear(W, c[:, :3]), ValueError, r"Linear: c has the shape.*\[B, 5\]"),
        (lambda W, c: eq.Linear(W, c[0]), ValueError, r"batch first"),
        (lambda W, c: eq.Linear(W, c.long()), TypeError, r"int64"),
        (lambda W, c: eq.Linear(W[0], c), ValueError, r"\(5,\)"),
        (lambda W, c: eq.Linear(W, c).grad(c[:, :2]), ValueError, r"\(2, 2\)"),
        (lambda W, c: eq.Sigmoidal(W, c).hvp(c, c[:1]), ValueError, r"\(1, 5\)"),
        (lambda W, c: eq.Sigmoidal(W, c).default_start((2, 4)), ValueError, r"\(2, 4\)"),
    ],
)
def test_bad_input_is_named(make, error: type[Exception], words: str) -> None:  # type: ignore[no-untyped-def]
    W, _, c, _ = _example(False, 0)
    with pytest.raises(error, match=words):
        make(W, c)


def test_compile_vmap_and_channels_last() -> None:
    W, _, c, z = _example(True, 4)
    couplings = [make(W, c) for make, _, _ in CASES.values()]

    def everything(t: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(q.value(t), q.grad(t), q.hvp(t, t)) for q in couplings]

    expected = everything(z)
    compiled = torch.compile(everything, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(z), expected)
    stacked = torch.func.vmap(everything)(torch.stack([z, z]))
    first = [tuple(t[0] for t in one) for one in stacked]
    torch.testing.assert_close(first, expected)
    last = everything(z.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected)


# OptEq's Eq 3: an activation between W and Wᵀ

PRIORS = {name: prior for name, (prior, _) in PROXES.items()}


@pytest.mark.parametrize("name", list(PRIORS))
def test_the_potential_is_the_integral_of_the_activation(name: str) -> None:
    prior = PRIORS[name]
    one = torch.ones(1, 1, dtype=torch.float64)

    def potential(v: float) -> float:
        return -float(Activated(one, v * one, prior).value(0 * one))

    def sigma(v: float) -> float:
        return float(prior.activation(torch.tensor(v, dtype=torch.float64)))

    for low, high in ((-2.0, -0.25), (-0.25, 0.6), (0.6, 3.0)):
        kinks = [k for k in (-0.3, -0.2, 0.0, 0.1, 0.2, 0.8) if low < k < high]
        expected = scipy.integrate.quad(sigma, low, high, points=kinks, epsabs=1e-12)[0]
        assert potential(high) - potential(low) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("name", list(PRIORS))
def test_activated_gradient_and_hessian(name: str, kind: str) -> None:
    prior, nu = PRIORS[name], 1.7
    if kind == "dense":
        weight, z, c = randn(5, 3), randn(2, 3, seed=1), randn(2, 5, seed=2)
        operator, matrix = DenseOperator(weight), weight.numpy()
    else:
        weight, z, c = randn(3, 2, 3, 3), randn(2, 2, 3, 4, seed=1), randn(2, 3, 3, 4, seed=2)
        operator, matrix = ConvOperator(weight), conv_matrix(weight, 3, 4, padding=1)
    coupling = Activated(operator, c, prior, nu)
    v = (z.flatten(1) @ torch.from_numpy(matrix).mT + c.flatten(1)).requires_grad_()
    a = prior.activation(v)
    (slope,) = torch.autograd.grad(a.sum(), v)
    expected = -(a.detach().numpy() @ matrix) / nu
    np.testing.assert_allclose(coupling.grad(z).flatten(1).numpy(), expected, atol=1e-12)
    at = z.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(coupling.value(at).sum(), at)
    np.testing.assert_allclose(by_autograd.flatten(1).numpy(), expected, atol=1e-9)
    direction = randn(*z.shape, seed=3)
    hessian = [-(matrix.T * slope[i].numpy()) @ matrix / nu for i in range(2)]
    product = np.stack([h @ d for h, d in zip(hessian, direction.flatten(1).numpy(), strict=True)])
    np.testing.assert_allclose(coupling.hvp(z, direction).flatten(1).numpy(), product, atol=1e-9)
    bounds = coupling.curvature()
    for h in hessian:
        values = np.linalg.eigvalsh(h)
        assert bounds.lower - 1e-12 <= values[0]
        assert values[-1] <= bounds.upper + 1e-12
    assert coupling.local_curvature(z) == bounds


def test_the_map_of_activated_is_equation_3() -> None:
    w, c, z = 0.2 * randn(5, 3), randn(2, 5, seed=1), randn(2, 3, seed=2)
    problem = eq.Problem(eq.Free(), Activated(w, c, eq.NonNegative()))
    image = torch.relu(z @ w.mT + c) @ w
    torch.testing.assert_close(problem.step(z), image)
    torch.testing.assert_close(problem.step(z, 0.3), 0.7 * z + 0.3 * image)
    torch.testing.assert_close(problem.gradient(z), z - image)
    torch.testing.assert_close(problem.stationarity(z), (z - image).norm(dim=1))


def test_activated_hvp_keeps_its_graph_where_asked() -> None:
    coupling = Activated(randn(5, 3), randn(2, 5, seed=1), eq.Tanh())
    z = randn(2, 3, seed=2).requires_grad_()
    v = randn(2, 3, seed=3)
    assert torch.autograd.gradcheck(lambda z: coupling.hvp(z, v), (z,))
    with torch.no_grad():
        assert not coupling.hvp(z, v).requires_grad


def test_the_start_of_activated_has_the_shape_of_a_state() -> None:
    assert Activated(randn(5, 3), randn(2, 5), eq.NonNegative()).default_start().shape == (2, 3)
    conv = Activated(ConvOperator(randn(4, 2, 3, 3), 2), randn(2, 4, 3, 5), eq.NonNegative())
    assert conv.default_start().shape == (2, 2, 6, 10)


def test_activated_errors() -> None:
    w, c = randn(5, 3), randn(2, 5)
    with pytest.raises(ValueError, match="c has the shape of Wz"):
        Activated(w, randn(2, 4), eq.NonNegative())
    with pytest.raises(TypeError, match="expected a prior"):
        Activated(w, c, torch.relu)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nu=0\.0"):
        Activated(w, c, eq.NonNegative(), 0.0)
    with pytest.raises(ValueError, match="W takes a state"):
        Activated(w, c, eq.NonNegative()).grad(randn(3, 3))


@pytest.mark.parametrize("name", ["Gaussian", "Sigmoidal", "Polynomial"])
def test_local_bounds_hold_where_the_numbers_cancel(name: str) -> None:
    """Against exact fractions; in float64 c − wz and ⟨c, z⟩ lose most of their digits."""
    source = torch.Generator().manual_seed(0)
    for _ in range(50):
        a = 10.0**9 * float(torch.randn((), generator=source, dtype=torch.float64))
        if name == "Gaussian":
            w, z = 0.7, torch.tensor([[1e3 * a]], dtype=torch.float64)
            c = w * z + 0.7
            r = Fraction(float(c)) - Fraction(w) * Fraction(float(z))
            s = Decimal(r.numerator) ** 2 / Decimal(r.denominator) ** 2
            exact = float((-s).exp() * (1 - 2 * s)) * w**2
            q: Any = eq.Gaussian(torch.tensor([[w]], dtype=torch.float64), c, gamma=1.0)
        else:
            kind = getattr(problems, name)
            c = torch.tensor([[0.3, -0.7]], dtype=torch.float64)
            z = torch.tensor([[a, (0.3 * a - 0.66) / 0.7]], dtype=torch.float64)
            pairs = zip(c[0].tolist(), z[0].tolist(), strict=True)
            t = sum((Fraction(p) * Fraction(x) for p, x in pairs), Fraction(0))
            h = (2 * Decimal(t.numerator) / Decimal(t.denominator)).exp()
            tanh = float((h - 1) / (h + 1))
            bend = 6 * float(1 + t) if name == "Polynomial" else -2.0 * tanh * (1.0 - tanh**2)
            exact = -bend * float((c * c).sum())
            degree = {"degree": 3} if name == "Polynomial" else {}
            q = kind(torch.zeros(1, 2, dtype=torch.float64), c, **degree)
        found = q.local_curvature(z)
        assert float(found.lower) <= min(exact, 0.0) + 1e-15
        assert max(exact, 0.0) - 1e-15 <= float(found.upper)
        assert float(found.upper - found.lower) <= abs(exact) + 1e-2
