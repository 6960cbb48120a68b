"""The coupling of OptEq's Eq 3: against quadrature of σ, differences and dense Hessians."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.integrate
import torch

from equilibria.problems import (
    Activated,
    Box,
    ConvOperator,
    DenseOperator,
    Free,
    LeakyNonNegative,
    Logistic,
    NonNegative,
    Prior,
    Problem,
    ShiftedNonNegative,
    Softplus,
    SoftThreshold,
    Tanh,
)
from tests.problems.test_operators import conv_matrix, randn

PRIORS: dict[str, Prior] = {
    "relu": NonNegative(),
    "box": Box(-0.3, 0.8),
    "soft": SoftThreshold(0.2),
    "shifted": ShiftedNonNegative(0.1),
    "leaky": LeakyNonNegative(0.3),
    "free": Free(),
    "tanh": Tanh(),
    "sigmoid": Logistic(),
    "softplus": Softplus(),
}


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
def test_gradient_and_hessian(name: str, kind: str) -> None:
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


def test_the_map_is_equation_3_for_every_step() -> None:
    w, c, z = 0.2 * randn(5, 3), randn(2, 5, seed=1), randn(2, 3, seed=2)
    problem = Problem(Free(), Activated(w, c, NonNegative()))
    image = torch.relu(z @ w.mT + c) @ w
    torch.testing.assert_close(problem.step(z), image)
    torch.testing.assert_close(problem.step(z, 0.3), 0.7 * z + 0.3 * image)
    torch.testing.assert_close(problem.gradient(z), z - image)
    torch.testing.assert_close(problem.stationarity(z), (z - image).norm(dim=1))


def test_hvp_keeps_its_graph_where_asked() -> None:
    coupling = Activated(randn(5, 3), randn(2, 5, seed=1), Tanh())
    z = randn(2, 3, seed=2).requires_grad_()
    v = randn(2, 3, seed=3)
    assert torch.autograd.gradcheck(lambda z: coupling.hvp(z, v), (z,))
    with torch.no_grad():
        assert not coupling.hvp(z, v).requires_grad


def test_the_start_has_the_shape_of_a_state() -> None:
    assert Activated(randn(5, 3), randn(2, 5), NonNegative()).default_start().shape == (2, 3)
    conv = Activated(ConvOperator(randn(4, 2, 3, 3), 2), randn(2, 4, 3, 5), NonNegative())
    assert conv.default_start().shape == (2, 2, 6, 10)


def test_errors() -> None:
    w, c = randn(5, 3), randn(2, 5)
    with pytest.raises(ValueError, match="c has the shape of Wz"):
        Activated(w, randn(2, 4), NonNegative())
    with pytest.raises(TypeError, match="expected a prior"):
        Activated(w, c, torch.relu)  # type: ignore[arg-type]
    for nu in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="nu="):
            Activated(w, c, NonNegative(), nu)
    with pytest.raises(ValueError, match="W takes a state"):
        Activated(w, c, NonNegative()).grad(randn(3, 3))
