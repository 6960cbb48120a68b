"""Solves with a tolerance inside torch.compile(fullgraph=True): the eager solve is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria import Result
from equilibria.engine.solver import Solver
from tests.contracts import problems
from tests.contracts.problems import quietly

SOLVERS = [
    eq.Picard(block=1, while_loop=True, max_steps=60),
    eq.Anderson(block=1, while_loop=True, max_steps=60),
]


def compiled(fn: Callable[..., Any], backend: str = "eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend)


def outcome(solver: Solver, **options: Any) -> Callable[..., Any]:
    def run(z0: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        found = eq.fixed_point(problems.apply_affine, z0, args, solver=solver, **options)
        return found.value, found.result, found.stats.steps, found.stats.residual

    return run


@pytest.mark.parametrize("solver", [pytest.param(SOLVERS[0], marks=pytest.mark.slow), SOLVERS[1]])
def test_each_sample_ends_as_in_eager_mode(solver: Solver) -> None:
    problem = problems.mixed(6)
    matrix, offset = problem.args
    offset[1], matrix[4] = float("nan"), 3.0 * torch.eye(offset.shape[1]).double()
    with quietly(), torch.no_grad():
        wanted = outcome(solver)(problem.z0, *problem.args)
        value, code, steps, residual = compiled(outcome(solver))(problem.z0, *problem.args)
    assert code[1] == Result.nonfinite
    if isinstance(solver, eq.Picard):
        assert code[4] == Result.diverged
    assert torch.isfinite(value).all()
    good = wanted[1] == Result.converged
    assert good.sum() >= 3
    assert torch.equal(code == Result.converged, good)
    assert torch.equal(steps[good], wanted[2][good])
    torch.testing.assert_close(value[good], wanted[0][good], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(residual[good], wanted[3][good], rtol=1e-2, atol=1e-12)


def test_a_coupled_map_is_one_problem() -> None:
    fn = lambda z: 0.5 * z + 0.3 * z.mean(0, keepdim=True) + 1.0
    solver = eq.Picard(rtol=1e-9, while_loop=True, max_steps=300)

    def run(z: Tensor) -> tuple[Tensor, Tensor]:
        found = eq.fixed_point(fn, z, solver=solver, coupled=True)
        return found.value, found.converged

    with torch.no_grad():
        value, passed = compiled(run)(problems.randn(3, 2, seed=0))
    assert passed.all()
    torch.testing.assert_close(value, torch.full((3, 2), 5.0).double(), rtol=1e-7, atol=0)


def test_a_drift_to_infinity_never_converges() -> None:
    """T(z) = z + b: the residual never falls, and is small beside an iterate that is far away."""
    solver = eq.Picard(rtol=1e-2, while_loop=True, max_steps=150)

    def run(z: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        found = eq.fixed_point(lambda z, r: r * z + 1.0, z, (rate,), solver=solver)
        return found.result, found.stats.relative

    rate = torch.tensor([[1.0], [0.5]])
    with torch.no_grad():
        code, relative = compiled(run)(0.0 * rate, rate)
    assert relative[0] < 1e-2
    assert code.tolist() == [Result.max_steps, Result.converged]


def test_a_solver_whose_history_cannot_be_carried_says_so() -> None:
    solver = eq.Broyden(while_loop=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="Broyden cannot run as a"):
        compiled(outcome(solver))(problems.mixed().z0, *problems.mixed().args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "backend"),
    [(SOLVERS[0], "eager"), (SOLVERS[1], "inductor"),
     (eq.ProximalGradient(while_loop=True), "eager")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check.*:FutureWarning")
def test_the_implicit_gradient_is_that_of_eager_mode(solver: Solver, backend: str) -> None:
    problem = problems.symmetric(torch.linspace(0.0, 0.5, 12).view(3, 4))
    args = [t.clone().requires_grad_() for t in problem.args]
    adjoint = eq.Implicit(solver=eq.GMRES(rtol=0.0, restart=problem.z0.shape[1]))
    wanted = outcome(solver)(problem.z0, *args)[0]
    value, code, *_ = compiled(outcome(solver, adjoint=adjoint), backend)(problem.z0, *args)
    assert (code == Result.converged).all()
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-7)
    expected = torch.autograd.grad(wanted.square().sum(), args)
    for got, own in zip(torch.autograd.grad(value.square().sum(), args), expected, strict=True):
        torch.testing.assert_close(got, own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))
