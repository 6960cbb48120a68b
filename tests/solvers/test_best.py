"""BestIterate: the contract around Anderson, and the best of the trajectory where it fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria import (
    Anderson,
    BestIterate,
    Broyden,
    ConvergenceWarning,
    Picard,
    ProximalGradient,
    Result,
)
from equilibria.engine.solver import Solver
from tests.contracts import problems
from tests.contracts.problems import quietly
from tests.contracts.solver_contract import (
    SolverContract,
    assert_same,
    codes,
    solve,
    solve_quietly,
)


class TestBestOfAnderson(SolverContract):
    returns_last_iterate = False

    def solver(self, **options: Any) -> BestIterate:
        return BestIterate(Anderson(**options))


def restless(batch: int = 4) -> problems.Problem:
    """Eigenvalues −1.02 … −1.08 beside small ones: the residual falls first, then grows."""
    growing = torch.linspace(-1.02, -1.08, batch)
    spectrum = torch.stack([torch.tensor([float(g), 0.5, 0.3, 0.1]) for g in growing])
    problem = problems.symmetric(spectrum)
    # Start where the growing direction is hardly touched.
    return problems.replace(problem, z0=problem.answer + 1e-3 * problems.randn(batch, 4, seed=5))


def best_of(problem: problems.Problem, solver: Solver) -> tuple[Tensor, Tensor]:
    """The trajectory's iterate of least residual a sample, and that residual."""
    iterates: list[Tensor] = []
    solve_quietly(problem, solver, callback=lambda step, z, r: iterates.append(z.clone()))
    residuals = torch.stack([problem.residual(z)[0] for z in iterates])
    least, at = residuals.min(0)
    return torch.stack([iterates[k][i] for i, k in enumerate(at.tolist())]), least


@pytest.mark.parametrize("inner", [Picard, Anderson, Broyden])
@pytest.mark.parametrize("compact", [False, True])
def test_failing_sample_gets_its_best_iterate(inner: type[Solver], compact: bool) -> None:
    problem = restless()
    steps = 15 if inner is Picard else 4  # the others would have solved it by then
    options = {"rtol": 1e-15, "max_steps": steps, "compact": compact}
    expected, least = best_of(problem, inner(**options))
    solution = solve_quietly(problem, BestIterate(inner(**options)))
    failed = ~solution.converged
    assert failed.any()
    assert_same(solution.value[failed], expected[failed])
    torch.testing.assert_close(
        solution.stats.residual[failed], least[failed], rtol=1e-9, atol=1e-15
    )


def test_best_iterate_of_a_stagnating_sample() -> None:
    problem = problems.rotation(1.0)
    solution = solve_quietly(problem, BestIterate(Picard(max_steps=200)))
    assert codes(solution) == [Result.stagnated] * 3
    _, least = best_of(problem, Picard(max_steps=200))
    torch.testing.assert_close(solution.stats.residual, least, rtol=1e-9, atol=0)


def test_best_iterate_after_compaction_belongs_to_its_own_sample() -> None:
    easy = problems.linear(4, 4, 0.2)
    hard = restless(2)
    problem = problems.Problem(
        problems.apply_affine,
        torch.cat([hard.z0[:1], easy.z0, hard.z0[1:]]),
        tuple(torch.cat([h[:1], e, h[1:]]) for h, e in zip(hard.args, easy.args, strict=True)),
        torch.cat([hard.answer[:1], easy.answer, hard.answer[1:]]),
        torch.cat([hard.gain[:1], easy.gain, hard.gain[1:]]),
    )
    solver = Picard(rtol=1e-8, max_steps=60, compact=True)
    expected, least = best_of(hard, Picard(rtol=1e-8, max_steps=60))
    problem, seen = problems.recording(problem)
    solution = solve_quietly(problem, BestIterate(solver))
    assert min(len(z) for z in seen) <= 3
    assert codes(solution) == [Result.max_steps, *[Result.converged] * 4, Result.max_steps]
    assert_same(solution.value[[0, 5]], expected)
    torch.testing.assert_close(solution.stats.residual[[0, 5]], least, rtol=1e-9, atol=0)


def test_fixed_steps_return_the_best_iterate_too() -> None:
    """A fixed-step solve has no sample that converged: each gets its best of the k evaluated."""
    problem = restless()
    expected, _ = best_of(problem, Picard(rtol=1e-15, max_steps=60))
    solution = solve(problem, BestIterate(Picard(rtol=0.0, max_steps=60)))
    assert_same(solution.value, expected)


def test_converged_samples_are_those_of_the_inner_solver() -> None:
    problem = problems.mixed()
    inner = Anderson(rtol=1e-8, max_steps=200)
    assert torch.equal(solve(problem, BestIterate(inner)).value, solve(problem, inner).value)


def test_options_of_the_inner_solver_hold() -> None:
    wrapped = BestIterate(Anderson(rtol=1e-3, max_steps=9, memory=3))
    assert (wrapped.rtol, wrapped.max_steps) == (1e-3, 9)
    assert wrapped != BestIterate(Anderson(rtol=1e-3, max_steps=9, memory=4))
    assert "BestIterate(Anderson(" in repr(wrapped)
    changed = dataclasses.replace(wrapped, rtol=0.0, max_steps=4)
    assert changed == BestIterate(Anderson(rtol=0.0, max_steps=4, memory=3))
    assert (changed.rtol, changed.max_steps) == (0.0, 4)


@pytest.mark.parametrize("inner", [Anderson, None, "anderson", BestIterate(Picard())])
def test_wraps_solvers_only(inner: object) -> None:
    with pytest.raises(TypeError, match="BestIterate wraps a solver such as"):
        BestIterate(inner)  # type: ignore[arg-type]


@pytest.mark.parametrize("fixed", [False, True])
def test_the_residual_stated_is_that_of_the_problems_own_map(fixed: bool) -> None:
    """With a step of τ = 0.05 it was that of T_τ, a twentieth."""
    torch.manual_seed(0)
    weight = torch.randn(6, 6, dtype=torch.float64)
    weight, c = weight / torch.linalg.matrix_norm(weight, 2), 5 + torch.randn(4, 6).double()
    problem = eq.Problem(eq.NonNegative(), eq.Linear(weight, c))
    rtol = 0.0 if fixed else None
    solver = BestIterate(eq.ProximalGradient(max_steps=7, tau=0.05, rtol=rtol))
    with quietly():
        sol = eq.minimize(problem, solver=solver)
    image = torch.relu(sol.value @ weight.T @ weight + c)
    torch.testing.assert_close(sol.stats.residual, (image - sol.value).norm(dim=1))


@pytest.mark.parametrize("inner", [Anderson(), Picard(), Broyden(), ProximalGradient()])
def test_the_inner_solver_answers_for_itself(inner: Solver) -> None:
    wrapped = BestIterate(inner)
    for name in ("stride", "fall", "accelerated", "joins"):
        assert getattr(wrapped, name) == getattr(inner, name)


def test_no_solver_is_recommended_to_itself() -> None:
    with pytest.warns(ConvergenceWarning) as told:
        solve(problems.linear(3, 4, 0.99), BestIterate(Anderson(max_steps=2)))
    assert "use Anderson" not in str(told[0].message)
