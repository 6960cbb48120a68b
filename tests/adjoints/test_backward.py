"""The linear system of the backward pass: solved by any solver, counted, and warned about once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.adjoints.backward import solve_adjoint
from tests.contracts.adjoint_contract import (
    FORWARD,
    TANH,
    contraction,
    dense_of,
    draw,
    exact_propagator,
    loss_of,
)
from tests.contracts.problems import quietly

SOLVERS = [
    eq.GMRES(rtol=1e-12),
    eq.GMRES(rtol=1e-12, restart=3),
    eq.Anderson(rtol=1e-12, max_steps=200),
    eq.Picard(rtol=1e-12, max_steps=200),
    eq.Broyden(rtol=1e-12, max_steps=200),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_solution_equals_the_dense_one_on_a_tree(solver: Any) -> None:
    """u = g + Ju over two leaves with one full matrix J, a different one for each sample."""
    matrices = torch.stack([contraction(40, 5, 5), contraction(41, 5, 5, 0.8)])
    g = draw(42, 2, 5)

    def product(v: list[Tensor]) -> list[Tensor]:
        whole = torch.einsum("bij,bj->bi", matrices, torch.cat(v, 1))
        return [whole[:, :2], whole[:, 2:]]

    done = solve_adjoint(solver, product, [g[:, :2], g[:, 2:]], coupled=False, group=len(g))
    wanted = torch.linalg.solve(torch.eye(5, dtype=torch.float64) - matrices, g)
    # ‖(I − J)⁻¹‖ ≤ 5 times the tolerance of 1e-12, and room for the norm of g.
    torch.testing.assert_close(torch.cat(done.value, 1), wanted, rtol=1e-10, atol=1e-10)
    assert (done.result == eq.Result.converged).all()


def test_a_zero_gradient_gives_zero_at_once() -> None:
    for solver in SOLVERS:
        zero = [torch.zeros(2, 3).double()]
        done = solve_adjoint(solver, lambda v: [0.5 * v[0]], zero, coupled=False, group=2)
        assert torch.equal(done.value[0], torch.zeros(2, 3).double())
        assert (done.result == eq.Result.converged).all()


def run(solver: Any) -> tuple[Any, Tensor, Tensor]:
    weight, x = TANH.leaves()
    sol = eq.fixed_point(
        TANH.fn, TANH.start, (weight, x), solver=FORWARD, adjoint=eq.Implicit(solver=solver)
    )
    return sol, weight, x


HASTY = [
    eq.GMRES(rtol=1e-12, max_steps=2),
    eq.Picard(rtol=1e-12, max_steps=2),
    eq.Anderson(rtol=1e-12, max_steps=2),
]


@pytest.mark.parametrize("solver", HASTY, ids=lambda s: type(s).__name__)
def test_backward_that_misses_its_tolerance_warns_once_and_is_counted(solver: Any) -> None:
    sol, weight, _ = run(solver)
    assert sol.stats.backward.solves == 0
    loss = loss_of(sol.value)
    with pytest.warns(eq.ConvergenceWarning, match="backward solve missed") as caught:
        torch.autograd.grad(loss, weight, retain_graph=True)
    assert len(caught) == 1
    backward = sol.stats.backward
    worst = f"{float(backward.residual.max()):.1e}"
    for part in ("3 of 3 samples", worst, "after 2 steps", "Raise max_steps"):
        assert part in str(caught[0].message)
    assert (backward.solves, backward.unconverged) == (1, 3)
    assert (backward.residual > 1e-12).all()
    assert backward.steps.tolist() == [2, 2, 2]
    with pytest.warns(eq.ConvergenceWarning):
        torch.autograd.grad(loss, weight)
    assert (backward.solves, backward.unconverged) == (2, 6)


@pytest.mark.parametrize("solver", HASTY, ids=lambda s: type(s).__name__)
def test_the_reported_residual_bounds_the_error_of_the_gradient(solver: Any) -> None:
    """‖u − û‖ ≤ ‖(I − Jᵀ)⁻¹‖·residual·‖g‖ with ‖J‖ ≤ 1/2: what the warning says is true."""
    sol, _, x = run(solver)
    with quietly():
        (found,) = torch.autograd.grad(loss_of(sol.value), x)
    wanted = dense_of("tanh").gradients(exact_propagator)[1]
    residual = sol.stats.backward.residual.max()
    g = sol.value.detach().flatten()
    scale = (torch.linspace(-1.0, 2.0, g.numel(), dtype=torch.float64) + g).view(3, 4).norm(dim=1)
    # The pull through ∂T/∂x = 1 − z² only shrinks. A fixed-point solver's residual is relative to
    # ‖u‖ ≤ 2‖g‖, and belongs to the iterate before the last.
    assert ((found - wanted).norm(dim=1) <= 4.0 * residual * scale).all()
    assert (found - wanted).norm() > 1e-6


# A Krylov space of dimension 4 is the whole space; without a tolerance all steps are taken.
@pytest.mark.parametrize(
    ("solver", "steps"), [(eq.GMRES(), 4), (eq.GMRES(rtol=0.0, atol=0.0, max_steps=8), 8)]
)
def test_backward_that_converges_is_counted_and_silent(solver: Any, steps: int) -> None:
    sol, weight, _ = run(solver)
    torch.autograd.grad(loss_of(sol.value), weight)
    backward = sol.stats.backward
    assert (backward.solves, backward.unconverged, backward.masked) == (1, 0, 0)
    assert (backward.residual <= 1e-10).all()
    assert (backward.steps <= steps).all()


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e5])
def test_steps_and_relative_error_do_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    """A loose backward tolerance of 1e-3: the same steps, the same relative error."""
    errors, steps = [], []
    for factor in (1.0, scale):
        sol, weight, x = run(eq.GMRES(rtol=1e-3))
        found = torch.autograd.grad(factor * loss_of(sol.value), (weight, x))
        wanted = [factor * w for w in dense_of("tanh").gradients(exact_propagator)]
        errors.append(
            [float((f - w).norm() / w.norm()) for f, w in zip(found, wanted, strict=True)]
        )
        steps.append(sol.stats.backward.steps.tolist())
    assert steps[0] == steps[1]
    # Rounding in the loss's scale moves a relative error of about 1e-4 by 1e-16 or so.
    assert errors[1] == pytest.approx(errors[0], rel=1e-6)
    assert 1e-12 < max(errors[0]) < 1e-2
