"""Anderson: the contract, a dense textbook twin, finite termination, restarts, memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria import Anderson
from tests.contracts import problems
from tests.contracts.solver_contract import (
    SolverContract,
    assert_answers,
    assert_same,
    solve,
    state_bytes,
    steps_of,
)


class TestAnderson(SolverContract):
    def solver(self, **options: Any) -> Anderson:
        return Anderson(**options)


class TestDampedAnderson(SolverContract):
    """Another memory and damping: the same promises."""

    damped = True
    stiff_steps = 600  # three states remembered; still a quarter of damped Picard's 2250

    def solver(self, **options: Any) -> Anderson:
        return Anderson(memory=3, damping=0.8, **options)


def textbook_anderson(
    problem: problems.Problem, steps: int, memory: int, damping: float
) -> list[np.ndarray]:
    """Type II by differences and least squares, one sample at a time, in numpy (Walker & Ni)."""
    out = []
    for i in range(problem.batch):
        args = tuple(a[i : i + 1] for a in problem.args)
        z = problem.z0[i].numpy()
        iterates, residuals = [], []
        for _ in range(steps):
            f = problem.fn(torch.from_numpy(z)[None], *args)[0].numpy()
            iterates = [*iterates, z][-memory:]
            residuals = [*residuals, f - z][-memory:]
            moved = z + damping * (f - z)
            if len(iterates) > 1:
                dz = np.stack([b - a for a, b in itertools.pairwise(iterates)], 1)
                dr = np.stack([b - a for a, b in itertools.pairwise(residuals)], 1)
                gamma = np.linalg.lstsq(dr, f - z, rcond=None)[0]
                moved = moved - (dz + damping * dr) @ gamma
            z = moved
        out.append(z)
    return out


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    memory=st.integers(1, 4),
    damping=st.sampled_from([1.0, 0.5]),
    steps=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
def test_steps_are_those_of_the_textbook(
    memory: int, damping: float, steps: int, seed: int
) -> None:
    problem = problems.tanh(batch=2, size=6, radius=0.9, seed=seed)
    solver = Anderson(rtol=0.0, memory=memory, damping=damping, max_steps=steps, ridge=1e-15)
    expected = np.stack(textbook_anderson(problem, steps, memory, damping))
    # Least squares by normal equations: half of 16 digits times a modest condition number.
    torch.testing.assert_close(
        solve(problem, solver).value, torch.from_numpy(expected), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("size", [2, 4, 6])
def test_affine_map_is_solved_in_as_many_steps_as_dimensions(size: int) -> None:
    """With memory n + 1 it is GMRES in disguise: n + 1 steps span the space, one more tests it."""
    problem = problems.linear(3, size, 0.9)
    solution = solve(problem, Anderson(memory=size + 2, rtol=1e-8, block=1))
    assert_answers(problem, solution)
    assert int(solution.stats.steps.max()) <= size + 3


def test_expansive_map_is_solved() -> None:
    """Eigenvalues −4 … 0.9: Picard diverges."""
    problem = problems.symmetric(torch.tensor([[-4.0, -2.0, -1.0, 0.5, 0.9]]).expand(3, 5))
    assert_answers(problem, solve(problem, Anderson(memory=7, rtol=1e-8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ridge_is_relative(dtype: torch.dtype) -> None:
    """A large ridge has the same effect at every scale."""
    base = problems.linear(radius=0.9).to(dtype)
    counts = []
    for factor in (2.0**-40, 1.0, 2.0**40):
        solver = Anderson(ridge=0.1, max_steps=1000)
        counts.append(solve(problems.scaled(base, factor), solver).stats.steps.tolist())
    assert counts[0] == counts[1] == counts[2]


def test_repeated_residuals_make_a_singular_system_that_is_survived() -> None:
    """T = z + 1: all residuals are equal, the Gram matrix has rank one."""
    fn = lambda z, a: torch.where(a > 0, 0.5 * z + 1, z + 1)
    which = torch.tensor([[1.0], [-1.0]])
    with pytest.warns(eq.ConvergenceWarning):
        solution = eq.fixed_point(fn, torch.zeros(2, 3), which, solver=Anderson(rtol=1e-5))
    assert torch.isfinite(solution.value).all()
    assert solution.converged.tolist() == [True, False]
    assert float((solution.value[0] - 2).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "rtol", "slope"), [(torch.float32, 1e-6, 0.6), (torch.float64, 1e-12, 0.05)]
)
def test_residuals_much_shorter_than_others_are_survived(
    dtype: torch.dtype, rtol: float, slope: float
) -> None:
    """Some of these samples are at their fixed point steps before the next test of convergence."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(8000, 2, 2, dtype=torch.float64, generator=generator)
    a *= slope / torch.linalg.matrix_norm(a, 2)[:, None, None]
    b = torch.randn(8000, 2, dtype=torch.float64, generator=generator)

    def fn(z: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("bij,bj->bi", a, z)) + b

    true = b
    for _ in range(80):
        true = fn(true, a, b)
    args = a.to(dtype), b.to(dtype)
    sol = eq.fixed_point(fn, torch.zeros_like(args[1]), args, solver=Anderson(rtol=rtol))
    assert sol.converged.all()
    assert ((sol.value.double() - true).norm(dim=1) <= 3 * rtol * true.norm(dim=1)).all()


def test_restart_forgets_one_sample_and_spares_its_mates() -> None:
    problem, solver = problems.tanh(batch=3), Anderson(memory=3)
    stalled = torch.tensor([False, True, False])
    plain, restarted = steps_of(solver, problem, 9), steps_of(solver, problem, 9, 5, stalled)
    for a, b in zip(plain, restarted, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert not torch.equal(plain[5][1], restarted[5][1])
    # A fresh solve from the same iterate takes the same steps as the restarted sample.
    fresh = steps_of(solver, problems.replace(problem, z0=plain[4]), 4)
    for a, b in zip(fresh, restarted[5:], strict=True):
        assert_same(a[1], b[1], rtol=1e-9)


def test_state_memory_is_at_most_2m_plus_2_states() -> None:
    memory, batch, size = 4, 3, 1000
    small = batch * memory * (memory + 2) * 8
    found = state_bytes(Anderson(memory=memory), batch, size)
    assert found <= (2 * memory + 2) * batch * size * 4 + small
