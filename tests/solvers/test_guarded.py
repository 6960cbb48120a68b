"""Anderson's method with a guard: the contract."""

from __future__ import annotations

from typing import Any

import pytest

from equilibria.solvers.guarded import Guarded
from tests.contracts.solver_contract import SolverContract


@pytest.mark.slow
class TestGuarded(SolverContract):
    def solver(self, **options: Any) -> Guarded:
        return Guarded(**{"memory": 5, **options})
