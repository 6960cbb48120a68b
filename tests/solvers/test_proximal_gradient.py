"""ProximalGradient without momentum is Picard on T_τ; with momentum it restarts by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import equilibria as eq
from equilibria.solvers.proximal_gradient import proximal_step
from tests.contracts.solver_contract import SolverContract


class TestPlainProximalGradient(SolverContract):
    accelerated = False

    def solver(self, **options: Any) -> eq.ProximalGradient:
        return eq.ProximalGradient(accelerate=False, **{"max_steps": 100, **options})


def quadratic(eigenvalues: torch.Tensor) -> Any:
    """A gradient step of ½⟨z, Hz⟩ − ⟨b, z⟩, H = diag(eigenvalues), as a map with τ = 1/L."""
    b = torch.ones(1, len(eigenvalues), dtype=torch.float64)
    tau = 1.0 / float(eigenvalues.max())
    return lambda z: z - tau * (eigenvalues * z - b), b / eigenvalues


def test_momentum_beats_plain_steps_on_an_ill_conditioned_problem() -> None:
    fn, exact = quadratic(torch.logspace(0, -3, 30, dtype=torch.float64))
    start = torch.zeros_like(exact)
    steps = {}
    for fast in (True, False):
        solver = eq.ProximalGradient(accelerate=fast, rtol=1e-9, max_steps=20000, block=1)
        sol = eq.fixed_point(fn, start, solver=solver)
        assert sol.converged.all()
        steps[fast] = int(sol.stats.steps[0])
        # ‖z − z*‖ ≤ ‖z − T(z)‖·L/m.
        assert float((sol.value - exact).norm()) <= 1.01e3 * float(sol.stats.residual[0])
    # κ = 1000: about √κ against κ, times the same logarithm.
    assert steps[True] * 5 < steps[False]


def test_restart_keeps_samples_apart() -> None:
    fn, _ = quadratic(torch.logspace(0, -2, 8, dtype=torch.float64))
    starts = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    solver = eq.ProximalGradient(rtol=1e-10, max_steps=5000)
    together = eq.fixed_point(fn, starts, solver=solver)
    for i in range(5):
        alone = eq.fixed_point(fn, starts[i : i + 1], solver=solver)
        assert int(alone.stats.steps[0]) == int(together.stats.steps[i])
        torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("m", "upper"), [(0.5, 2.0), (0.1, 1.0), (1.0, 1.0)])
def test_step_by_the_bounds(m: float, upper: float) -> None:
    assert proximal_step(m, upper, accelerate=True) == pytest.approx(1 / upper)
    assert proximal_step(m, upper, accelerate=False) == pytest.approx(2 / (m + upper))


def test_step_per_sample_and_without_convexity() -> None:
    tau = proximal_step(torch.tensor([0.5, -1.0]), torch.tensor([2.0, 4.0]), accelerate=False)
    np.testing.assert_allclose(tau, [2 / 2.5, 1 / 4])
    with pytest.raises(ValueError, match="finite bound"):
        proximal_step(0.1, math.inf, accelerate=True)
