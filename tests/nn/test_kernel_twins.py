"""Polynomial and sigmoid twins: against the formulas of Table 4 in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equilibria import ConvergenceWarning
from equilibria.nn import NormBounded, PolynomialEq, SigmoidEq
from equilibria.problems import DegenerateKernelWarning
from tests.contracts.layer_contract import TIGHT, BoundedLayerContract
from tests.nn.checks import matrices
from tests.problems.test_operators import randn

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


@pytest.mark.parametrize("kind", ["square", "sigmoid"])
@pytest.mark.parametrize("kernel_size", [None, 3])
def test_the_answer_is_stationary(kind: str, kernel_size: int | None) -> None:
    """T of Table 4 in numpy; ‖W‖² + 2‖c‖² < 1, so that G is convex."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"in_channels": 2, "kernel_size": kernel_size, "constraint": SMALL}
    options["solver"] = TIGHT
    if kind == "square":
        layer = PolynomialEq(3, 4, radius=0.4, **options).double().eval()
    else:
        layer = SigmoidEq(3, 4, radius=0.8, **options).double().eval()
    x = randn(2, 2, seed=2) if kernel_size is None else randn(2, 2, 3, 4, seed=2)
    w, features = matrices(layer, x)
    for z, c in zip(layer(x).detach().flatten(1).numpy(), features, strict=True):
        c *= min(1.0, layer.radius / np.linalg.norm(c))
        t = c @ z
        slope = 2 * (1 + t) if kind == "square" else 1 - np.tanh(t) ** 2
        assert np.linalg.norm(z) > 1e-2
        np.testing.assert_allclose(z, np.maximum(w.T @ w @ z + slope * c, 0), atol=1e-10)


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


def test_a_polynomial_of_odd_degree_runs_with_its_own_solver() -> None:
    torch.manual_seed(0)
    layer = PolynomialEq(4, 5, degree=3, radius=0.1)
    solution = layer.solve(torch.randn(3, 4))
    assert torch.isfinite(solution.value).all()
    assert solution.converged.all()


def test_radius_leaves_small_inputs_alone_and_scales_large_ones() -> None:
    layer = SigmoidEq(4, 5, radius=0.5).double()
    x = torch.stack([0.01 * randn(4), 100 * randn(4)])
    layer.U.bias.data.zero_()
    c, plain = layer.features(x), layer.U(x)
    torch.testing.assert_close(c[0], plain[0])
    torch.testing.assert_close(c[1], 0.5 * plain[1] / plain[1].norm())
    huge = SigmoidEq(4, 5, radius=0.5, bias=False)  # whose squares are infinite in float32
    direction = F.normalize(huge.U(x[1:].float()))
    torch.testing.assert_close(huge.features(1e25 * x[1:].float()), 0.5 * direction)
    # The projection to a ball does not expand: ‖U‖ stays an upper bound on x ↦ c.
    far = 50 * randn(200, 4, seed=3)
    near = far + randn(200, 4, seed=4)
    moved = (layer.features(far) - layer.features(near)).norm(dim=1)
    assert (moved <= layer.input_norm_upper() * (far - near).norm(dim=1)).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"degree": 1}, ValueError, "integer in .2, inf"),
        ({"degree": 2.0}, TypeError, "expected an integer"),
        ({"offset": 0.5}, ValueError, "offset=0.5"),
        ({"radius": 0.0}, ValueError, r"radius=0.0\) is out of range"),
        ({"kernel_size": 4}, ValueError, "odd kernel"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PolynomialEq(3, 4, **options)
