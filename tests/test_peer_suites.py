"""The problems of the tests of jaxopt and optimistix (benchmarks/peer_suites.py); proxes."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import equilibria as eq

SUITE = Path(__file__).parents[1] / "benchmarks" / "peer_suites.py"
suite = SimpleNamespace(**runpy.run_path(str(SUITE)))


@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: case.name)
def test_a_root_and_its_derivative(case: Any) -> None:
    """By NewtonKrylov; the derivative against dense algebra with complex steps."""
    z, _, slope = suite.by_us("NewtonKrylov")(case, 1e-10, True)
    assert suite.standing(case, z, 1e-10)
    exact = suite.derivative(case, z)
    if exact is None:
        assert case.name.startswith("double root")
    else:
        assert abs(slope - exact) <= 1e-9 * max(1.0, abs(exact))


def test_the_oracle_of_derivatives_knows_closed_forms() -> None:
    cases = {case.name: case for case in suite.CASES}
    z = np.full(28, 0.7390851332151607)  # cos z = z; dz/ds = −z sin(z)/(1 + sin z)
    expected = 28 * -z[0] * np.sin(z[0]) / (1 + np.sin(z[0]))
    assert suite.derivative(cases["cos"], z) == pytest.approx(expected, rel=1e-12)
    z = np.full(28, 0.567143290409784)  # exp(−z) = z; dz/ds = −z²/(1 + z)
    assert suite.derivative(cases["exp(−z)"], z) == pytest.approx(-28 * z[0] ** 2 / (1 + z[0]))


def test_proxes_at_the_point_of_jaxopts_tests() -> None:
    x = np.random.RandomState(0).rand(20) * 2 - 1
    norm, n = np.linalg.norm(x), len(x)
    level = max((np.sort(x)[::-1][:k].sum() - 1) / k for k in range(1, n + 1))
    means = [[x[j:k].mean() if k > j else np.inf for k in range(1, n + 1)] for j in range(n)]
    rising = [max(min(row[i:]) for row in means[: i + 1]) for i in range(n)]
    expected = {
        eq.SoftThreshold(0.5): np.sign(x) * np.maximum(np.abs(x) - 0.5, 0),
        eq.GroupSoftThreshold(0.1): x * (1 - 0.1 / norm),
        eq.GroupSoftThreshold(10.0): 0 * x,
        eq.ShiftedNonNegative(0.5): np.maximum(x - 0.5, 0),
        eq.Box(0.0, 0.5): np.clip(x, 0, 0.5),
        eq.Simplex(): np.maximum(x - level, 0),
        eq.Ball(): x / norm,
        eq.HalfSpace(1.0, -1.0): x - (x.sum() + 1) / n,
        eq.Isotonic(): np.array(rising),
    }
    for prior, answer in expected.items():
        found = prior.prox(torch.from_numpy(x)[None])[0].numpy()
        np.testing.assert_allclose(found, answer, atol=1e-15, err_msg=repr(prior))
