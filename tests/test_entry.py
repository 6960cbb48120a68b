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
    assert_close,
    contraction,
    dense_of,
    draw,
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
    ("change", "error", "match"),
    [
        ({"fn": 3}, TypeError, "callable"),
        ({"solver": "anderson"}, TypeError, "Anderson"),
        ({"solver": eq.Anderson}, TypeError, "Anderson"),
        ({"solver": eq.GMRES()}, TypeError, "solver"),
        ({"adjoint": "ift"}, TypeError, "Implicit"),
        ({"adjoint": eq.Implicit}, TypeError, "Implicit"),
        ({"z0": torch.zeros(0, 4)}, ValueError, "batch size zero"),
        ({"z0": torch.zeros(3, 4, dtype=torch.int64)}, TypeError, "int64"),
        ({"z0": torch.tensor(1.0)}, ValueError, "scalar"),
        ({"z0": None}, TypeError, "NoneType"),
        ({"z0": ()}, ValueError, "no tensor"),
        ({"z0": (torch.zeros(3, 4), torch.zeros(2, 4))}, ValueError, "batch size"),
        ({"z0": torch.zeros(3, 5)}, RuntimeError, "mat1"),
        ({"fn": lambda z, w, x: (z @ w.T + x)[:, :2]}, ValueError, r"\(3, 2\)"),
        ({"fn": lambda z, w, x: 1.0}, TypeError, "float"),
        ({"fn": lambda z, w, x: z.long()}, TypeError, "int64"),
    ],
)
@pytest.mark.parametrize("adjoint", [eq.Implicit(), eq.Unrolled()], ids=["implicit", "unrolled"])
def test_wrong_arguments_are_errors_that_say_what_was_given(
    change: dict[str, Any], error: type, match: str, adjoint: Any
) -> None:
    call: dict[str, Any] = {
        "fn": TANH.fn,
        "z0": torch.zeros(3, 4, dtype=torch.float64),
        "args": TANH.parameters,
        "adjoint": adjoint,
    }
    if isinstance(change.get("z0"), Tensor) and change["z0"].dtype == torch.float32:
        change = {"z0": change["z0"].double()}
    call.update(change)
    with pytest.raises(error, match=match):
        eq.fixed_point(**call)


def test_a_tree_of_another_structure_is_an_error() -> None:
    with pytest.raises(ValueError, match="structure"):
        eq.fixed_point(lambda s: [s[0], s[1]], (torch.zeros(2, 3), torch.zeros(2, 3)))


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
def test_throw_raises_and_carries_the_solution(adjoint: Any) -> None:
    with pytest.raises(eq.NotConvergedError, match="2 of 2 samples") as caught:
        eq.fixed_point(
            lambda z: 0.99 * z + 1.0,
            torch.zeros(2, 3),
            solver=eq.Picard(max_steps=5),
            adjoint=adjoint,
            throw=True,
        )
    solution = caught.value.solution
    assert isinstance(solution, eq.Solution)
    assert (solution.result == eq.Result.max_steps).all()
    assert solution.stats.steps.tolist() == [5, 5]
    # zₖ = (1 − 0.99ᵏ)/0.01 after 4 to 10 evaluations: an iterate is there to be used.
    assert 3.9 < float(solution.value.detach().mean()) < 9.6


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_throw_after_fixed_steps_raises_only_when_something_blew_up(adjoint: Any) -> None:
    """No tolerance was asked for, so running out of steps is no failure; NaN is."""
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=30)
    sol = eq.fixed_point(
        lambda z: 0.99 * z + 1.0, torch.zeros(2, 3), solver=solver, adjoint=adjoint, throw=True
    )
    assert (sol.result == eq.Result.fixed_steps).all()
    with pytest.raises(eq.NotConvergedError, match="nonfinite"):
        eq.fixed_point(no_solution, torch.zeros(2, 3), solver=solver, adjoint=adjoint, throw=True)


