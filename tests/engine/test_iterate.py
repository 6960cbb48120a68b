"""The driver: a solver of two dozen lines gets every promise; when what is looked at; who is told.

``Adaptive`` below is written as the documentation says a new solver is: options, ``init``,
``step``. It inherits the whole battery: the promises are the driver's, not the solvers'.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria import Picard, Result
from equilibria.engine.options import check_number, options
from equilibria.engine.solver import Point, Solver
from equilibria.engine.tree import Leaves, scale_samples
from tests.contracts import problems
from tests.contracts.solver_contract import (
    HEALTH_INTERVAL,
    SolverContract,
    assert_answers,
    codes,
    solve,
    solve_quietly,
)


@options
class Adaptive(Solver):
    """z ← z + βr with a β for each sample, cut where the driver says that it made no progress."""

    cut: float = 0.5

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_number(self, "cut", low=0.0, high=1.0, low_open=True)

    def init(self, z: Leaves) -> Tensor:
        return torch.ones(z[0].shape[0], dtype=torch.float64, device=z[0].device)

    def step(self, point: Point, state: Tensor) -> tuple[Leaves, Tensor]:
        moves = scale_samples(state, point.residual)
        return [z + r for z, r in zip(point.z, moves, strict=True)], state

    def restart(self, state: Tensor, stalled: Tensor) -> Tensor:
        return torch.where(stalled, self.cut * state, state)


class TestAdaptive(SolverContract):
    accelerated = False

    def solver(self, **options: Any) -> Adaptive:
        return Adaptive(**options)


def reflections(batch: int = 4) -> problems.Problem:
    """Odd samples have the eigenvalue −1: Picard bounces for ever. Even ones contract."""
    values = torch.tensor([[0.3, 0.5, 0.1], [-1.0, 0.5, 0.1]]).repeat(batch // 2, 1)
    return problems.symmetric(values)


@pytest.mark.parametrize("compact", [False, True])
def test_restart_is_asked_for_stalled_samples_only(compact: bool) -> None:
    asked: list[list[bool]] = []

    @options
    class Noting(Adaptive):
        def restart(self, state: Tensor, stalled: Tensor) -> Tensor:
            asked.append(stalled.tolist())
            return Adaptive.restart(self, state, stalled)

    problem = reflections()
    solution = solve(problem, Noting(rtol=1e-8, max_steps=400, compact=compact))
    assert_answers(problem, solution)
    expected = [True, True] if compact else [False, True, False, True]
    assert asked == [expected]
    # Even samples finished before; odd ones need the restart, at the second look.
    assert (solution.stats.steps[1::2] > 2 * HEALTH_INTERVAL).all()
    assert (solution.stats.steps[::2] < 2 * HEALTH_INTERVAL).all()


def test_every_result_code_in_one_batch() -> None:
    faults = torch.tensor([[0.0], [problems.NAN], [problems.GROWS], [0.0], [0.0]]).double()
    values = torch.tensor([[0.2, 0.1], [0.2, 0.1], [0.2, 0.1], [-1.0, 0.1], [0.995, 0.1]])
    base = problems.symmetric(values)
    problem = problems.replace(base, fn=problems.apply_with_fault, args=(*base.args, faults))
    for compact in (False, True):
        solver = Picard(rtol=1e-10, max_steps=80, compact=compact)
        solution = solve_quietly(problem, solver)
        assert codes(solution) == [
            Result.converged,
            Result.nonfinite,
            Result.diverged,
            Result.stagnated,
            Result.max_steps,
        ]
        assert solution.stats.steps.tolist()[1:] == [16, 16, 64, 80]
        assert solution.counts() == dict.fromkeys(list(Result)[:5], 1)
        assert torch.isfinite(solution.value).all()


@pytest.mark.parametrize("grows_at", [3, 20, 40])
def test_blown_sample_gets_its_last_bounded_iterate(grows_at: int) -> None:
    """Quiet until a component passes ``grows_at``: the value is that of the last good look."""

    def fn(z: Tensor) -> Tensor:
        return torch.where(z > grows_at, z * float("inf"), z + 1)

    z0 = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.warns(eq.ConvergenceWarning, match="2 of 2 samples nonfinite"):
        solution = eq.fixed_point(fn, z0, solver=Picard(rtol=1e-8, max_steps=200, patience=500))
    # z = step − 1 at the look of a step; the last look at which T(z) was finite.
    looks = [step for step in range(16, 201, 16) if step - 1 <= grows_at]
    expected = looks[-1] - 1 if looks else 0
    assert solution.value.tolist() == [[expected] * 3] * 2
    assert int(solution.stats.steps[0]) == (looks[-1] if looks else 0) + 16
    assert torch.isfinite(solution.stats.residual).all()


@pytest.mark.parametrize("atol", [0.0, 1e-4])
@pytest.mark.parametrize("batch", [1, 7, 64, 65])
def test_each_sample_stops_at_its_own_first_step_within_tolerance(batch: int, atol: float) -> None:
    """On a CPU the host compares the norms of up to 64 samples itself. z ← az + 1 from 0 is
    zₙ = (1 − aⁿ)/(1 − a) with the residual aⁿ."""
    a = torch.linspace(0.9, 0.05, batch, dtype=torch.float64).unsqueeze(1)
    fn = lambda z, a: a * z + 1
    solver = Picard(rtol=1e-5, atol=atol, block=1, max_steps=200)
    solution = eq.fixed_point(fn, torch.zeros_like(a), a, solver=solver)
    n = torch.arange(200, dtype=torch.float64)
    passes = a**n <= atol + 1e-5 * (1 - a ** (n + 1)) / (1 - a)
    taken = passes.int().argmax(1)
    assert solution.stats.steps.tolist() == (taken + 1).tolist()
    assert solution.converged.all()
    expected = (1 - a[:, 0] ** taken) / (1 - a[:, 0])
    torch.testing.assert_close(solution.value[:, 0], expected, rtol=1e-12, atol=0)


def test_looks_depend_on_the_step_alone() -> None:
    """A sick sample is found at the same step whatever its mates do, so that answers cannot."""
    for place in (0, 3):
        for batch in (4, 6):
            problem = problems.with_bad_sample(problems.NAN_LATER, place, batch)
            solution = solve_quietly(problem, Picard(rtol=1e-8, max_steps=500, compact=True))
            assert int(solution.stats.steps[place]) == HEALTH_INTERVAL


@pytest.mark.parametrize("max_steps", [1, 15, 16, 17])
def test_last_step_is_always_looked_at(max_steps: int) -> None:
    problem = problems.with_bad_sample(problems.NAN, 1)
    solution = solve_quietly(problem, Picard(rtol=1e-8, block=50, max_steps=max_steps))
    assert codes(solution)[1] == Result.nonfinite
    assert set(solution.stats.steps.tolist()) <= {16, max_steps}
    assert codes(solution)[0] == (Result.converged if max_steps > 1 else Result.max_steps)


def test_compaction_reads_are_counted() -> None:
    problem = problems.mixed(8)
    with torch.no_grad(), problems.HostReads() as reads:
        solution = solve(problem, Picard(rtol=1e-8, max_steps=2000, compact=True))
    # The check that the map can be cut reads too, once a solve: one comparison a leaf.
    assert solution.stats.syncs <= reads.count <= solution.stats.syncs + 1


@pytest.mark.parametrize("solver", [eq.Picard, eq.Anderson, eq.Broyden])
def test_fixed_steps_with_gradients_read_nothing(
    solver: type[Solver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training with fixed steps: the forward pass does not wait, whatever the map captures."""
    problems.as_on_a_gpu(monkeypatch)
    weight = (0.1 * problems.randn(4, 4, seed=0)).requires_grad_()
    x = problems.randn(3, 4, seed=1)
    made = solver(rtol=0.0, max_steps=6)
    for adjoint in (eq.Implicit(), eq.OneStep(), eq.Phantom(), eq.Unrolled()):
        with problems.HostReads() as reads:
            solution = eq.fixed_point(
                lambda z: torch.tanh(z @ weight.T + x),
                torch.zeros_like(x),
                solver=made,
                adjoint=adjoint,
            )
        assert reads.count == 0, adjoint
        assert solution.value.requires_grad
