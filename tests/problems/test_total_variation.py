"""Total variation of images: against cvxpy, the laws of a prox, and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

import equilibria as eq
from equilibria.problems import DifferenceOperator
from tests.optional import optional
from tests.problems.test_operators import randn

cp = optional("cvxpy")
each = pytest.mark.parametrize("isotropic", [True, False])


def variation(z: Any, isotropic: bool) -> Any:
    rows, columns = z.shape
    down = cp.vstack([z[1:, :] - z[:-1, :], np.zeros((1, columns))])
    right = cp.hstack([z[:, 1:] - z[:, :-1], np.zeros((rows, 1))])
    if not isotropic:
        return cp.sum(cp.abs(down)) + cp.sum(cp.abs(right))
    both = cp.vstack([cp.vec(down, order="C"), cp.vec(right, order="C")])
    return cp.sum(cp.norm(both, axis=0))


@each
@pytest.mark.parametrize("tau", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_denoising_is_cvxpys(isotropic: bool, tau: float) -> None:
    v = randn(2, 6, 5, seed=1)
    prior = eq.TotalVariation2d(0.5, isotropic=isotropic)
    found, off = prior.prox(v, tau), prior.prox_error(v, tau)
    for row, z, error in zip(v.numpy(), found.numpy(), off.tolist(), strict=True):
        variable = cp.Variable(row.shape)
        cost = 0.5 * tau * variation(variable, isotropic) + 0.5 * cp.sum_squares(variable - row)
        cp.Problem(cp.Minimize(cost)).solve(solver=cp.CLARABEL)
        assert np.abs(z - variable.value).max() < 1e-4
        assert error < 1e-5
        variable.value = z
        assert float(prior.value(torch.tensor(z).unsqueeze(0))) == pytest.approx(
            0.5 * float(variation(variable, isotropic).value)
        )


@pytest.mark.parametrize("isotropic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_in_weight_and_image(isotropic: bool) -> None:
    """A weight per sample; finite differences of a solve to ten digits."""
    v, weight = randn(2, 5, 4, seed=2), torch.tensor([0.3, 0.6], dtype=torch.float64)

    def prox(v: Tensor, weight: Tensor) -> Tensor:
        return eq.TotalVariation2d(weight, isotropic=isotropic, rtol=1e-10).prox(v)

    inputs = [v.requires_grad_(), weight.requires_grad_()]
    assert gradcheck(prox, inputs, eps=1e-5, atol=1e-4, rtol=1e-3, fast_mode=True)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 3.0), st.booleans())
def test_laws_of_a_prox(seed: int, weight: float, isotropic: bool) -> None:
    """Firmly nonexpansive, the mean is kept, a large weight leaves a constant, scales commute."""
    prior = eq.TotalVariation2d(weight, isotropic=isotropic)
    v = randn(3, 4, 4, seed=seed)
    p = prior.prox(v)
    moved, given_ = p[:1] - p[1:], v[:1] - v[1:]
    assert bool(((moved * given_).sum((1, 2)) >= moved.square().sum((1, 2)) - 1e-6).all())
    torch.testing.assert_close(p.mean((1, 2)), v.mean((1, 2)), atol=1e-6, rtol=0)
    flat = eq.TotalVariation2d(1e3, isotropic=isotropic).prox(v)
    torch.testing.assert_close(flat, v.mean((1, 2), keepdim=True).expand_as(v), atol=1e-6, rtol=0)
    scaled = eq.TotalVariation2d(10 * weight, isotropic=isotropic).prox(10 * v)
    torch.testing.assert_close(scaled, 10 * p, atol=1e-5, rtol=0)
    assert bool((prior.least_subgradient(p, p - v).norm(dim=(1, 2)) < 1e-3).all())


def test_one_row_is_the_exact_total_variation() -> None:
    v = randn(3, 1, 12, seed=4)
    for isotropic in (True, False):
        found = eq.TotalVariation2d(0.4, isotropic=isotropic).prox(v)
        torch.testing.assert_close(found, eq.TotalVariation(0.4).prox(v), atol=1e-6, rtol=0)


@each
def test_a_weight_given_as_a_number_keeps_its_digits(isotropic: bool) -> None:
    """Two pixels move towards each other by the weight; 0.3 and 1e-60 are no float32."""
    for weight in (0.3, 3e-60):
        v = torch.tensor([[[10 * weight, 0.0]]], dtype=torch.float64)
        prior = eq.TotalVariation2d(weight, isotropic=isotropic)
        wanted = torch.tensor([[[9 * weight, weight]]], dtype=torch.float64)
        torch.testing.assert_close(prior.prox(v), wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            prior.value(v)[0], 10 * weight**2 + 0 * v.sum(), rtol=1e-12, atol=0
        )


@pytest.mark.slow
def test_certificates_count_the_inner_solve() -> None:
    """A prox to three digits: the bound still holds."""
    x = randn(2, 5, 5, seed=5)
    exact = eq.TotalVariation2d(0.5, rtol=1e-12, max_steps=20000).prox(x)
    rough = eq.Problem(eq.TotalVariation2d(0.5, rtol=1e-2), smooth=eq.LeastSquares(None, x))
    found = eq.certify(rough)
    z = eq.minimize(rough).value
    assert bool(((z - exact).norm(dim=(1, 2)) <= found.error_bound).all())
    assert not found.rigorous


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
def test_a_bad_sample_harms_no_other() -> None:
    v = randn(3, 4, 4, seed=8)
    want = eq.TotalVariation2d(0.4).prox(v)
    v[1, 2, 2] = torch.nan
    found = eq.TotalVariation2d(0.4).prox(v.requires_grad_())
    torch.testing.assert_close(found[::2], want[::2], atol=1e-6, rtol=0)
    assert bool(found[1].isnan().any())
    found[::2].square().sum().backward()
    assert v.grad is not None
    assert bool(v.grad[::2].isfinite().all())


def test_differences_have_their_adjoint() -> None:
    K = DifferenceOperator()
    z, y = randn(2, 3, 4, 5, seed=6), randn(2, 2, 3, 4, 5, seed=7)
    torch.testing.assert_close((K(z) * y).sum(), (z * K.adjoint(y)).sum())
    matrix = K(torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)).reshape(12, -1)
    assert float(torch.linalg.matrix_norm(matrix, 2)) <= K.norm_upper()
    with pytest.raises(ValueError, match="negative"):
        DifferenceOperator((1,))


def test_the_bound_on_the_prox_holds_its_rounding() -> None:
    v = randn(2, 4, 3, seed=5)
    for dtype in (torch.float32, torch.bfloat16):
        prior, given = eq.TotalVariation2d(0.3), v.to(dtype)
        exact = eq.TotalVariation2d(0.3, rtol=1e-11).prox(given.double())
        off = (prior.prox(given).double() - exact).flatten(1).norm(dim=1)
        assert bool((off <= prior.prox_error(given) * (1 + 1e-9)).all())


@pytest.mark.parametrize("own", [True, False])
def test_no_gap_is_claimed_with_a_loose_inner_solve(own: bool) -> None:
    c, prior = randn(2, 4, 4, seed=3), eq.TotalVariation2d(0.5, rtol=0.3, max_steps=2)
    fit, rest = eq.LeastSquares(None, c), eq.SoftThreshold(1e-9)
    terms = (prior, [(rest, None)]) if own else (rest, [(prior, None)])
    proof: Any = eq.certify(eq.Composite(*terms, fit), z=eq.TotalVariation2d(0.5).prox(c))
    assert bool(proof.error_bound.isinf().all())
    assert "TotalVariation2d is an inner solve" in str(proof)
