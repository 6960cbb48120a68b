"""fixed_point and linear_solve as users call them: arguments, reports, warnings, errors."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from tests.contracts.adjoint_contract import (
    CLOSE,
    FORWARD,
    LAPS,
    TANH,
    TREE,
    assert_close,
    contraction,
    dense_of,
    draw,
    exact_propagator,
    flat,
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
    """The first lines of the public face, word for word; one entry a sample in each report."""
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


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_trees_go_in_and_come_out_alike(adjoint: Any) -> None:
    sol = eq.fixed_point(TREE.fn, TREE.start, TREE.parameters, solver=FORWARD, adjoint=adjoint)
    assert list(sol.value) == ["a", "b"]
    torch.testing.assert_close(flat(sol.value), dense_of("tree").z, **CLOSE)


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


def test_throw_is_silent_when_all_converged() -> None:
    sol = eq.fixed_point(TANH.fn, TANH.start, TANH.parameters, throw=True)
    assert sol.converged.all()


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_throw_after_fixed_steps_raises_only_when_something_blew_up(adjoint: Any) -> None:
    """No tolerance was asked for, so running out of steps is no failure; NaN is."""
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=30)
    sol = eq.fixed_point(
        lambda z: 0.99 * z + 1.0, torch.zeros(2, 3), solver=solver, adjoint=adjoint, throw=True
    )
    assert (sol.result == eq.Result.max_steps).all()
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


def test_an_infinite_residual_does_not_pass_a_relative_test() -> None:
    """‖r‖ = ∞ ≤ rtol·∞ is no convergence."""
    z0 = torch.full((2, 2), 1e30)
    sol = quiet(lambda: eq.fixed_point(lambda z: z * 1e10, z0, solver=eq.Picard(rtol=0.5)))
    assert not sol.converged.any()


def test_callback_sees_each_step_and_the_residual_falls() -> None:
    steps, states, residuals = [], [], []

    def callback(step: int, z: Tensor, residual: Tensor) -> None:
        steps.append(step)
        states.append(z.clone())
        residuals.append(residual.clone())

    weight, x = TANH.parameters
    sol = eq.fixed_point(
        TANH.fn, TANH.start, (weight, x), solver=eq.Picard(rtol=1e-8), callback=callback
    )
    assert steps == list(range(1, sol.stats.evaluations + 1))
    assert torch.equal(states[0], TANH.start)
    torch.testing.assert_close(states[2], TANH.fn(TANH.fn(TANH.start, weight, x), weight, x))
    gap = TANH.fn(states[3], weight, x) - states[3]
    torch.testing.assert_close(residuals[3], gap.norm(dim=1))


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


def test_warm_start_takes_fewer_steps_to_the_same_answer() -> None:
    weight, x = TANH.leaves()
    cold = eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=eq.Picard(rtol=1e-8))
    warm = eq.fixed_point(TANH.fn, cold.value, (weight, x), solver=eq.Picard(rtol=1e-8))
    assert int(warm.stats.steps.max()) < int(cold.stats.steps.max()) // 2
    torch.testing.assert_close(warm.value, cold.value, rtol=1e-7, atol=1e-7)
    found = torch.autograd.grad(loss_of(warm.value), (weight, x))
    assert_close(found, dense_of("tanh").gradients(exact_propagator), rtol=1e-6, atol=1e-6)


def test_grad_mode_of_the_caller_is_left_as_it_was() -> None:
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            quiet(lambda: eq.fixed_point(no_solution, torch.zeros(2, 3)))
            assert torch.is_grad_enabled() is mode


def test_fixed_steps_do_not_wait_or_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sol = eq.fixed_point(
            lambda z: 0.999 * z + 1.0,
            torch.zeros(2, 3),
            solver=eq.Picard(rtol=0.0, atol=0.0, max_steps=4),
        )
    assert sol.stats.syncs == 0
    assert sol.stats.evaluations == 4
    assert (sol.result == eq.Result.max_steps).all()


@pytest.mark.parametrize(
    "options",
    [
        eq.Picard(damping=0.5),
        eq.Anderson(memory=3, rtol=1e-3),
        eq.Broyden(memory=4, safeguard=None),
        eq.BestIterate(eq.Anderson(memory=3)),
        eq.GMRES(restart=7),
        eq.CG(rtol=1e-3),
        eq.Implicit(solver=eq.Anderson(memory=2)),
    ],
    ids=repr,
)
def test_options_copy_and_pickle(options: Any) -> None:
    for other in (copy.deepcopy(options), copy.copy(options), pickle.loads(pickle.dumps(options))):
        assert type(other) is type(options)
        assert other == options
        assert hash(other) == hash(options)
        assert repr(other) == repr(options)


def test_options_that_differ_are_not_equal() -> None:
    assert eq.Anderson(memory=3) != eq.Anderson(memory=4)
    assert eq.Implicit(solver=eq.GMRES()) != eq.Implicit(solver=eq.CG())
    assert eq.BestIterate(eq.Anderson()) != eq.BestIterate(eq.Picard())
    assert eq.BestIterate(eq.Anderson(memory=2)) != eq.BestIterate(eq.Anderson(memory=3))


def test_a_solution_without_a_graph_pickles() -> None:
    sol = eq.fixed_point(TANH.fn, TANH.start, TANH.parameters)
    other = pickle.loads(pickle.dumps(sol))
    assert torch.equal(other.value, sol.value)
    assert torch.equal(other.result, sol.result)


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


def test_linear_solve_by_conjugate_gradients_on_a_tree() -> None:
    root = contraction(133, 6, 6)
    symmetric = torch.eye(6, dtype=torch.float64) + root @ root.T
    b = draw(134, 2, 6).requires_grad_()

    def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
        whole = torch.cat([v["p"], v["q"].flatten(1)], 1) @ symmetric
        return {"p": whole[:, :2], "q": whole[:, 2:].view(2, 2, 2)}

    given_ = {"p": b[:, :2], "q": b[:, 2:].view(2, 2, 2)}
    sol = eq.linear_solve(product, given_, solver=eq.CG(rtol=1e-12))
    wanted = torch.linalg.solve(symmetric, b.T).T
    found = torch.cat([sol.value["p"], sol.value["q"].flatten(1)], 1)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert_close(torch.autograd.grad(loss_of(found), b), torch.autograd.grad(loss_of(wanted), b))


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


def test_linear_solve_of_one_number_a_sample() -> None:
    b = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64, requires_grad=True)
    sol = eq.linear_solve(lambda v: 2.0 * v, b)
    torch.testing.assert_close(sol.value, 0.5 * b)
    assert_close(torch.autograd.grad(sol.value.sum(), b), [torch.full((3,), 0.5).double()])


def test_linear_solve_throws_with_the_solution() -> None:
    singular = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    b = torch.ones(1, 2, dtype=torch.float64)
    with pytest.raises(eq.NotConvergedError, match="linear_solve") as caught:
        eq.linear_solve(lambda v: v @ singular, b, throw=True)
    assert not caught.value.solution.converged.any()


@pytest.mark.parametrize("solver", ["gmres", eq.Anderson(), eq.GMRES])
def test_linear_solve_takes_linear_solvers_only(solver: Any) -> None:
    with pytest.raises(TypeError, match="GMRES"):
        eq.linear_solve(lambda v: v, torch.ones(1, 2), solver=solver)


def test_linear_solve_checks_shapes() -> None:
    with pytest.raises(ValueError, match="shape"):
        eq.linear_solve(lambda v: v[:, :1], torch.ones(2, 3))
    with pytest.raises(TypeError, match="int64"):
        eq.linear_solve(lambda v: v, torch.ones(2, 3, dtype=torch.int64))


def test_laps_return_a_value_of_the_last_step() -> None:
    """A fixed-step solve with Unrolled and with Implicit ends at the same iterate."""
    weight, x = TANH.leaves()
    ends = [
        eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=LAPS, adjoint=adjoint).value
        for adjoint in (eq.Implicit(), eq.Unrolled())
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-14, atol=1e-14)


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
