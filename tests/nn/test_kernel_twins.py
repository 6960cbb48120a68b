"""Polynomial and sigmoid twins: against scipy and the formulas of Table 4."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch

from equilibria import ConvergenceWarning
from equilibria.nn import NormBounded, PolynomialEq, SigmoidEq
from equilibria.problems import DegenerateKernelWarning
from tests.contracts.layer_contract import TIGHT, BoundedLayerContract
from tests.problems.test_operators import conv_matrix, randn

SMALL = NormBounded(bound=0.6)


class TestPolynomialEq(BoundedLayerContract):
    shape = (3,)

    def layer(self, **options: Any) -> PolynomialEq:
        return PolynomialEq(4, 5, in_channels=3, radius=0.4, **{"constraint": SMALL, **options})


class TestSigmoidEq(BoundedLayerContract):
    shape = (2, 4, 4)

    def layer(self, **options: Any) -> SigmoidEq:
        options = {"constraint": SMALL, **options}
        return SigmoidEq(3, 4, in_channels=2, kernel_size=3, radius=0.9, **options)


def minimizer(w: np.ndarray, c: np.ndarray, kind: str, start: np.ndarray) -> np.ndarray:
    """argmin over z ≥ 0 of ½‖z‖² − φ(⟨c, z⟩) − ½‖Wz‖²."""

    def objective(z: np.ndarray) -> tuple[float, np.ndarray]:
        t = c @ z
        phi, slope = {
            "square": ((1 + t) ** 2, 2 * (1 + t)),
            "sigmoid": (np.tanh(t), 1 - np.tanh(t) ** 2),
        }[kind]
        value = 0.5 * z @ z - phi - 0.5 * (w @ z) @ (w @ z)
        return value, z - slope * c - w.T @ (w @ z)

    found = scipy.optimize.minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * len(start),
        options={"ftol": 1e-16, "gtol": 1e-11, "maxiter": 5000},
    )
    return found.x


@pytest.mark.parametrize("kind", ["square", "sigmoid"])
@pytest.mark.parametrize("kernel_size", [None, 3])
def test_scipys_minimizer(kind: str, kernel_size: int | None) -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {"in_channels": 2, "kernel_size": kernel_size, "constraint": SMALL}
    options["solver"] = TIGHT
    if kind == "square":
        layer = PolynomialEq(3, 4, radius=0.4, **options).double().eval()
    else:
        layer = SigmoidEq(3, 4, radius=0.8, **options).double().eval()
    x = randn(2, 2, seed=2) if kernel_size is None else randn(2, 2, 3, 4, seed=2)
    z = layer(x).detach().flatten(1).numpy()
    bias = layer.U.bias.detach().numpy()
    if kernel_size is None:
        w, u = layer.W.weight.detach().numpy(), layer.U.weight.detach().numpy()
    else:
        w, u = (conv_matrix(m.weight, 3, 4, padding=1) for m in (layer.W, layer.U))
        bias = np.repeat(bias, 12)
    for i in range(2):
        c = u @ x[i].numpy().ravel() + bias
        c *= min(1.0, layer.radius / np.linalg.norm(c))
        expected = minimizer(w, c, kind, np.full(len(c), 0.1))
        assert np.linalg.norm(expected) > 1e-2
        np.testing.assert_allclose(z[i], expected, atol=1e-6)


def test_the_polynomial_as_printed_warns_and_starts_away_from_zero() -> None:
    with pytest.warns(DegenerateKernelWarning, match="degenerate"):
        layer = PolynomialEq(4, 5, offset=0.0, radius=0.3, constraint=SMALL)
    with pytest.warns(DegenerateKernelWarning):
        problem = layer.problem(torch.randn(2, 4))
    start = layer.start(problem, torch.randn(2, 4))
    torch.testing.assert_close(start.norm(dim=1), torch.ones(2))
    assert problem.step(torch.zeros(2, 4)).abs().max().item() == 0.0


def test_a_polynomial_of_unbounded_objective_is_reported() -> None:
    layer = PolynomialEq(4, 5, degree=2).double()
    layer.U.weight.data.fill_(1.0)
    with pytest.warns(ConvergenceWarning):
        solution = layer.solve(torch.ones(1, 4, dtype=torch.float64))
    assert not bool(solution.converged.any())


def test_radius_leaves_small_inputs_alone_and_scales_large_ones() -> None:
    layer = SigmoidEq(4, 5, radius=0.5).double()
    x = torch.stack([0.01 * randn(4), 100 * randn(4)])
    layer.U.bias.data.zero_()
    c, plain = layer.features(x), layer.U(x)
    torch.testing.assert_close(c[0], plain[0])
    torch.testing.assert_close(c[1], 0.5 * plain[1] / plain[1].norm())
    # The projection to a ball does not expand: ‖U‖ stays an upper bound on x ↦ c.
    far = 50 * randn(200, 4, seed=3)
    near = far + randn(200, 4, seed=4)
    moved = (layer.features(far) - layer.features(near)).norm(dim=1)
    assert (moved <= layer.input_norm_upper() * (far - near).norm(dim=1)).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"degree": 1}, ValueError, "at least 2"),
        ({"degree": 2.0}, TypeError, "expected an integer"),
        ({"offset": 0.5}, ValueError, "offset=0.5"),
        ({"radius": 0.0}, ValueError, r"radius=0.0\) is out of range"),
        ({"kernel_size": 4}, ValueError, "odd kernel"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PolynomialEq(3, 4, **options)
