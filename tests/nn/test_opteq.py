"""OptEq in both forms: against cvxpy and dense algebra."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import equilibria as eq
from tests.contracts.layer_contract import EXACT, TIGHT, BoundedLayerContract, check_gradients
from tests.nn.checks import matrices
from tests.optional import optional
from tests.oracles import PROXES
from tests.problems.test_operators import conv_matrix, randn

cp = optional("cvxpy")


class TestHiddenForm(BoundedLayerContract):
    shape = (3,)

    def layer(self, **options: Any) -> eq.nn.OptEq:
        return eq.nn.OptEq(4, 5, in_channels=3, form="hidden", nu=1.3, **options)


class TestConvolutionalStateForm(BoundedLayerContract):
    shape = (2, 4, 4)

    def layer(self, **options: Any) -> eq.nn.OptEq:
        return eq.nn.OptEq(3, 4, in_channels=2, kernel_size=3, **{"prior": eq.Tanh(), **options})


@pytest.mark.parametrize(("form", "kernel_size"), [("state", None), ("hidden", 3)])
def test_gradients_of_the_other_two(form: Any, kernel_size: int | None) -> None:
    layer = made(form=form, kernel_size=kernel_size, adjoint=EXACT)
    check_gradients(layer, randn(2, 3, seed=5) if kernel_size is None else randn(1, 3, 4, 4))


# ---------------------------------------------------------------------- oracles


def made(channels: int = 4, mid: int = 5, **options: Any) -> eq.nn.OptEq:
    torch.manual_seed(2)
    return eq.nn.OptEq(channels, mid, in_channels=3, solver=TIGHT, **options).double().eval()


def cvxpy_hidden(w: np.ndarray, c: np.ndarray, nu: float, prior: str) -> np.ndarray:
    """argmin f(ζ) + ½ζᵀ(I − WWᵀ/ν)ζ − cᵀζ."""
    zeta = cp.Variable(len(c))
    quadratic = np.eye(len(c)) - w @ w.T / nu
    cost = 0.5 * cp.quad_form(zeta, cp.psd_wrap(quadratic)) - c @ zeta
    limits = []
    if prior == "relu":
        limits = [zeta >= 0]
    elif prior == "box":
        limits = [zeta >= -0.3, zeta <= 0.8]
    elif prior == "soft":
        cost = cost + 0.2 * cp.norm1(zeta)
    cp.Problem(cp.Minimize(cost), limits).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-10
    )
    return zeta.value


@pytest.mark.parametrize(
    ("prior", "nu", "kernel_size"),
    [
        *((prior, nu, None) for prior in ("relu", "identity", "box", "soft") for nu in (1.0, 2.5)),
        ("relu", 1.0, 3),
    ],
)
def test_the_hidden_form_finds_cvxpys_minimizer(
    prior: str, nu: float, kernel_size: int | None
) -> None:
    layer = made(form="hidden", prior=PROXES[prior][0], nu=nu, kernel_size=kernel_size)
    x = randn(3, 3, seed=5) if kernel_size is None else randn(2, 3, 4, 5, seed=5)
    zeta = layer(x).detach().flatten(1).numpy()
    w, c = matrices(layer, x)
    for found, features in zip(zeta, c, strict=True):
        np.testing.assert_allclose(found, cvxpy_hidden(w, features, nu, prior), atol=1e-6)


@pytest.mark.parametrize("kernel_size", [None, 3])
@pytest.mark.parametrize("nu", [1.0, 2.5])
def test_the_state_form_solves_equation_3_and_has_its_objective(
    kernel_size: int | None, nu: float
) -> None:
    """½‖z‖² − (1/ν)1ᵀσ̃(Wz + c) with σ̃ = ½max(v, 0)² for ReLU; strongly convex, as ‖W‖² < ν."""
    layer = made(kernel_size=kernel_size, nu=nu)
    x = randn(2, 3, seed=5) if kernel_size is None else randn(2, 3, 3, 4, seed=5)
    z = layer(x).detach()
    w, c = matrices(layer, x)
    flat = z.flatten(1).numpy()
    for i in range(2):
        active = np.maximum(w @ flat[i] + c[i], 0)
        np.testing.assert_allclose(flat[i], w.T @ active / nu, atol=1e-11)
        least = 0.5 * flat[i] @ flat[i] - 0.5 * (active**2).sum() / nu
        assert float(layer.problem(x).objective(z)[i].detach()) == pytest.approx(least, abs=1e-10)


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus", "leaky", "soft"])
@pytest.mark.parametrize("kernel_size", [None, 3])
@pytest.mark.parametrize("nu", [1.0, 1.7])
def test_the_two_forms_are_one_layer(activation: str, kernel_size: int | None, nu: float) -> None:
    prior, sigma = PROXES[activation]
    options: dict[str, Any] = {"prior": prior, "kernel_size": kernel_size, "nu": nu}
    state, hidden = made(form="state", **options), made(form="hidden", **options)
    hidden.load_state_dict(state.state_dict())
    x = randn(2, 3, seed=5) if kernel_size is None else randn(2, 3, 4, 4, seed=5)
    z, zeta = state(x), hidden(x)
    torch.testing.assert_close(hidden.to_state(zeta), z, rtol=0, atol=1e-11)
    torch.testing.assert_close(state.to_hidden(z, x), zeta, rtol=0, atol=1e-11)
    w, c = matrices(state, x)
    flat = zeta.detach().flatten(1).numpy()
    np.testing.assert_allclose(flat, sigma(flat @ w @ w.T / nu + c, 1.0), atol=1e-11)
    # Their minima agree as well (Toland): ½‖z‖² − ψ(z) = G(ζ)/ν at the solution.
    left = state.problem(x).objective(z)
    torch.testing.assert_close(left, hidden.problem(x).objective(zeta) / nu, rtol=0, atol=1e-10)


def test_nu_needed() -> None:
    layer = made(constraint=None)
    layer.W.weight.data.mul_(5.0)
    top = np.linalg.norm(layer.W.weight.detach().numpy(), 2)
    assert layer.nu_needed() == pytest.approx(top**2, rel=1e-9)
    scaled = made(constraint=None, nu=1.01 * layer.nu_needed())
    scaled.load_state_dict(layer.state_dict())
    solution = scaled.solve(randn(4, 3, seed=5), solver=eq.Auto(rtol=1e-10, max_steps=2000))
    assert bool(solution.converged.all())


def test_input_norm() -> None:
    layer = made()
    expected = np.linalg.norm(layer.U.weight.detach().numpy(), 2)
    assert layer.input_norm_upper() == pytest.approx(expected, rel=1e-12)
    conv = made(3, 4, kernel_size=3)
    big = np.linalg.norm(conv_matrix(conv.U.weight, 12, 12, padding=1), 2)
    assert big <= conv.input_norm_upper() <= 1.05 * big


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "both"}, "form='both'"),
        ({"nu": 0.0}, "nu=0.0"),
        ({"nu": float("inf")}, "nu=inf"),
        ({"kernel_size": 2}, "odd kernel"),
        ({"mid": 0}, "mid=0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eq.nn.OptEq(**{"channels": 3, "mid": 4, **options})
