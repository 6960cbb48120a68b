"""What a monotone layer certifies: every number is compared with the truth it bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.certify import Guarantee
from equilibria.nn import MonotoneDEQ
from equilibria.problems import CustomPrior, Prior, WithL1
from equilibria.solvers import ForwardBackward, PeacemanRachford
from tests.nn.test_monotone import (
    FORMS,
    PR,
    RELU,
    array,
    drawn,
    flat,
    matrix_u,
    matrix_w,
    newton,
)
from tests.problems.test_monotone_operator import modulus
from tests.problems.test_monotone_tiers import matrix_of
from tests.solvers.test_forward_backward import PRIORS

law = settings(max_examples=25, deadline=None, derandomize=True)
each_form = pytest.mark.parametrize("form", list(FORMS))


def shifted(z: Any, size: float, seed: int) -> Any:
    """z moved by noise of this size."""
    source = torch.Generator().manual_seed(seed)
    parts = [z] if isinstance(z, Tensor) else list(z)
    moved = [
        p.detach() + size * torch.randn(p.shape, dtype=p.dtype, generator=source) for p in parts
    ]
    return moved[0] if isinstance(z, Tensor) else tuple(moved)


def without_coupling(size: int, **options: Any) -> MonotoneDEQ:
    """A layer with W = (1 − m)I."""
    layer = MonotoneDEQ(size, **options).double()
    for p in (layer.W.A, layer.W.B):
        p.data.zero_()
    return layer


def errors(z: Any, truth: Any) -> np.ndarray:
    return np.linalg.norm(flat(z) - flat(truth), axis=1)


# ---------------------------------------------------------------------- the numbers


@each_form
def test_modulus_norms_and_lipschitz_against_dense_algebra(form: str) -> None:
    layer, x = drawn(form)
    w, u = matrix_w(layer, x), matrix_u(layer, x)
    found = eq.certify(layer, x)
    assert found.rigorous
    assert found.unique
    assert found.kind == Guarantee.strong_monotonicity
    assert layer.m - 1e-9 <= float(found.modulus) <= modulus(w) + 1e-12
    assert np.linalg.norm(w, 2) <= float(found.contraction)
    m, upper = layer.bounds()
    assert m == pytest.approx(float(found.modulus), rel=1e-12)
    assert np.linalg.norm(np.eye(len(w)) - w, 2) <= upper
    # ‖U‖ of a convolution is bounded for maps of every size, so it may lie above that of these.
    slack = 1e-9 if form == "dense" else 0.6
    exact = float(np.linalg.norm(u, 2)) / float(found.modulus)
    assert exact <= found.lipschitz <= exact * (1 + slack)


def test_a_weak_coupling_is_a_contraction() -> None:
    layer, x = drawn("dense", stretch=0.1, m=0.9)
    found = layer.certify(x)
    assert found.kind == Guarantee.contraction
    assert np.linalg.norm(matrix_w(layer, x), 2) <= float(found.contraction) < 1


# ---------------------------------------------------------------------- the error bound


@law
@given(
    seed=st.integers(0, 10**6),
    stretch=st.sampled_from([0.1, 1.0, 3.0]),
    m=st.sampled_from([0.05, 0.5, 2.0]),
    size=st.sampled_from([1e-9, 1e-3, 1.0]),
    prior=st.sampled_from(PRIORS),
)
def test_the_error_bound_holds_for_every_state(
    seed: int, stretch: float, m: float, size: float, prior: Prior
) -> None:
    torch.manual_seed(seed)
    layer = MonotoneDEQ(5, in_channels=3, m=m, prior=prior).double()
    with torch.no_grad():
        for p in layer.W.parameters():
            p.mul_(stretch)
    x = torch.randn(4, 3, dtype=torch.float64)
    with torch.no_grad():
        truth = layer.solve(x, solver=PeacemanRachford(rtol=1e-13, max_steps=4000, patience=2000))
    z = shifted(truth.value, size, seed)
    found = layer.certify(x, z)
    true = errors(z, truth.value)
    # What is taken for the truth is itself off by about 1e-14/(1 − ρ) of its size.
    doubt = 1e-11 * (1 + np.linalg.norm(flat(truth.value), axis=1))
    bound = found.error_bound.numpy()
    assert (true <= bound + doubt).all()
    # Never worse than the textbook's two bounds, up to the rounding that is paid for.
    residual, upper = found.residual.numpy(), layer.bounds()[1]
    norm = np.linalg.norm(matrix_w(layer, x), 2)
    least = float(found.modulus)
    paid = 1e-9 * (1 + residual) + 1e-11 / least
    assert (bound <= (1 + norm / least) * residual * (1 + 1e-9) + paid).all()
    assert (bound <= (1 + upper) / least * residual * (1 + 1e-9) + paid).all()


@each_form
def test_the_error_bound_holds_in_every_form(form: str) -> None:
    layer, x = drawn(form)
    truth = layer.solve(x, solver=PR).value
    for size in (1e-6, 1e-1):
        z = shifted(truth, size, 3)
        found = layer.certify(x, z)
        true = errors(z, truth)
        assert (true <= found.error_bound.numpy() * (1 + 1e-6)).all()
        assert (found.error_bound.numpy() <= 60 * true).all()
        assert found.solver == "z was given"


@pytest.mark.parametrize("m", [0.1, 0.5, 0.9])
def test_the_error_bound_is_sharp(m: float) -> None:
    """W = (1 − m)I and no prior: z − z* = r/m, which the bound gives to rounding."""
    layer = without_coupling(3, m=m, prior=eq.Free())
    x = torch.randn(2, 3, dtype=torch.float64)
    z = torch.randn(2, 3, dtype=torch.float64)
    truth = layer.U(x).detach() / m
    found = layer.certify(x, z)
    np.testing.assert_allclose(found.error_bound, errors(z, truth), rtol=1e-9)


def test_the_bound_covers_rounding_at_the_exact_solution() -> None:
    """Dyadic numbers: z* = 2c exactly; states a few units in the last place away are covered."""
    layer = without_coupling(2, m=0.5)
    with torch.no_grad():
        layer.U.weight.copy_(torch.eye(2))
        layer.U.bias.zero_()
    x = torch.tensor([[0.75, 1.25]], dtype=torch.float64)
    exact = 2.0 * x
    for z in (exact, torch.nextafter(exact, exact + 1), exact * (1 + 2**-50)):
        found = layer.certify(x, z)
        assert float((z - exact).norm()) <= float(found.error_bound[0]) < 1e-13
        assert float(found.rounding[0]) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["dense", "tiers"])
def test_lower_precisions_are_certified_as_computed(form: str, dtype: torch.dtype) -> None:
    """The W and c that the layer made in its dtype; the truth for them by Newton in float64."""
    layer, x = drawn(form, m=1.0, stretch=1.0)
    layer, x = layer.to(dtype), x.to(dtype)
    found = layer.certify(x)
    assert found.unique
    operator = layer.inclusion(x).operator.double()
    (c,) = layer.inject(x)
    z = layer(x)
    parts = [z] if isinstance(z, Tensor) else list(z)
    w = matrix_of(operator, [tuple(p.shape[1:]) for p in parts])
    rest = [torch.zeros_like(p) for p in parts[1:]]
    true = errors(z, torch.from_numpy(newton(w, flat((c, *rest)), *RELU)))
    assert (true <= found.error_bound.numpy()).all()
    assert (true > 0).all()


# ---------------------------------------------------------------------- Lipschitz


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), form=st.sampled_from(["dense", "conv", "tiers"]))
def test_the_lipschitz_constant_holds(seed: int, form: str) -> None:
    layer, x = drawn(form, solver=PR)
    constant = layer.certify(x).lipschitz
    y = shifted(x, 0.5, seed)
    with torch.no_grad():
        apart = errors(layer(x), layer(y))
    assert (apart <= constant * errors(x, y) * (1 + 1e-6)).all()


def test_the_lipschitz_constant_is_attained() -> None:
    """W = (1 − m)I, U = 3I: z* = 3x/m on x > 0."""
    layer = without_coupling(2, m=0.25, bias=False)
    with torch.no_grad():
        layer.U.weight.copy_(3.0 * torch.eye(2))
    x = torch.rand(2, 2, dtype=torch.float64)
    found = layer.certify(x)
    assert found.lipschitz == pytest.approx(12.0, rel=1e-9)
    with torch.no_grad():
        z = layer.solve(x, solver=PR).value
    assert float((z[0] - z[1]).norm()) == pytest.approx(12.0 * float((x[0] - x[1]).norm()))


# ---------------------------------------------------------------------- words


def test_the_text_names_the_factors() -> None:
    layer, x = drawn("dense", m=1.0, stretch=1.0, solver=ForwardBackward(alpha=0.05))
    text = str(layer.certify(x))
    m, upper = layer.bounds()
    factor = math.sqrt(1 - 2 * 0.05 * m + 0.05**2 * upper**2)
    assert f"factor {factor:.6g} at α = 0.05" in text
    for part in ("Peaceman–Rachford  factor", "strong monotonicity: one equilibrium", "‖U‖/m"):
        assert part in text


def test_samples_of_a_custom_activation_are_an_estimate() -> None:
    for prior in (CustomPrior(torch.tanh), WithL1(CustomPrior(torch.tanh), 0.1)):
        layer, x = drawn("dense", prior=prior)
        found = layer.certify(x, torch.zeros(3, 6, dtype=torch.float64))
        assert not found.rigorous
        assert "checked at samples alone" in found.notes[0]


def test_where_rounding_eats_the_modulus_nothing_is_claimed() -> None:
    torch.manual_seed(0)
    layer = MonotoneDEQ(20, m=1e-6)
    with torch.no_grad():
        layer.W.A.mul_(10.0)[1:] = 0.0  # AᵀA of rank one: nothing beside m in most directions
    layer, x = layer.to(torch.bfloat16), torch.randn(2, 20, dtype=torch.bfloat16)
    operator: Any = layer.inclusion(x).operator
    assert modulus(array(operator.weight.float())) < 0  # W as rounded is not monotone indeed
    found = layer.certify(x, torch.zeros(2, 20, dtype=torch.bfloat16))
    assert found.kind == Guarantee.none
    assert found.error_bound.isinf().all()
    assert found.lipschitz is None
    assert "wider dtype" in found.notes[0]
