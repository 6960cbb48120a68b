"""Many starts: the equilibria of fact 3, labels, the best by objective."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import equilibria as eq

# docs/facts.md, fact 3.
W, C = 1.55, 1.880956005
THREE = torch.tensor([0.2396931, 0.4203373, 0.5820372], dtype=torch.float64)


def gaussian(z: Tensor, c: Tensor) -> Tensor:
    r = c - W * z
    return torch.relu(torch.exp(-r * r) * W * r)


def grid(batch: int, count: int = 9) -> Tensor:
    points = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    return points[:, None, None].expand(count, batch, 1).clone()


@pytest.mark.parametrize("solver", [None, eq.Anderson(max_steps=500)])
def test_the_three_equilibria(solver: object) -> None:
    """Of two samples: one with three equilibria, and one with c = 0.3 and one equilibrium."""
    c = torch.tensor([[C], [0.3]], dtype=torch.float64)
    found = eq.multistart(gaussian, grid(2), c, solver=solver)
    assert found.count.tolist() == [3, 1]
    torch.testing.assert_close(found.of_sample(0)[:, 0].sort().values, THREE, rtol=0, atol=1e-6)
    assert len(found.of_sample(1)) == 1
    # Labels say which starts agree.
    for k in range(3):
        members = found.value[found.label[:, 0] == k, 0]
        assert float(members.max() - members.min()) < 1e-4
    residual = (gaussian(found.best, c) - found.best).norm(dim=1)
    assert (residual <= 1e-8).all()
    least = torch.where(found.label >= 0, found.residual, torch.inf).amin(0)
    torch.testing.assert_close(residual, least, rtol=1e-3, atol=1e-15)


def test_the_best_of_a_problem_is_that_of_least_objective() -> None:
    problem = eq.Problem(
        eq.NonNegative(),
        eq.Gaussian(torch.tensor([[W]]).double(), torch.tensor([[C]]).double(), gamma=1.0),
    )
    newton = eq.multistart(problem, grid(1), solver=eq.NewtonKrylov())
    assert newton.count.tolist() == [3]
    torch.testing.assert_close(newton.of_sample(0)[:, 0].sort().values, THREE, rtol=0, atol=1e-6)
    values = problem.objective(newton.of_sample(0)[0][None])
    points = torch.linspace(0, 1, 4001).double()[:, None]
    many = problem.with_inputs(*(x.expand(4001, *x.shape[1:]) for x in problem.inputs()))
    dense = many.objective(points)
    assert newton.objective is not None
    assert abs(float(values) - float(dense.min())) < 1e-6
    torch.testing.assert_close(newton.best, newton.of_sample(0)[:1])
    minima = eq.multistart(problem, grid(1))
    torch.testing.assert_close(minima.best, newton.best, rtol=0, atol=1e-6)


def test_distinct_says_what_counts_as_one() -> None:
    c = torch.tensor([[C]], dtype=torch.float64)
    assert eq.multistart(gaussian, grid(1), c, distinct=0.2).count.tolist() == [2]
    assert eq.multistart(gaussian, grid(1), c, distinct=0.9).count.tolist() == [1]
    with pytest.raises(ValueError, match="distinct"):
        eq.multistart(gaussian, grid(1), c, distinct=0.0)


def test_gradients_reach_every_equilibrium() -> None:
    c = torch.tensor([[C]], dtype=torch.float64, requires_grad=True)
    found = eq.multistart(gaussian, grid(1), c).of_sample(0)
    step = 1e-5
    for k in range(3):
        (exact,) = torch.autograd.grad(found[k].sum(), c, retain_graph=True)
        near = found[k].detach()[None]
        up, down = (eq.root(lambda z, c: gaussian(z, c) - z, near, c.detach() + s)
                    for s in (step, -step))  # fmt: skip
        wanted = (up.value - down.value) / (2 * step)
        torch.testing.assert_close(exact, wanted, rtol=1e-4, atol=1e-6)


def test_starts_that_fail_are_marked() -> None:
    starts = grid(2)
    starts[3, 0] = float("nan")
    c = torch.tensor([[C], [float("nan")]], dtype=torch.float64)
    found = eq.multistart(gaussian, starts, c)
    assert int(found.label[3, 0]) == -1
    assert (found.label[:, 1] == -1).all()
    assert found.count.tolist()[1] == 0
    assert torch.isfinite(found.best[0]).all()


def test_bad_input_is_named() -> None:
    c = torch.tensor([[C]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"starts must be shaped \[S, B"):
        eq.multistart(gaussian, torch.zeros(4), c)
    with pytest.raises(ValueError, match="carry the batch of 2"):
        eq.multistart(gaussian, grid(2), c)
