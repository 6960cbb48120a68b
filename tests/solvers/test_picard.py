"""Picard: the contract, and that its steps are applications of the map."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria import Picard, Result
from equilibria.engine.solver import Solver
from tests.contracts import problems
from tests.contracts.solver_contract import (
    HEALTH_INTERVAL,
    SolverContract,
    assert_answers,
    codes,
    solve,
    solve_quietly,
)


class TestPicard(SolverContract):
    accelerated = False

    def solver(self, **options: Any) -> Picard:
        return Picard(**options)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(damping=st.floats(0.05, 1.0) | st.just(1.0), steps=st.integers(1, 12))
def test_damped_step_is_the_weighted_mean(damping: float, steps: int) -> None:
    problem = problems.tanh(batch=2, size=3)
    solution = solve(problem, Picard(rtol=0.0, damping=damping, max_steps=steps))
    z = problem.z0
    for _ in range(steps):
        z = (1 - damping) * z + damping * problem.fn(z, *problem.args)
    torch.testing.assert_close(solution.value, z, rtol=1e-13, atol=1e-14)


def test_damping_solves_where_the_plain_iteration_diverges() -> None:
    """Eigenvalue −1.5: plain Picard grows by 1.5 a step, β = 0.5 shrinks by 0.25."""
    problem = problems.symmetric(torch.tensor([[-1.5, -1.0, 0.3]]))
    assert_answers(problem, solve(problem, Picard(rtol=1e-8, damping=0.5)))
    plain = solve_quietly(problem, Picard(rtol=1e-8))
    assert codes(plain) == [Result.diverged]


def test_linear_growth_is_called_divergence() -> None:
    problem = problems.with_bad_sample(problems.GROWS, 1)
    solution = solve_quietly(problem, Picard(rtol=1e-8, max_steps=4000))
    assert codes(solution)[1] == Result.diverged
    assert int(solution.stats.steps[1]) == HEALTH_INTERVAL
    assert torch.equal(solution.value[1], problem.z0[1])  # the last iterate known to be bounded
    assert codes(solution).count(Result.converged) == 4


def test_divergence_option_sets_the_bound() -> None:
    """3z + 1 from 0 has ‖T(z0)‖ + ‖T(z0) − z0‖ = 2; at step 16 the residual is 3¹⁵ ≈ 1.4e7."""
    fn = lambda z: 3 * z + 1
    z0 = torch.zeros(1, 1, dtype=torch.float64)
    bound = 3.0**15 / 2
    for divergence, code in ((bound * 0.99, Result.diverged), (bound * 1.01, Result.max_steps)):
        with pytest.warns(eq.ConvergenceWarning, match=code.name):
            solution = eq.fixed_point(fn, z0, solver=Picard(divergence=divergence, max_steps=16))
        assert codes(solution) == [code]


def test_fixed_steps_are_never_called_converged_and_report_divergence() -> None:
    solution = solve(problems.mixed(), Picard(rtol=0.0, max_steps=3))
    assert codes(solution) == [Result.fixed_steps] * 6
    assert solution.summary().startswith("6 fixed_steps;")
    assert float(solution.stats.residual[0]) == 0.0
    problem = problems.with_bad_sample(problems.GROWS, 1)
    found = codes(solve(problem, Picard(rtol=0.0, max_steps=20)))
    assert found.count(Result.diverged) == 1
    half = eq.fixed_point(
        lambda z: 0.992 * z + 1,
        torch.zeros(2, 3, dtype=torch.bfloat16),
        solver=Picard(rtol=0.0, max_steps=4),
    )
    assert codes(half) == [Result.fixed_steps] * 2  # a residual of the dtype's own rounding
    assert found[1] == Result.diverged


def test_pure_rotation_stagnates() -> None:
    """‖Tz − z‖ never falls: stagnated after ``patience`` steps, not after max_steps."""
    problem = problems.rotation(1.0)
    for patience in (16, 48):
        solution = solve_quietly(problem, Picard(max_steps=1000, patience=patience))
        assert codes(solution) == [Result.stagnated] * 3
        assert set(solution.stats.steps.tolist()) == {16 + patience}


@pytest.mark.parametrize(
    "solver", [Picard(max_steps=9000), Picard(max_steps=9000, damping=0.5),
               eq.ProximalGradient(max_steps=9000, accelerate=False)]
)  # fmt: skip
def test_equal_steps_to_the_answer_are_not_stagnation(solver: Solver) -> None:
    """The proximal step of λ|z|, λ = 2⁻¹²: 4096 steps of one length, then the answer."""
    shrink = lambda z: torch.sign(z) * (z.abs() - 2.0**-12).clamp_min(0)
    found = eq.fixed_point(shrink, torch.ones(2, 3), solver=solver)
    assert codes(found) == [Result.converged] * 2
    assert found.value.tolist() == torch.zeros(2, 3).tolist()


@pytest.mark.parametrize("rate", [1.0, 1.001])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("compact", [False, True])
def test_a_drift_to_infinity_never_converges(rate: float, block: int, compact: bool) -> None:
    """T(z) = rate·z + 1 from 0: a residual that never falls is small beside far iterates."""
    rates = torch.tensor([[rate], [0.5], [0.25], [rate]], dtype=torch.float64)
    solver = Picard(rtol=1e-2, max_steps=400, block=block, compact=compact)
    with pytest.warns(eq.ConvergenceWarning):
        found = eq.fixed_point(lambda z, r: r * z + 1.0, 0.0 * rates, rates, solver=solver)
    assert found.stats.relative[0] < 1e-2
    wanted = [Result.max_steps, Result.converged, Result.converged, Result.max_steps]
    assert codes(found) == wanted