def test_each_sample_has_its_own_result() -> None:
    rate = torch.tensor([[0.5], [3.0], [0.999], [0.5]], dtype=torch.float64)
    x = torch.ones(4, 2, dtype=torch.float64)
    x[3] = float("nan")
    with pytest.warns(eq.ConvergenceWarning) as caught:
        sol = eq.fixed_point(
            lambda z: rate * z + x, torch.zeros(4, 2).double(), solver=eq.Picard(rtol=1e-6)
        )
    names = [eq.Result(int(code)).name for code in sol.result]
    assert names == ["converged", "diverged", "max_steps", "nonfinite"]
    message = str(caught[0].message)
    for name in names[1:]:
        assert f"1 of 4 samples {name}" in message
    assert sol.counts() == dict.fromkeys(
        [eq.Result.converged, eq.Result.max_steps, eq.Result.diverged, eq.Result.nonfinite], 1
    )
    for name in names:
        assert f"1 {name}" in sol.summary()


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


# linear_solve --------------------------------------------------------------------------------


def matrix() -> Tensor:
    return torch.eye(4, dtype=torch.float64) + contraction(130, 4, 4)


@pytest.mark.parametrize("solver", [None, eq.GMRES(rtol=1e-12), eq.GMRES(rtol=1e-12, restart=2)])
def test_linear_solve_equals_the_dense_answer_with_gradients(solver: Any) -> None:
    a = matrix().requires_grad_()
    b = draw(131, 3, 4).requires_grad_()
    sol = eq.linear_solve(lambda v: v @ a.T, b, solver=solver)
    wanted = torch.linalg.solve(a, b.T).T
    assert sol.converged.all()
    torch.testing.assert_close(sol.value, wanted, **CLOSE)
    found = torch.autograd.grad(loss_of(sol.value), (a, b))
    assert_close(found, torch.autograd.grad(loss_of(wanted), (a, b)))
    assert sol.stats.backward.solves == 1


def test_linear_solve_has_second_derivatives() -> None:
    a, b = matrix().requires_grad_(), draw(132, 2, 4).requires_grad_()

    def run(a: Tensor, b: Tensor) -> Tensor:
        return eq.linear_solve(lambda v: v @ a.T, b, solver=eq.GMRES(rtol=1e-13)).value

    assert torch.autograd.gradcheck(run, (a, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (a, b), fast_mode=True)


def test_linear_solve_reports_the_residual_and_starts_from_x0() -> None:
    a, b = matrix(), draw(135, 3, 4)
    with pytest.warns(eq.ConvergenceWarning, match="linear_solve"):
        rough = eq.linear_solve(lambda v: v @ a.T, b, solver=eq.GMRES(rtol=1e-12, max_steps=2))
    gap = (b - rough.value @ a.T).norm(dim=1)
    torch.testing.assert_close(rough.stats.residual, gap, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(rough.stats.relative, gap / b.norm(dim=1), rtol=1e-6, atol=1e-12)
    exact = torch.linalg.solve(a, b.T).T
    warm = eq.linear_solve(lambda v: v @ a.T, b, x0=exact)
    assert int(warm.stats.steps.max()) <= 1
    torch.testing.assert_close(warm.value, exact, **CLOSE)


def test_linear_solve_throws_with_the_solution() -> None:
    singular = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    b = torch.ones(1, 2, dtype=torch.float64)
    with pytest.raises(eq.NotConvergedError, match="linear_solve") as caught:
        eq.linear_solve(lambda v: v @ singular, b, throw=True)
    assert not caught.value.solution.converged.any()


def test_linear_solve_checks_shapes() -> None:
    with pytest.raises(ValueError, match="shape"):
        eq.linear_solve(lambda v: v[:, :1], torch.ones(2, 3))
    with pytest.raises(TypeError, match="int64"):
        eq.linear_solve(lambda v: v, torch.ones(2, 3, dtype=torch.int64))


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
