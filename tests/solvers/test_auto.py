"""Auto is Anderson on plain maps, and follows the bounds on problems."""

from __future__ import annotations

import math
from typing import Any

import pytest

import equilibria as eq
from tests.contracts.solver_contract import SolverContract


class TestAutoOnMaps(SolverContract):
    def solver(self, **options: Any) -> eq.Auto:
        return eq.Auto(**options)


@pytest.mark.parametrize(
    ("bounds", "chosen", "says"),
    [
        ((0.9, 1.1), eq.Picard, "plain iteration"),
        ((0.5, 1.8), eq.Anderson, "0.8"),
        ((0.2, 2.6), eq.ProximalGradient, "strongly convex"),
        ((-0.5, 2.6), eq.ProximalGradient, "not certified convex"),
        ((-math.inf, math.inf), eq.Anderson, "no bound"),
    ],
)
def test_choice_follows_the_contraction_factor(
    bounds: tuple[float, float], chosen: type, says: str
) -> None:
    choice = eq.Auto(rtol=1e-5).for_problem(lambda: bounds)
    assert type(choice.solver) is chosen
    assert choice.solver.rtol == 1e-5
    assert says in choice.reason
    assert (choice.tau == 1.0) == (chosen is not eq.ProximalGradient)


def test_limits_are_handed_on() -> None:
    far = lambda: (0.1, 3.0)
    assert eq.Auto(max_steps=7).for_problem(far).solver.max_steps == 7
    assert eq.Auto().for_problem(far).solver.max_steps == eq.ProximalGradient().max_steps
    assert eq.BestIterate(eq.Auto()).for_problem(far).solver.inner == eq.ProximalGradient()
