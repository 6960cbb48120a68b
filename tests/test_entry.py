"""fixed_point and linear_solve as users call them: arguments, reports, warnings, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from tests.contracts.adjoint_contract import (
    CLOSE,
    FORWARD,
    TANH,
    TREE,
    dense_of,
    loss_of,
    quiet,
)

ADJOINTS = [
    eq.Implicit(),
    eq.Phantom(),
    eq.Phantom(form="neumann"),
    eq.OneStep(),
    eq.Unrolled(),
]


def no_solution(z: Tensor) -> Tensor:
    return torch.exp(z) + 1.0


# Arguments -----------------------------------------------------------------------------------


def test_the_example_of_the_design() -> None:
    """The first lines of the public face, word for word; one entry per sample in each report."""
    fn, z0, args = TANH.fn, TANH.start.float(), tuple(p.float() for p in TANH.parameters)
    sol = eq.fixed_point(
        fn, z0, args, solver=eq.Anderson(memory=5, rtol=1e-4), adjoint=eq.Implicit()
    )
    assert sol.value.shape == z0.shape
    for entry in (sol.result, sol.stats.steps, sol.stats.residual, sol.stats.relative):
        assert entry.shape == (3,)
    assert sol.converged.all()
    gap = (fn(sol.value, *args) - sol.value).norm(dim=1)
    torch.testing.assert_close(sol.stats.residual, gap, rtol=1e-2, atol=1e-7)
    assert (gap <= 1e-4 * fn(sol.value, *args).norm(dim=1)).all()


def test_defaults_are_anderson_and_implicit() -> None:
    weight, x = TANH.leaves()
    ours = eq.fixed_point(TANH.fn, TANH.start, (weight, x))
    spelled = eq.fixed_point(
        TANH.fn, TANH.start, (weight, x), solver=eq.Anderson(), adjoint=eq.Implicit()
    )
    assert torch.equal(ours.value, spelled.value)
    assert torch.equal(*[torch.autograd.grad(loss_of(s.value), weight)[0] for s in (ours, spelled)])


def test_an_argument_that_is_no_tuple_is_one_argument() -> None:
    weight, x = TANH.parameters
    for box in ({"w": weight, "x": x}, [weight, x]):
        first, second = ("w", "x") if isinstance(box, dict) else (0, 1)
        sol = eq.fixed_point(
            lambda z, b, i=first, j=second: TANH.fn(z, b[i], b[j]), TANH.start, box, solver=FORWARD
        )
        torch.testing.assert_close(sol.value.flatten(), dense_of("tanh").z, **CLOSE)
    sol = eq.fixed_point(lambda z, x: TANH.fn(z, weight, x), TANH.start, x, solver=FORWARD)
    torch.testing.assert_close(sol.value.flatten(), dense_of("tanh").z, **CLOSE)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fn": 3}, "callable"),
        ({"solver": "anderson"}, "Anderson"),
        ({"solver": eq.Anderson}, "Anderson"),
        ({"solver": eq.GMRES()}, "solver"),
        ({"adjoint": eq.Implicit}, "Implicit"),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_was_given(
    change: dict[str, Any], match: str
) -> None:
    call: dict[str, Any] = {"fn": TANH.fn, "z0": TANH.start, "args": TANH.parameters}
    with pytest.raises(TypeError, match=match):
        eq.fixed_point(**{**call, **change})


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_an_error_of_the_map_goes_through_as_it_is(adjoint: Any) -> None:
    class Mine(Exception):
        pass

    def fn(z: Tensor) -> Tensor:
        raise Mine("of the user")

    with pytest.raises(Mine, match="of the user"):
        eq.fixed_point(fn, torch.zeros(2, 3), adjoint=adjoint)


# Reports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_a_solve_that_fails_warns_once_with_advice(adjoint: Any) -> None:
    with pytest.warns(eq.ConvergenceWarning) as caught:
        sol = eq.fixed_point(
            no_solution, torch.zeros(3, 2), solver=eq.Picard(max_steps=40), adjoint=adjoint
        )
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "3 of 3 samples" in message
    assert any(word in message for word in ("damp", "check this sample", "raise max_steps"))
    assert caught[0].filename == __file__
    assert not sol.converged.any()


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_throw_after_fixed_steps_raises_only_when_something_blew_up(adjoint: Any) -> None:
    """No tolerance was asked for, so running out of steps is no failure; NaN is."""
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=30)
    how = {"solver": solver, "adjoint": adjoint, "throw": True}
    sol = eq.fixed_point(lambda z: 0.99 * z + 1.0, torch.zeros(2, 3), **how)
    assert (sol.result == eq.Result.fixed_steps).all()
    with pytest.raises(eq.NotConvergedError, match="nonfinite"):
        eq.fixed_point(no_solution, torch.zeros(2, 3), **how)


def test_nothing_diverged_is_called_converged() -> None:
    """Maps without a fixed point, by every solver, from every start: never converged."""
    maps = {
        "exp": no_solution,
        "shift": lambda z: z + 1.0,
        "square": lambda z: z * z + z + 1.0,
        "nan": lambda z: z * float("nan"),
        "inf": lambda z: z + float("inf"),
    }
    for fn in maps.values():
        for solver in (
            eq.Picard(max_steps=60),
            eq.Anderson(max_steps=60),
            eq.Broyden(max_steps=60),
            eq.BestIterate(eq.Anderson(max_steps=60)),
            eq.Anderson(rtol=0.0, atol=0.0, max_steps=60),
        ):
            for start in (0.0, 1e3, -1e-3):
                z0 = torch.full((2, 3), start, dtype=torch.float64)
                sol = quiet(
                    lambda fn=fn, z0=z0, solver=solver: eq.fixed_point(fn, z0, solver=solver)
                )
                assert not sol.converged.any(), (fn, solver, start)


def test_callback_of_a_tree_gets_the_tree_without_a_graph() -> None:
    seen = []
    eq.fixed_point(
        TREE.fn,
        TREE.start,
        TREE.leaves(),
        adjoint=eq.Unrolled(),
        callback=lambda step, z, residual: seen.append((z, residual)),
    )
    z, residual = seen[-1]
    assert set(z) == {"a", "b"}
    assert not z["a"].requires_grad
    assert residual.shape == (2,)


def test_grad_mode_of_the_caller_is_left_as_it_was() -> None:
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            quiet(lambda: eq.fixed_point(no_solution, torch.zeros(2, 3)))
            assert torch.is_grad_enabled() is mode


@pytest.mark.parametrize("adjoint", [eq.Implicit(), eq.Phantom(steps=2), eq.Unrolled()])
def test_autocast_with_plain_modules(adjoint: object) -> None:
    """Autocast keeps casts of weights; one made inside the solve has no graph."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 6)
    with torch.no_grad():
        linear.weight.mul_(0.5)
    x = torch.randn(4, 6)

    def gradient(low: bool) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            solution = eq.fixed_point(
                lambda z, x: torch.tanh(linear(z) + x),
                torch.zeros(4, 6, dtype=torch.bfloat16 if low else torch.float32),
                x.bfloat16() if low else x,
                adjoint=adjoint,
            )
            # The weight is used once more, after the solve and in the same region.
            loss = solution.value.float().square().sum() + linear(x).float().square().sum()
        (found,) = torch.autograd.grad(loss, linear.weight)
        return found

    exact = gradient(False)
    assert float((gradient(True) - exact).norm() / exact.norm()) < 0.1
