"""Results: codes, messages, counts, warnings, errors that carry the solution."""

from __future__ import annotations

import pickle

import pytest
import torch

import equilibria as eq
from equilibria import ConvergenceWarning, Result, Solution, Stats
from equilibria.engine.result import describe_failures
from tests.contracts import problems


def made(*codes: Result) -> Solution[torch.Tensor]:
    n = len(codes)
    stats = Stats(torch.arange(1, n + 1), torch.ones(n), torch.linspace(0.1, 0.2, n), 9, 4)
    return Solution(torch.zeros(n, 2), torch.tensor([int(c) for c in codes]), stats)


def test_counts_and_converged() -> None:
    solution = made(Result.converged, Result.nonfinite, Result.converged, Result.stagnated)
    assert solution.converged.tolist() == [True, False, True, False]
    assert solution.counts() == {Result.converged: 2, Result.nonfinite: 1, Result.stagnated: 1}


def test_summary_is_a_line_for_people() -> None:
    text = made(Result.converged, Result.diverged).summary()
    wanted = "1 converged, 1 diverged; steps 1 to 2, relative residual up to 2.00e-01"
    assert text == wanted


def test_description_of_failures() -> None:
    assert describe_failures({Result.converged: 4}) is None
    assert describe_failures({}) is None
    text = describe_failures({Result.converged: 3, Result.diverged: 2, Result.max_steps: 1})
    assert "2 of 6 samples diverged" in text
    assert "1 of 6 samples max_steps" in text
    assert "converged (" not in text
    assert describe_failures({Result.fixed_steps: 4}) is None  # no test, no failure
    for code in list(Result)[1:5]:
        told = describe_failures({code: 1}) or ""
        assert f"({code.message}: " in told  # what happened: what helps


def test_solution_of_a_solve_pickles() -> None:
    problem = problems.linear()
    with torch.no_grad():
        solution = eq.fixed_point(problem.fn, problem.z0, problem.args)
    again = pickle.loads(pickle.dumps(solution))
    assert torch.equal(again.value, solution.value)
    assert torch.equal(again.stats.residual, solution.stats.residual)


def test_a_warning_points_at_the_line_of_the_user() -> None:
    """Through fixed_point, a layer, a layer in torch's containers, a backward pass."""
    few = eq.Picard(max_steps=1, rtol=1e-9)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.manual_seed(0)
    layer = eq.nn.GEQ(16, 16, in_channels=3, solver=few)  # wide: its equilibrium is not 0
    bad = eq.Implicit(solver=eq.GMRES(max_steps=1, rtol=1e-12))
    calls = [
        lambda: eq.fixed_point(lambda z: 0.9 * z + x, x, solver=few),
        lambda: layer(x),
        lambda: torch.nn.Sequential(layer)(x),
        lambda: layer.solve(x),
        lambda: (
            eq.fixed_point(
                lambda z: (
                    0.5 * torch.sin(z @ torch.tensor([[1.0, 2, 0], [0, 1, 1], [1, 0, 1]])) + x
                ),
                torch.zeros(2, 3),
                solver=eq.Picard(max_steps=200, rtol=1e-6),
                adjoint=bad,
            )
            .value.sum()
            .backward()
        ),
    ]
    for call in calls:
        with pytest.warns(ConvergenceWarning) as caught:
            call()
        assert {each.filename for each in caught} == {__file__}
