"""Auto is Anderson on plain maps, and follows the bounds on problems."""

from __future__ import annotations

import math

import pytest
import torch

import equilibria as eq
from equilibria.engine import Solver
from equilibria.solvers import choose_solver
from tests.contracts import problems


@pytest.mark.parametrize(
    ("bounds", "chosen", "says"),
    [
        ((0.9, 1.1), eq.Picard, "plain iteration"),
        ((0.5, 1.8), eq.Anderson, "0.8"),
        ((0.2, 2.6), eq.Anderson, "strongly convex"),
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
    contracts = max(abs(1.0 - bounds[0]), abs(bounds[1] - 1.0)) < 1.0
    assert (choice.tau == 1.0) == (contracts or math.isinf(bounds[1]))


def test_auto_is_options_and_steps_nowhere() -> None:
    auto = eq.Auto(rtol=1e-5, max_steps=7)
    assert not isinstance(auto, Solver)
    assert repr(auto).startswith("Auto(rtol=1e-05, atol=0.0, max_steps=7")
    assert auto == eq.Auto(rtol=1e-5, max_steps=7) != eq.Auto()
    assert auto.for_map() == eq.Anderson(rtol=1e-5, max_steps=7)
    problem = problems.mixed()
    ways = (eq.Auto(rtol=1e-5), eq.Anderson(rtol=1e-5))
    found = [eq.fixed_point(problem.fn, problem.z0, problem.args, solver=s).value for s in ways]
    assert torch.equal(*found)
    bounds = lambda: (0.5, 1.8)
    assert auto.for_problem(bounds) == choose_solver(auto, bounds)
    with pytest.raises(ValueError, match="max_steps=0"):
        eq.Auto(max_steps=0)


def test_steps_center_the_spectrum() -> None:
    far = eq.Auto().for_problem(lambda: (0.2, 2.6))
    assert far.tau == pytest.approx(2.0 / 2.8)
    assert far.solver.damping == 1.0
    near = eq.Auto().for_problem(lambda: (0.5, 1.9))
    assert (near.tau, near.solver.damping) == (1.0, pytest.approx(2.0 / 2.4))
    assert eq.Auto().for_problem(lambda: (0.4, 1.1)).solver.damping == 1.0


def test_a_step_for_each_sample() -> None:
    m, upper = torch.tensor([0.2, 0.5]), torch.tensor([2.6, 2.2])
    choice = eq.Auto().for_problem(lambda: (m, upper))
    assert isinstance(choice.solver, eq.ProximalGradient)
    torch.testing.assert_close(choice.tau, 1.0 / upper.double())


def test_an_answer_does_not_depend_on_the_curvature_of_batch_mates() -> None:
    """A mate for which G is not convex used to change the solver, and the answer by 1.5e-4."""
    w = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    w = 0.9 * w / torch.linalg.matrix_norm(w, 2)
    c = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    c = c * torch.logspace(-2, 0.3, 8).unsqueeze(1)
    together = eq.minimize(eq.Problem(eq.NonNegative(), eq.Sigmoidal(w, c)))
    for i in range(len(c)):
        alone = eq.minimize(eq.Problem(eq.NonNegative(), eq.Sigmoidal(w, c[i : i + 1])))
        torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-6, atol=1e-9)
        assert alone.stats.steps[0] == together.stats.steps[i]


def test_a_problem_whose_plain_iteration_expands_is_solved() -> None:
    # G(z) = |z|²/2 + |Az − c|²/2 on z ≥ 0, ‖A‖ = 1.4: an independent NNLS is the oracle.
    nnls = pytest.importorskip("scipy.optimize").nnls
    random = torch.Generator().manual_seed(0)
    a = torch.randn(12, 9, generator=random, dtype=torch.float64)
    a = 1.4 * a / torch.linalg.matrix_norm(a, 2)
    c = torch.randn(3, 12, generator=random, dtype=torch.float64)
    bounds = (1.0, 1.0 + 1.4**2)
    choice = eq.Auto(rtol=1e-11).for_problem(lambda: bounds)
    assert isinstance(choice.solver, eq.Anderson)
    tau = choice.tau
    step = lambda z: torch.relu((1 - tau) * z - tau * ((z @ a.T - c) @ a))
    sol = eq.fixed_point(step, torch.zeros(3, 9, dtype=torch.float64), solver=choice.solver)
    stacked = torch.cat([a, torch.eye(9, dtype=torch.float64)]).numpy()
    for z, target in zip(sol.value, c, strict=True):
        known, _ = nnls(stacked, torch.cat([target, torch.zeros(9)]).numpy())
        torch.testing.assert_close(z, torch.as_tensor(known), atol=1e-9, rtol=0)


def test_limits_are_handed_on() -> None:
    far = lambda: (-0.1, 3.0)
    assert eq.Auto(max_steps=7).for_problem(far).solver.max_steps == 7
    assert eq.Auto().for_problem(far).solver.max_steps == eq.ProximalGradient().max_steps
    assert eq.BestIterate(eq.Auto()).for_problem(far).solver.inner == eq.ProximalGradient()
