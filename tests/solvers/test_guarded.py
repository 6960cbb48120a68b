"""Anderson's method with a guard: the contract."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.engine.result import ConvergenceWarning
from equilibria.solvers.guarded import Guarded
from tests.contracts import problems
from tests.contracts.solver_contract import RTOL, SolverContract, solve_quietly


@pytest.mark.slow
class TestGuarded(SolverContract):
    def solver(self, **options: Any) -> Guarded:
        return Guarded(**{"memory": 5, **options})

    def test_nearly_singular_map_is_solved_or_reported(self) -> None:
        """Its answer is 1e5 times the first scale: reported, as no long step is taken there."""
        problem = problems.nearly_singular()
        solution = solve_quietly(problem, self.precise(max_steps=300))
        residual, scale = problem.residual(solution.value)
        assert torch.equal(solution.converged, residual <= RTOL * scale)


def test_a_far_iterate_is_not_called_converged() -> None:
    """Where S moves by a constant, the residual is small beside an iterate that is far away."""
    goal = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)

    def drift(u: torch.Tensor) -> torch.Tensor:
        return goal + (u - goal).sign() * torch.relu((u - goal).abs() - 1e-5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = eq.fixed_point(drift, 0.0 * goal, solver=Guarded(rtol=1e-6, max_steps=300))
    assert not bool(found.converged)
    assert float(found.value.norm()) < 10.0
