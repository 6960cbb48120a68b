"""Anderson's method with a guard: the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.solvers.guarded import Guarded
from tests.contracts.problems import quietly
from tests.contracts.solver_contract import SolverContract


@pytest.mark.slow
class TestGuarded(SolverContract):
    def solver(self, **options: Any) -> Guarded:
        return Guarded(**{"memory": 5, **options})


@pytest.mark.parametrize("start", [0.0, 3.0, -1.0])
def test_a_far_iterate_is_not_called_converged(start: float) -> None:
    """Where S moves by a constant, the residual is small beside an iterate that is far away."""
    goal = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)

    def drift(u: torch.Tensor) -> torch.Tensor:
        return goal + (u - goal).sign() * torch.relu((u - goal).abs() - 1e-5)

    with quietly():
        z0 = start * goal + (start and 0.1)
        found = eq.fixed_point(drift, z0, solver=Guarded(rtol=1e-6, max_steps=300))
    off = float((found.value - goal).norm())
    assert not bool(found.converged) or off < 1e-4
    assert off < 10.0 or start != 0.0
