"""What every fixed-point solver owes its users. Inherit, name the solver, and get every test.

Two hooks: ``solver(**options)`` makes one; ``accelerated`` says whether it solves affine maps of
small size in a few steps whatever their spectrum (Anderson, Broyden) or needs a contraction.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria import ConvergenceWarning, Result, Solution
from equilibria.engine.solver import Point, Solver

from . import problems
from .problems import Problem, norm, quietly

# One law is checked for several solvers: the battery is a base class.
law = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors],
)

HEALTH_INTERVAL = 16
"""Documented in engine/iterate.py: divergence, NaN and stagnation are looked at this often."""

RTOL = 1e-8
"""Tolerance of the float64 solves below: far from rounding (1e-16), far from a guess."""


def solve(problem: Problem, solver: Solver, **options: Any) -> Solution[Any]:
    return eq.fixed_point(problem.fn, problem.z0, problem.args, solver=solver, **options)


def solve_quietly(problem: Problem, solver: Solver, **options: Any) -> Solution[Any]:
    with quietly():
        return solve(problem, solver, **options)


def codes(solution: Solution[Any]) -> list[Result]:
    return [Result(c) for c in solution.result.tolist()]


def assert_answers(problem: Problem, solution: Solution[Any], rtol: float = RTOL) -> None:
    """Every sample converged, and lies within gain·rtol·‖T(z)‖ of the known answer."""
    assert codes(solution) == [Result.converged] * problem.batch
    residual, scale = problem.residual(solution.value)
    # 1e-12: rounding of the residual itself, beside a tolerance of 1e-8.
    assert (residual <= rtol * scale * (1 + 1e-6) + 1e-12 * scale).all()
    assert (problem.error(solution.value) <= problem.gain * (rtol + 1e-12) * scale * 1.001).all()


def assert_same(left: Any, right: Any, rtol: float = 1e-11) -> None:
    """Equal up to rounding that a few dozen steps may pile up; float64."""
    for a, b in zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True):
        scale = float(b.abs().max()) or 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=rtol * scale)


def steps_of(
    solver: Solver,
    problem: Problem,
    count: int,
    restart_at: int | None = None,
    stalled: Tensor | None = None,
) -> list[Tensor]:
    """The iterates of so many bare steps; before one of them some samples are restarted."""
    z, state = [problem.z0], solver.init([problem.z0])
    found = []
    with torch.no_grad():
        for k in range(count):
            if k == restart_at:
                state = solver.restart(state, stalled)
            z, state = solver.step(Point(z, [problem.fn(z[0], *problem.args)]), state)
            found.append(z[0])
    return found


def state_bytes(solver: Solver, batch: int, size: int) -> int:
    """What a solver holds after many steps on states [batch, size] in float32."""
    z = [torch.zeros(batch, size)]
    state = solver.init(z)
    with torch.no_grad():
        for _ in range(25):
            z, state = solver.step(Point(z, [0.9 * torch.cos(z[0])]), state)
    held: dict[int, int] = {}

    def walk(item: Any) -> None:
        if isinstance(item, Tensor):
            held[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, (list, tuple)):
            for child in item:
                walk(child)
        elif hasattr(item, "__dict__"):
            walk(list(vars(item).values()))

    walk(state)
    return sum(held.values())


class SolverContract:
    """Inherited by the tests of each solver."""

    accelerated: ClassVar[bool] = True
    damped: ClassVar[bool] = False
    returns_last_iterate: ClassVar[bool] = True
    """Whether a sample that did not converge gets its last iterate (BestIterate: another one)."""
    stiff_steps: ClassVar[int] = 180
    """An accelerated solver's limit on problems.stiff: a tenth of Picard's ln(1e-8)/ln(0.99)."""

    def solver(self, **options: Any) -> Solver:
        raise NotImplementedError("name the solver under test")

    def precise(self, **options: Any) -> Solver:
        """Tight enough for error bounds, and tested at each step so that counts are exact."""
        return self.solver(**{"rtol": RTOL, "max_steps": 4000, "block": 1, **options})

    # ------------------------------------------------------------------ answers

    @pytest.mark.parametrize("radius", [0.0, 0.5, 0.95])
    @pytest.mark.parametrize("kind", [problems.linear, problems.tanh, problems.rotation])
    def test_the_known_answer_is_reached(self, kind: Any, radius: float) -> None:
        problem = kind(radius=radius)
        assert_answers(problem, solve(problem, self.precise()))

    def test_stiff_map(self) -> None:
        problem = problems.stiff()
        solution = solve(problem, self.precise())
        assert_answers(problem, solution)
        if self.accelerated:
            assert int(solution.stats.steps.max()) < self.stiff_steps

    def test_nearly_singular_map_is_solved_or_reported(self) -> None:
        """I − A has an eigenvalue of 1e-5: no silence, no NaN, and right where converged."""
        problem = problems.nearly_singular()
        solution = solve_quietly(problem, self.precise(max_steps=300))
        assert torch.isfinite(solution.value).all()
        residual, scale = problem.residual(solution.value)
        passed = residual <= RTOL * scale * (1 + 1e-6) + 1e-12 * scale
        assert torch.equal(solution.converged, passed)
        if self.accelerated:
            assert_answers(problem, solution)

    def test_mixed_difficulty_each_sample_at_its_own_pace(self) -> None:
        problem = problems.mixed()
        solution = solve(problem, self.precise())
        assert_answers(problem, solution)
        steps = solution.stats.steps.tolist()
        assert self.damped or steps[0] <= 2  # A = 0: T(z0) is the answer
        assert steps[0] < steps[2] < steps[-1]

    def test_identity_and_zero_maps(self) -> None:
        z0 = problems.randn(3, 4, seed=0)
        same = eq.fixed_point(lambda z: z, z0, solver=self.precise())
        assert torch.equal(same.value, z0)
        assert same.stats.residual.tolist() == [0.0] * 3
        zero = eq.fixed_point(lambda z: 0.5 * z, torch.zeros(3, 4), solver=self.solver())
        assert codes(zero) == [Result.converged] * 3  # 0 ≤ rtol·0, and no 0/0
        assert zero.stats.relative.tolist() == [0.0] * 3

    def test_one_sample_of_one_number(self) -> None:
        start = torch.zeros(1, dtype=torch.float64)
        solution = eq.fixed_point(torch.cos, start, solver=self.precise())
        # Dottie's number. |cos'| < 0.68 there: gain 1/(1 − 0.68) ≤ 3.2 with T(z) ≤ 1.
        assert abs(float(solution.value) - 0.7390851332151607) < 3.2 * RTOL

    # ------------------------------------------------------------------ stopping

    @pytest.mark.parametrize(("rtol", "atol"), [(1e-3, 0.0), (0.0, 1e-3), (1e-4, 1e-2)])
    def test_stops_by_the_documented_test(self, rtol: float, atol: float) -> None:
        """‖T(z) − z‖ ≤ atol + rtol·‖T(z)‖ at the returned z, and at no z before it."""
        problem = problems.mixed()
        trajectory: list[Tensor] = []
        note = lambda step, z, residual: trajectory.append(z.clone())
        solution = solve(problem, self.precise(rtol=rtol, atol=atol), callback=note)
        assert solution.converged.all()
        tests = []
        for z in trajectory:
            residual, scale = problem.residual(z)
            tests.append(residual <= atol + rtol * scale)
        first = torch.stack(tests).int().argmax(0) + 1
        assert solution.stats.steps.tolist() == first.tolist()

    def test_residual_in_stats_is_that_of_the_value(self) -> None:
        """For every way to end: recompute ‖T(z) − z‖ and ‖T(z) − z‖/‖T(z)‖ at the value."""
        base = problems.with_bad_sample(problems.EXPLODES, place=2)
        for max_steps in (3, 20, 90):
            solution = solve_quietly(base, self.precise(max_steps=max_steps))
            residual, scale = base.residual(solution.value)
            close = {"rtol": 1e-9, "atol": 1e-14}
            torch.testing.assert_close(solution.stats.residual, residual, **close)
            torch.testing.assert_close(solution.stats.relative, residual / scale, **close)

    def test_step_limit_is_kept_and_reported(self) -> None:
        problem, seen = problems.recording(problems.mixed())
        problem.z0[0] = problem.answer[0]
        with torch.no_grad():
            solution = solve_quietly(problem, self.solver(rtol=1e-12, max_steps=4))
        asked = not self.returns_last_iterate  # whether the best iterates go together
        assert len(seen) == solution.stats.evaluations == 4 + asked
        assert codes(solution)[0] == Result.converged
        assert codes(solution)[-1] == Result.max_steps
        assert int(solution.stats.steps[-1]) == 4
        assert torch.isfinite(solution.value).all()

    def test_warns_once_with_counts_and_advice(self) -> None:
        problem = problems.mixed()
        solver = self.solver(rtol=1e-12, max_steps=4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            solution = eq.fixed_point(problem.fn, problem.z0, problem.args, solver=solver)
        assert [w.category for w in caught] == [ConvergenceWarning]
        left = int((solution.result == Result.max_steps).sum())
        text = str(caught[0].message)
        assert f"{left} of {problem.batch} samples max_steps" in text
        assert "raise max_steps" in text
        assert caught[0].filename == __file__  # points at the caller's line

    def test_throw_raises_and_hands_over_the_solution(self) -> None:
        problem = problems.mixed()
        with pytest.raises(eq.NotConvergedError, match="max_steps") as caught:
            solve(problem, self.solver(rtol=1e-12, max_steps=4), throw=True)
        assert codes(caught.value.solution)[-1] == Result.max_steps
        assert solve(problem, self.precise(), throw=True).converged.all()

    def test_unreachable_tolerance_ends_without_convergence(self) -> None:
        """Below rounding: stagnated (or an exact hit), long before a large max_steps."""
        problem = problems.linear(radius=0.9).to(torch.float32)
        solution = solve_quietly(problem, self.solver(rtol=1e-12, max_steps=5000))
        assert set(codes(solution)) <= {Result.stagnated, Result.converged}
        residual, _ = problem.residual(solution.value)
        assert (residual[solution.converged] == 0).all()
        assert solution.stats.evaluations < 500
        # Stagnation is no harm: within rounding (2⁻²⁴, a sum of 8 + 1 terms) of the answer.
        _, scale = problem.residual(solution.value)
        assert (problem.error(solution.value) <= problem.gain * scale * 9 * 2.0**-23).all()

    @pytest.mark.parametrize(
        ("dtype", "rate"),
        [(torch.float32, 0.999), (torch.float64, 0.999), (torch.float64, 0.99999)],
    )
    def test_slow_contraction_is_not_stagnation(self, dtype: torch.dtype, rate: float) -> None:
        """Its residual falls by less than 2% in 16 steps, but at each."""
        values = torch.tensor([[rate, 0.2], [-rate, 0.2]], dtype=torch.float64)
        problem = problems.symmetric(values).to(dtype)
        solution = solve_quietly(problem, self.solver(rtol=1e-6, max_steps=600))
        assert set(codes(solution)) <= {Result.converged, Result.max_steps}

    def test_rounding_ends_a_slow_contraction(self) -> None:
        problem = problems.symmetric(torch.tensor([[0.98, 0.2]])).to(torch.float32)
        solution = solve_quietly(problem, self.solver(rtol=1e-12, max_steps=20000))
        assert set(codes(solution)) <= {Result.stagnated, Result.converged}
        assert solution.stats.evaluations < 3000
        assert float(solution.stats.relative) < 1e-6

    # ------------------------------------------------------------------ per sample

    @law
    @given(seed=st.integers(0, 10**6), batch=st.integers(2, 5))
    def test_batch_mates_do_not_matter(self, seed: int, batch: int) -> None:
        problem = problems.mixed(batch, seed=seed)
        together = solve(problem, self.precise())
        for i in range(batch):
            alone = solve(problem.take([i]), self.precise())
            assert int(alone.stats.steps) == int(together.stats.steps[i])
            assert_same(alone.value[0], together.value[i])
            mine, theirs = alone.stats.relative[0], together.stats.relative[i]
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-14)

    @pytest.mark.parametrize("place", [0, 2, 4])
    @pytest.mark.parametrize("fault", [*problems.FAULTS, "nan_input"])
    def test_bad_sample_is_contained_and_reported(self, fault: str, place: int) -> None:
        if fault == "nan_input":
            problem = problems.mixed(5)
            problem.args[1][place] = float("nan")
        else:
            problem = problems.with_bad_sample(problems.FAULTS[fault], place)
        mates = [i for i in range(5) if i != place]
        solution = solve_quietly(problem, self.precise())
        expected = solve(problem.take(mates), self.precise())
        assert_same(solution.value[mates], expected.value)
        assert solution.stats.steps[mates].tolist() == expected.stats.steps.tolist()
        assert_answers(problem.take(mates), expected)
        bad = codes(solution)[place]
        assert bad != Result.converged
        assert torch.isfinite(solution.value[place]).all()
        if "nan" in fault and fault != "nan_later":
            assert bad == Result.nonfinite
            assert int(solution.stats.steps[place]) == HEALTH_INTERVAL
            assert torch.equal(solution.value[place], problem.z0[place])

    def test_infinite_map_never_counts_as_converged(self) -> None:
        """∞ ≤ rtol·∞ holds; it must not pass."""
        fn = lambda z: torch.full_like(z, float("inf"))
        with pytest.warns(ConvergenceWarning, match="2 of 2 samples nonfinite"):
            solution = eq.fixed_point(fn, torch.zeros(2, 3), solver=self.solver())
        assert codes(solution) == [Result.nonfinite] * 2
        assert torch.isfinite(solution.value).all()

    def test_finished_sample_is_frozen(self) -> None:
        """Its value is the iterate at its own last step, however long the others run."""
        problem = problems.mixed()
        trajectory: list[Tensor] = []
        note = lambda step, z, r: trajectory.append(z.clone())
        solution = solve(problem, self.precise(), callback=note)
        steps = solution.stats.steps.tolist()
        assert len(trajectory) == max(steps)
        assert 0 <= solution.stats.evaluations - max(steps) <= 1  # one may look for coupling
        for i, step in enumerate(steps):
            assert torch.equal(solution.value[i], trajectory[step - 1][i])
        cut = solve_quietly(problem, self.precise(max_steps=steps[2] + 1))
        for i in range(3):
            assert torch.equal(cut.value[i], solution.value[i])

    # ------------------------------------------------------------------ blocks and the host

    @pytest.mark.parametrize("block", [1, 4, 7])
    def test_host_reads_are_counted_and_bounded(self, block: int) -> None:
        problem = problems.mixed()
        solver = self.precise(block=block)
        with torch.no_grad(), problems.HostReads() as reads:
            solution = solve(problem, solver)
        steps = solution.stats.evaluations
        assert reads.count == solution.stats.syncs
        assert solution.stats.syncs <= steps // block + steps // HEALTH_INTERVAL + 2

    @pytest.mark.parametrize("block", [3, 8])
    def test_convergence_is_tested_once_a_block(self, block: int) -> None:
        problem = problems.mixed()
        solution = solve(problem, self.precise(block=block))
        assert_answers(problem, solution)
        for step in solution.stats.steps.tolist():
            assert step % block == 0 or step % HEALTH_INTERVAL == 0

    def test_fixed_steps_never_read_from_the_device(self) -> None:
        problem, seen = problems.recording(problems.with_bad_sample(problems.NAN, 1))
        with torch.no_grad(), problems.HostReads() as reads:
            solution = solve(problem, self.solver(rtol=0.0, atol=0.0, max_steps=20))
        assert reads.count == 0
        assert solution.stats.syncs == 0
        assert len(seen) == solution.stats.evaluations == 20
        assert solution.stats.steps.tolist() == [20] * 5
        assert codes(solution)[1] == Result.nonfinite
        assert Result.diverged not in codes(solution)

    @pytest.mark.parametrize("steps", [1, 2, 9])
    def test_fixed_steps_are_the_same_steps(self, steps: int) -> None:
        """k fixed steps end at the iterate that a solve with a tolerance sees at step k + 1."""
        if not self.returns_last_iterate:
            pytest.skip("returns another iterate by design")
        problem = problems.tanh()
        trajectory: list[Tensor] = []
        note = lambda step, z, r: trajectory.append(z.clone())
        solve_quietly(problem, self.solver(rtol=1e-15, max_steps=15), callback=note)
        solution = solve(problem, self.solver(rtol=0.0, max_steps=steps))
        assert torch.equal(solution.value, trajectory[steps])

    def test_fixed_steps_survive_an_exact_hit_and_report_failures(self) -> None:
        """A = 0 is solved after one step or a few; 30 steps must not spoil it (0/0)."""
        problem = problems.with_bad_sample(problems.EXPLODES, 2)
        solution = solve(problem, self.solver(rtol=0.0, max_steps=30))
        found = codes(solution)
        assert found[0] == Result.fixed_steps  # never converged: nothing was tested
        assert float(problem.error(solution.value)[0]) < 1e-14 * float(norm(problem.answer)[0])
        assert found[2] != Result.converged
        nan = problems.with_bad_sample(problems.NAN, 2)
        with pytest.raises(eq.NotConvergedError, match="nonfinite"):
            solve(nan, self.solver(rtol=0.0, max_steps=5), throw=True)

    def test_fixed_steps_compile_into_one_graph(self) -> None:
        problem = problems.tanh(batch=3, size=4)
        solver = self.solver(rtol=0.0, atol=0.0, max_steps=5)

        def run(z0: Tensor, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            solution = eq.fixed_point(problem.fn, z0, args, solver=solver)
            return solution.value, solution.result, solution.stats.residual

        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            expected = run(problem.z0, *problem.args)
            found = compiled(problem.z0, *problem.args)
        assert_same(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert_same(found[2], expected[2])

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_fixed_steps_capture_into_a_cuda_graph(self) -> None:
        problem = problems.tanh(batch=3, size=4)
        z0, *args = (t.cuda() for t in (problem.z0, *problem.args))
        solver = self.solver(rtol=0.0, atol=0.0, max_steps=5)

        def run() -> Tensor:
            return eq.fixed_point(problem.fn, z0, tuple(args), solver=solver).value

        with torch.no_grad():
            expected = run()
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = run()
            graph.replay()
        assert_same(found, expected)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_no_hidden_wait_on_the_gpu(self, forbid_waits: Callable[[bool], None]) -> None:
        """With torch raising at each wait, fixed steps run through."""
        problem = problems.tanh(batch=3, size=4)
        z0, *args = (t.cuda() for t in (problem.z0, *problem.args))
        solver = self.solver(rtol=0.0, atol=0.0, max_steps=8)
        with torch.no_grad():
            expected = eq.fixed_point(problem.fn, z0, tuple(args), solver=solver)
            forbid_waits(True)
            found = eq.fixed_point(problem.fn, z0, tuple(args), solver=solver)
            forbid_waits(False)
        assert_same(found.value, expected.value)

    # ------------------------------------------------------------------ compaction

    @law
    @given(seed=st.integers(0, 10**6), order=st.permutations(range(6)))
    def test_compaction_changes_no_answer(self, seed: int, order: list[int]) -> None:
        problem = problems.mixed(6, seed=seed).take(order)
        plain = solve(problem, self.precise())
        compact = solve(problem, self.precise(compact=True))
        assert compact.stats.steps.tolist() == plain.stats.steps.tolist()
        assert codes(compact) == codes(plain)
        assert_same(compact.value, plain.value)

    def test_compaction_shrinks_what_the_map_sees(self) -> None:
        """Once at least half of the batch is done it is cut: never twice the rows at work."""
        problem, seen = problems.recording(problems.mixed())
        rows: list[int] = []
        note = lambda *_: rows.append(len(seen[-1]))
        solution = solve(problem, self.precise(compact=True), callback=note)
        steps = solution.stats.steps
        assert len(rows) == int(steps.max())
        assert rows[0] == 6
        for done, present in enumerate(rows):
            left = int((steps > done).sum())
            assert left <= present < 2 * left + (left == 6)
        assert min(rows) <= 3

    def test_every_evaluation_is_counted(self) -> None:
        for compact in (False, True):
            problem, seen = problems.recording(problems.mixed())
            with torch.no_grad():
                solution = solve(problem, self.precise(compact=compact))
            assert solution.stats.evaluations == len(seen)

    @pytest.mark.parametrize("fault", [*problems.FAULTS])
    def test_compaction_with_a_bad_sample(self, fault: str) -> None:
        problem = problems.with_bad_sample(problems.FAULTS[fault], 3)
        plain = solve_quietly(problem, self.precise(max_steps=200))
        compact = solve_quietly(problem, self.precise(max_steps=200, compact=True))
        mates = [0, 1, 2, 4]
        assert compact.stats.steps[mates].tolist() == plain.stats.steps[mates].tolist()
        assert_same(compact.value[mates], plain.value[mates])
        assert codes(compact)[3] != Result.converged
        assert torch.isfinite(compact.value[3]).all()
        if fault != "explodes":  # a chaotic iteration repeats no digit, nor need it
            assert codes(compact) == codes(plain)
            assert_same(compact.value[3], plain.value[3])

    def test_compaction_of_trees(self) -> None:
        for problem in problems.trees(problems.mixed()).values():
            plain = solve(problem, self.precise())
            compact = solve(problem, self.precise(compact=True))
            assert compact.stats.steps.tolist() == plain.stats.steps.tolist()
            assert_same(compact.value, plain.value)

    def test_compaction_keeps_channels_last(self) -> None:
        base = problems.convolution(batch=4)
        base.args[0][1:] *= torch.tensor([0.0, 1e-9, 1.0]).view(-1, 1, 1, 1)
        z0 = base.args[0].clone(memory_format=torch.channels_last)
        z0[0] = base.answer[0]  # two of four samples start at their answer and finish at once
        problem, seen = problems.recording(problems.replace(base, z0=z0))
        last = torch.channels_last
        told: list[Tensor] = []
        solver = self.precise(rtol=1e-6, compact=True)
        solution = solve(problem, solver, callback=lambda step, z, r: told.append(z))
        assert {len(z) for z in seen} > {4}
        for z in (solution.value, *seen, *told):
            assert z.is_contiguous(memory_format=last)

    def test_compaction_reports_whole_batches_to_the_callback(self) -> None:
        problem = problems.mixed()
        trajectory: list[tuple[Tensor, Tensor]] = []
        note = lambda step, z, r: trajectory.append((z.clone(), r.clone()))
        solution = solve(problem, self.precise(compact=True), callback=note)
        assert all(z.shape == problem.z0.shape and len(r) == 6 for z, r in trajectory)
        for i, step in enumerate(solution.stats.steps.tolist()):
            assert_same(solution.value[i], trajectory[step - 1][0][i])
        assert torch.equal(trajectory[-1][0][:3], solution.value[:3])

    def test_compaction_refuses_a_closure_over_samples(self) -> None:
        problem = problems.mixed()
        matrix, offset = problem.args
        fn = lambda z: problems.apply_affine(z, matrix, offset)
        with pytest.raises(ValueError, match=r"compact=True .*in args, not through a closure"):
            eq.fixed_point(fn, problem.z0, solver=self.precise(compact=True))
        # Without compaction the same closure is welcome.
        assert_answers(problem, eq.fixed_point(fn, problem.z0, solver=self.precise()))

    @pytest.mark.parametrize("compact", [False, True])
    def test_samples_that_mix_reach_the_dense_joint_solution(self, compact: bool) -> None:
        """Batch statistics: all pass at one z, and no part of the batch is solved alone."""
        problem = problems.mixed()
        fn = lambda z, a, b: problems.apply_affine(z, a, b) + 0.1 * z.mean(0, keepdim=True)
        matrix, offset = problem.args
        batch, size = offset.shape
        joint = torch.block_diag(*matrix)
        joint += torch.kron(torch.full((batch, batch), 0.1 / batch), torch.eye(size)).double()
        system = torch.eye(batch * size).double() - joint
        wanted = torch.linalg.solve(system, offset.flatten()).view_as(offset)
        for coupled in (False, True):
            solution = eq.fixed_point(
                fn, problem.z0, problem.args, coupled=coupled,
                solver=self.precise(rtol=1e-4, compact=compact),
            )  # fmt: skip
            assert codes(solution) == [Result.converged] * batch
            f = fn(solution.value, *problem.args)
            assert (norm(f - solution.value) <= 1.0001e-4 * norm(f)).all()
            error = torch.linalg.vector_norm(solution.value - wanted)
            gain = 1 / torch.linalg.svdvals(system)[-1]
            assert error <= gain * 1.0001e-4 * torch.linalg.vector_norm(f)

    @pytest.mark.parametrize("batch", [6, 8])
    def test_compaction_refuses_shared_weights_in_args(self, batch: int) -> None:
        """Also where the weight's first dimension happens to equal the batch (8)."""
        problem = problems.mixed(batch, size=8)
        weight = problems.linear(1, 8, 0.5).args[0][0]
        speed = torch.linspace(0.0, 1.9, batch, dtype=torch.float64)[:, None]
        fn = lambda z, x, s, w: s * (z @ w.T) + x
        args = (problem.args[1], speed, weight)
        with pytest.raises(ValueError, match="compact=True"):
            eq.fixed_point(fn, problem.z0, args, solver=self.precise(compact=True))

    # ------------------------------------------------------------------ scale

    @pytest.mark.parametrize("factor", [1e-8, 3e7])
    def test_any_scale_takes_the_same_steps(self, factor: float) -> None:
        for base in (problems.mixed(), problems.rotation()):
            one = solve(base, self.precise())
            other = solve(problems.scaled(base, factor), self.precise())
            assert other.stats.steps.tolist() == one.stats.steps.tolist()
            assert_same(other.value / factor, one.value)
            relative = other.stats.relative, one.stats.relative
            torch.testing.assert_close(*relative, rtol=1e-2, atol=1e-14)

    # ------------------------------------------------------------------ dtypes

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_every_dtype_at_its_default_tolerance(self, dtype: torch.dtype) -> None:
        problem = problems.linear(radius=0.7).to(dtype)
        solution = solve(problem, self.solver())
        assert solution.value.dtype == dtype
        assert solution.converged.all()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert solution.stats.residual.dtype == solution.stats.relative.dtype == wide
        assert solution.result.dtype == torch.int8
        assert solution.stats.steps.dtype == torch.int32
        rtol = self.solver().relative_tolerance(dtype)
        # The residual test, and rounding of A, b, z and of T's nine-term sums.
        _, scale = problem.residual(solution.value)
        allowed = problem.gain * (rtol + 10 * torch.finfo(dtype).eps) * scale
        assert (problem.error(solution.value) <= allowed).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_with_many_features(self, dtype: torch.dtype) -> None:
        """Norms and products over 4096 features would lose all digits if summed up in half."""
        x = problems.randn(2, 4096, seed=0).to(dtype)
        fn = lambda z, x: 0.5 * torch.tanh(z) + x
        solution = eq.fixed_point(fn, x, x, solver=self.solver())
        assert solution.converged.all()
        # T(z) − z is a half-precision tensor, each entry rounded; its norm must not be.
        residual = norm((fn(solution.value, x) - solution.value).double())
        torch.testing.assert_close(solution.stats.residual.double(), residual, rtol=1e-5, atol=0)
        exact = x.double()
        for _ in range(60):
            exact = 0.5 * torch.tanh(exact) + x.double()
        rtol = self.solver().relative_tolerance(dtype)
        error = norm(solution.value.double() - exact) / norm(exact)
        assert (error <= 2 * (rtol + 4 * torch.finfo(dtype).eps)).all()

    def test_map_that_answers_in_another_dtype(self) -> None:
        """As under autocast: T computes in bfloat16, the state stays float32."""
        problem = problems.linear(radius=0.5).to(torch.float32)
        fn = lambda z, a, b: problem.fn(z.bfloat16(), a.bfloat16(), b.bfloat16())
        solution = eq.fixed_point(fn, problem.z0, problem.args, solver=self.solver(rtol=2e-2))
        assert solution.value.dtype == torch.float32
        assert solution.converged.all()

    # ------------------------------------------------------------------ trees and memory formats

    @pytest.mark.parametrize("kind", ["tuple", "list", "dict", "nested"])
    def test_tree_states(self, kind: str) -> None:
        flat = problems.mixed()
        problem = problems.trees(flat)[kind]
        solution = solve(problem, self.precise())
        assert pytree.tree_structure(solution.value) == pytree.tree_structure(problem.z0)
        assert_answers(problem, solution)
        assert solution.stats.steps.tolist() == solve(flat, self.precise()).stats.steps.tolist()

    def test_tree_with_leaves_of_different_dtype(self) -> None:
        base = problems.linear(radius=0.8)
        dtypes = {"single": torch.float32, "double": torch.float64}

        def fn(z: dict[str, Tensor], a: Tensor, b: Tensor) -> dict[str, Tensor]:
            joined = torch.cat([z["single"].double(), z["double"]], 1)
            out = problems.apply_affine(joined, a, b)
            return {"single": out[:, :3].float(), "double": out[:, 3:]}

        z0 = {"single": base.z0[:, :3].float(), "double": base.z0[:, 3:]}
        seen: list[dict[str, Tensor]] = []
        note = lambda step, z, r: seen.append(z)
        solution = eq.fixed_point(fn, z0, base.args, solver=self.solver(), callback=note)
        assert solution.converged.all()
        for z in (*seen, solution.value):
            assert {k: v.dtype for k, v in z.items()} == dtypes
        joined = torch.cat([solution.value["single"].double(), solution.value["double"]], 1)
        rtol = self.solver().relative_tolerance(torch.float32)  # what the poorer leaf can reach
        assert (base.error(joined) <= base.gain * (rtol + 1e-6) * norm(joined) * 1.1).all()

    def test_channels_last_states_stay_so(self) -> None:
        last = torch.channels_last
        base = problems.convolution(memory_format=last)
        problem, seen = problems.recording(base)
        solution = solve(problem, self.precise())
        assert len(seen) > 3
        assert all(z.is_contiguous(memory_format=last) for z in seen)
        assert solution.value.is_contiguous(memory_format=last)
        assert_answers(base, solution)
        usual = solve(problems.convolution(memory_format=torch.contiguous_format), self.precise())
        assert usual.value.is_contiguous()
        assert_same(solution.value, usual.value)

    # ------------------------------------------------------------------ use

    def test_warm_start_converges_at_once(self) -> None:
        for problem in (problems.mixed(), problems.tanh(), problems.stiff()):
            first = solve(problem, self.precise())
            again = solve(problems.replace(problem, z0=first.value), self.precise())
            assert again.stats.steps.tolist() == [1] * problem.batch
            assert torch.equal(again.value, first.value)

    def test_callback_sees_the_trajectory(self) -> None:
        problem, seen = problems.recording(problems.linear(radius=0.6))
        told: list[tuple[int, Tensor, Tensor]] = []
        with torch.no_grad():
            solve(problem, self.precise(), callback=lambda *a: told.append(a))
        assert [step for step, _, _ in told] == list(range(1, len(seen) + 1))
        for (_, z, residual), given_to_map in zip(told, list(seen), strict=True):
            assert torch.equal(z, given_to_map)
            assert not z.requires_grad
            torch.testing.assert_close(residual, problem.residual(z)[0], rtol=1e-9, atol=1e-15)

    def test_inputs_are_left_alone(self) -> None:
        problem = problems.mixed()
        before = [t.clone() for t in (problem.z0, *problem.args)]
        solve(problem, self.precise())
        solve(problem, self.precise(compact=True))
        solve(problem, self.solver(rtol=0.0, max_steps=7))
        for now, then in zip((problem.z0, *problem.args), before, strict=True):
            assert torch.equal(now, then)

    def test_solver_object_carries_no_state(self) -> None:
        """One object solves inside a solve of its own, and twice with the same answer."""
        solver = self.precise()
        inner = problems.linear(2, radius=0.5)
        outer = problems.linear(2, radius=0.4, seed=9)
        expected = solve(outer, solver).value

        def fn(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
            assert_answers(inner, solve(inner, solver))
            return outer.fn(z, a, b)

        nested = eq.fixed_point(fn, outer.z0, outer.args, solver=solver)
        assert torch.equal(nested.value, expected)

    def test_recorded_graph_changes_no_number(self) -> None:
        """Where autograd watches every step, buffers are not reused; the iterates are the same."""
        problem = problems.mixed()
        matrix, offset = problem.args
        for options in ({"rtol": RTOL, "max_steps": 2000}, {"rtol": 0.0, "max_steps": 12}):
            solver = self.solver(**options)
            plain = solve_quietly(problem, solver)
            recorded = problems.replace(problem, args=(matrix.clone().requires_grad_(), offset))
            watched = solve(recorded, solver, adjoint=eq.Unrolled())
            assert watched.value.requires_grad
            assert watched.stats.steps.tolist() == plain.stats.steps.tolist()
            assert_same(watched.value.detach(), plain.value)

    # ------------------------------------------------------------------ options

    def test_options_are_frozen_comparable_and_portable(self) -> None:
        solver = self.solver(rtol=1e-3, max_steps=17)
        with pytest.raises(AttributeError):
            solver.rtol = 0.1  # type: ignore[misc]
        assert solver == self.solver(rtol=1e-3, max_steps=17)
        assert hash(solver) == hash(self.solver(rtol=1e-3, max_steps=17))
        assert solver != self.solver(rtol=1e-3, max_steps=18)
        for twin in (pickle.loads(pickle.dumps(solver)), copy.deepcopy(solver)):
            assert twin == solver
            problem = problems.linear(radius=0.3)
            assert torch.equal(solve(problem, twin).value, solve(problem, solver).value)
        assert "max_steps=17" in repr(solver)

    def test_option_out_of_range_names_itself(self) -> None:
        wrong = {"rtol": float("nan"), "atol": -1.0, "max_steps": 0, "block": 0}
        for name, value in {**wrong, "divergence": 1.0, "patience": 0}.items():
            text = rf"{name}={value!r}\) is out of range: expected a"
            with pytest.raises(ValueError, match=text):
                self.solver(**{name: value})
        with pytest.raises(TypeError, match=r"max_steps=2.5.* expected an integer.*got float"):
            self.solver(max_steps=2.5)
