"""Broyden: the contract, a dense twin, finite termination, safeguards, bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria import Broyden
from equilibria.engine.solver import Point
from tests.contracts import problems
from tests.contracts.solver_contract import (
    SolverContract,
    assert_answers,
    solve,
    solve_quietly,
    state_bytes,
    steps_of,
)


class TestBroyden(SolverContract):
    def solver(self, **options: Any) -> Broyden:
        return Broyden(**options)


class TestBroydenWithoutSafeguard(SolverContract):
    """No skipping, no restarts; more memory than the problems have dimensions."""

    def solver(self, **options: Any) -> Broyden:
        return Broyden(memory=30, safeguard=None, **options)

    def test_unreachable_tolerance_ends_without_convergence(self) -> None:
        """Without a safeguard the last iterate may wander off; that it failed is still said."""
        problem = problems.linear(radius=0.9).to(torch.float32)
        solution = solve_quietly(problem, self.solver(rtol=1e-12, max_steps=5000))
        assert torch.isfinite(solution.value).all()
        residual, _ = problem.residual(solution.value)
        assert torch.equal(solution.converged, residual == 0)


def dense_broyden(problem: problems.Problem, steps: int) -> np.ndarray:
    """Good Broyden with the whole inverse Jacobian H, H₀ = −I, one sample at a time, in numpy."""
    out = []
    for i in range(problem.batch):
        args = tuple(a[i : i + 1] for a in problem.args)
        g = lambda z, args=args: problem.fn(torch.from_numpy(z)[None], *args)[0].numpy() - z
        z = problem.z0[i].numpy()
        inverse = -np.eye(len(z))
        residual = g(z)
        for _ in range(steps):
            move = -inverse @ residual
            z = z + move
            new = g(z)
            change = new - residual
            applied = inverse @ change
            inverse += np.outer(move - applied, move @ inverse) / (move @ applied)
            residual = new
        out.append(z)
    return np.stack(out)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(steps=st.integers(1, 9), seed=st.integers(0, 1000))
def test_steps_are_those_of_the_dense_method(steps: int, seed: int) -> None:
    problem = problems.tanh(batch=2, size=7, radius=0.8, seed=seed)
    solver = Broyden(rtol=0.0, memory=12, safeguard=None, max_steps=steps)
    expected = torch.from_numpy(dense_broyden(problem, steps))
    # The same arithmetic in another order: rounding, amplified by nine secant updates.
    torch.testing.assert_close(solve(problem, solver).value, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_affine_map_is_solved_in_twice_as_many_steps_as_dimensions(size: int) -> None:
    """Gay's theorem: at most 2n steps, and one evaluation to see it."""
    problem = problems.linear(3, size, 0.9)
    solution = solve(problem, Broyden(rtol=1e-8, memory=2 * size + 2, safeguard=None, block=1))
    assert_answers(problem, solution)
    assert int(solution.stats.steps.max()) <= 2 * size + 1


def test_expansive_map_is_solved() -> None:
    problem = problems.symmetric(torch.tensor([[-4.0, -2.0, 0.5, 0.9]]).expand(3, 4))
    assert_answers(problem, solve(problem, Broyden(rtol=1e-8)))


@pytest.mark.parametrize("memory", [1, 2, 3])
def test_short_memory_starts_again_and_still_converges(memory: int) -> None:
    for problem in (problems.linear(radius=0.9), problems.tanh(radius=0.9)):
        solution = solve(problem, Broyden(rtol=1e-8, memory=memory, max_steps=2000))
        assert_answers(problem, solution)


def test_singular_update_is_skipped() -> None:
    """T = z + 1: y = g_new − g_old = 0, so that sᵀHy = 0; division would give NaN."""
    fn = lambda z, a: torch.where(a > 0, 0.5 * z + 1, z + 1)
    which = torch.tensor([[1.0], [-1.0]])
    for safeguard in (1e-3, None):
        with pytest.warns(eq.ConvergenceWarning):
            solution = eq.fixed_point(
                fn, torch.zeros(2, 3), which, solver=Broyden(rtol=1e-5, safeguard=safeguard)
            )
        assert torch.isfinite(solution.value).all()
        assert solution.converged.tolist() == [True, False]


def test_restart_forgets_one_sample_and_spares_its_mates() -> None:
    problem, solver = problems.tanh(batch=3), Broyden(memory=8)
    stalled = torch.tensor([False, True, False])
    plain, restarted = steps_of(solver, problem, 8), steps_of(solver, problem, 8, 5, stalled)
    for a, b in zip(plain, restarted, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert not torch.equal(plain[5][1], restarted[5][1])


@pytest.mark.parametrize("when", [2, 3, 5])
def test_restart_leaves_a_secant_or_a_plain_step(when: int) -> None:
    """For one number Broyden is the secant method, whatever its history; restarted, it is that
    or T itself, never a step of a Jacobian that fits no pair of points."""
    fn = lambda z: 2.0 * torch.cos(z) + 0.1 * z
    solver = Broyden()
    z, state = [torch.tensor([[0.3]], dtype=torch.float64)], None
    state = solver.init(z)
    points: list[tuple[float, float]] = []
    with torch.no_grad():
        for k in range(when + 1):
            if k == when:
                state = solver.restart(state, torch.tensor([True]))
            value = fn(z[0])
            points.append((float(z[0]), float(value - z[0])))
            z, state = solver.step(Point(z, [value]), state)
    (z0, g0), (z1, g1) = points[-2:]
    secant, plain = z1 - g1 * (z1 - z0) / (g1 - g0), z1 + g1
    found = float(z[0])
    assert min(abs(found - secant), abs(found - plain)) < 1e-10


@pytest.mark.parametrize("memory", [1, 2, 3, 10])
def test_every_step_for_one_number_is_a_secant_or_a_plain_one(memory: int) -> None:
    """Through jumps, restarts and the end of the memory: g is nearly level at the start, so that
    the first secant leads far out, where the residual is 64 times as large."""
    g = lambda z: torch.where(z < -2, 20 - 0.9 * z, 1.23 - (z - 0.5) ** 2)
    solver = Broyden(memory=memory, safeguard=1e-12)
    z = [torch.zeros(1, 1, dtype=torch.float64)]
    state = solver.init(z)
    points: list[tuple[float, float]] = []
    steps: list[str] = []
    with torch.no_grad():
        for _ in range(9):
            points.append((float(z[0]), float(g(z[0]))))
            z, state = solver.step(Point(z, [z[0] + g(z[0])]), state)
            z1, g1 = points[-1]
            ways = {"plain": z1 + g1}
            if len(points) > 1:
                z0, g0 = points[-2]
                ways["secant"] = z1 - g1 * (z1 - z0) / (g1 - g0)
            name, target = min(ways.items(), key=lambda item: abs(float(z[0]) - item[1]))
            # Rounding of a secant grows with the level stretch that it spans: 1/0.02 here.
            assert abs(float(z[0]) - target) <= 1e-9 * (1 + abs(target))
            steps.append(name)
    # T itself; a secant that jumps; forgotten, so plain; then secants again.
    assert steps[:4] == ["plain", "secant", "plain", "secant"]


def test_memory_does_not_grow_with_steps() -> None:
    found = state_bytes(Broyden(memory=3), batch=2, size=500)
    assert found <= (2 * 3 + 4) * 2 * 500 * 4 + 1024
