"""Unrolled: the contract, derivatives of every order, memory, and what cannot be unrolled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from tests.contracts.adjoint_contract import (
    FORWARD,
    GENERAL,
    LAPS,
    TANH,
    TREE,
    AdjointContract,
    Problem,
    assert_close,
    contraction,
    dense_of,
    draw,
    exact_propagator,
    flat,
    loss_of,
)
from tests.contracts.problems import as_on_a_gpu

FIXED = eq.Result.fixed_steps
FEW = eq.Picard(rtol=0.0, atol=0.0, max_steps=4)


def solve(fn: Any, start: Any, args: Any = (), **options: Any) -> Any:
    return eq.fixed_point(fn, start, args, **{"adjoint": eq.Unrolled(), **options}).value


class TestUnrolled(AdjointContract):
    solver = LAPS
    tolerant = eq.Picard(rtol=1e-13)
    reaches_start = True

    def make_adjoint(self) -> Any:
        return eq.Unrolled()

    def test_fixed_steps_of_anderson_compile_to_one_graph(self) -> None:
        self.check_compiled(eq.Anderson(rtol=0.0, atol=0.0, max_steps=3, memory=2))


class TestUnrolledWithCheckpoint(TestUnrolled):
    under_transforms = False

    def make_adjoint(self) -> Any:
        return eq.Unrolled(checkpoint=True)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("problem", GENERAL, ids=lambda p: p.name)
def test_gradcheck_and_gradgradcheck(problem: Problem, checkpoint: bool) -> None:
    """The iterate after four steps is differentiated exactly, converged or not."""

    adjoint = eq.Unrolled(checkpoint=checkpoint)

    def run(*parameters: Tensor) -> Tensor:
        return flat(solve(problem.fn, problem.start, parameters, solver=FEW, adjoint=adjoint))

    assert gradcheck(run, problem.leaves(), fast_mode=True)
    assert gradgradcheck(run, problem.leaves(), fast_mode=True)


@pytest.mark.parametrize(
    "solver",
    [
        eq.Picard(rtol=0.0, atol=0.0, max_steps=5, damping=0.7),
        eq.Anderson(rtol=0.0, atol=0.0, max_steps=5, memory=3),
        eq.Anderson(rtol=0.0, atol=0.0, max_steps=7, memory=3, damping=0.8),
        eq.Broyden(rtol=0.0, atol=0.0, max_steps=5, memory=3),
        eq.BestIterate(eq.Picard(rtol=0.0, atol=0.0, max_steps=5)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("problem", [TANH, TREE], ids=lambda p: p.name)
def test_every_solver_is_differentiated_through(solver: Any, problem: Problem) -> None:
    def run(*parameters: Tensor) -> Tensor:
        return flat(solve(problem.fn, problem.start, parameters, solver=solver))

    assert gradcheck(run, problem.leaves())


def test_the_start_gets_its_gradient() -> None:
    """dz_K/dz_0 after K = 4 steps, by hand."""
    weight, x = TANH.parameters
    start = torch.full_like(TANH.start, 0.3).requires_grad_()
    value = solve(TANH.fn, start, (weight, x), solver=FEW)
    by_hand = start
    for _ in range(4):
        by_hand = torch.tanh(by_hand @ weight.T + x)
    torch.testing.assert_close(value, by_hand, rtol=1e-14, atol=1e-14)
    found = torch.autograd.grad(loss_of(value), start)
    assert_close(found, torch.autograd.grad(loss_of(by_hand), start), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("solver", [eq.Picard(rtol=1e-13), FORWARD], ids=["picard", "anderson"])
def test_solves_with_a_tolerance_approach_the_implicit_gradient(solver: Any) -> None:
    """Samples stop at different steps; each is differentiated up to where it stopped.

    The derivative of the iterates converges behind the iterates: z to 1e-13 gives gradients of
    √ of that or better, whatever the solver does with its history.
    """
    weight, x = TANH.leaves()
    with torch.no_grad():
        x[0] *= 20.0  # saturated: this sample is done early
    sol = eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=solver, adjoint=eq.Unrolled())
    assert len(set(sol.stats.steps.tolist())) > 1
    found = torch.autograd.grad(loss_of(sol.value), (weight, x))
    reference = solve(TANH.fn, TANH.start, (weight, x), solver=FORWARD, adjoint=eq.Implicit())
    wanted = torch.autograd.grad(loss_of(reference), (weight, x))
    assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "solver",
    [
        eq.Anderson(rtol=0.0, atol=0.0, max_steps=60),
        eq.Anderson(rtol=0.0, atol=0.0, max_steps=60, memory=2),
        eq.Broyden(rtol=0.0, atol=0.0, max_steps=60),
        eq.Picard(rtol=0.0, atol=0.0, max_steps=60),
    ],
    ids=["anderson", "anderson2", "broyden", "picard"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_past_convergence_do_not_spoil_the_gradient(solver: Any, dtype: torch.dtype) -> None:
    """When the residual is rounding noise, 1/‖r‖ in a solver must not blow up its derivative."""
    weight, x = (p.detach().to(dtype).requires_grad_() for p in TANH.leaves())
    value = solve(TANH.fn, TANH.start.to(dtype), (weight, x), solver=solver)
    found = torch.autograd.grad(loss_of(value), (weight, x))
    wanted = dense_of("tanh").gradients(exact_propagator)
    # Derivatives of differences of rounding noise lose half the digits at most.
    tolerance = torch.finfo(dtype).eps ** 0.5
    assert_close([f.double() for f in found], wanted, rtol=tolerance, atol=tolerance)


def test_compaction_leaves_the_gradient_as_it_is() -> None:
    weight = TANH.parameters[0]
    x = torch.linspace(0.0, 8.0, 32, dtype=torch.float64).view(8, 4).requires_grad_()
    found = []
    for compact in (False, True):
        solver = eq.Picard(rtol=1e-12, compact=compact)
        value = solve(lambda z, x: TANH.fn(z, weight, x), torch.zeros_like(x), (x,), solver=solver)
        found.append(torch.autograd.grad(value.sin().sum(), x)[0])
    assert_close(found[1:], found[:1])


def saved_numbers(adjoint: Any, steps: int) -> int:
    """How many numbers a graph keeps, each storage counted once: a map with a wide inside."""
    inner, outer = contraction(50, 64, 4).requires_grad_(), contraction(51, 4, 64)
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    def wide(z: Tensor, inner: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(z @ inner.T) @ outer.T + 0.1)

    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=steps)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        eq.fixed_point(wide, TANH.start, (inner,), solver=solver, adjoint=adjoint)
    return sum(t.untyped_storage().nbytes() // 8 for t in kept.values())


def test_memory_grows_with_the_steps_and_by_the_iterates_alone_with_checkpoint() -> None:
    """A step keeps z [3, 4] and the inside [3, 64]; with checkpoint, z alone."""
    plain = saved_numbers(eq.Unrolled(), 40) - saved_numbers(eq.Unrolled(), 10)
    sparing = [saved_numbers(eq.Unrolled(checkpoint=True), k) for k in (10, 40)]
    assert plain >= 30 * 3 * (4 + 64)
    assert 0 < sparing[1] - sparing[0] <= 30 * 3 * 4 * 2


def test_checkpoint_recomputes_each_evaluation_once_and_changes_no_digit() -> None:
    weight, x = TANH.leaves()
    calls = 0

    def counted(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return TANH.fn(z, w, x)

    found = []
    for checkpoint, wanted_calls in ((False, (4, 4)), (True, (4, 8))):
        calls, adjoint = 0, eq.Unrolled(checkpoint=checkpoint)
        value = solve(counted, TANH.start, (weight, x), solver=FEW, adjoint=adjoint)
        forward = calls
        found.append(torch.autograd.grad(loss_of(value), (weight, x)))
        assert (forward, calls) == wanted_calls
    assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("held", ["weight", "module"])
def test_what_changes_before_a_checkpoint_is_recomputed_is_an_error(held: str) -> None:
    """As without checkpoint, where autograd's own versions tell."""
    cell = torch.nn.Linear(4, 4, bias=False).double()
    weight = cell.weight

    def fn(z: Tensor) -> Tensor:
        return torch.tanh(cell(z) if held == "module" else z @ weight.mT)

    for checkpoint in (False, True):
        adjoint = eq.Unrolled(checkpoint=checkpoint)
        value = solve(fn, draw(3, 2, 4), solver=FEW, adjoint=adjoint)
        (first,) = torch.autograd.grad(value.sum(), weight, retain_graph=True)
        assert bool(first.any())
        with torch.no_grad():
            weight.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            torch.autograd.grad(value.sum(), weight)


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.vmap])
def test_a_tolerance_under_transforms_says_what_to_use(transform: Any) -> None:
    weight, x = TANH.parameters

    def run(x: Tensor) -> Tensor:
        x = x.view(-1, 4)
        return solve(TANH.fn, torch.zeros_like(x), (weight, x))

    with pytest.raises(RuntimeError, match=r"Implicit\(\)"):
        transform(run)(x)


def test_checkpoint_under_torch_func_says_what_to_use() -> None:
    weight, x = TANH.parameters
    given = {"solver": FEW, "adjoint": eq.Unrolled(checkpoint=True)}
    run = lambda x: loss_of(solve(TANH.fn, TANH.start, (weight, x), **given))
    with pytest.raises(RuntimeError, match="checkpoint=False"):
        torch.func.grad(run)(x)


def test_fixed_steps_under_transforms_equal_plain_autograd() -> None:
    weight, x = TANH.parameters

    def run(x: Tensor) -> Tensor:
        return solve(TANH.fn, TANH.start, (weight, x), solver=FEW)

    def by_hand(x: Tensor) -> Tensor:
        z = TANH.start
        for _ in range(4):
            z = torch.tanh(z @ weight.T + x)
        return z

    wanted = torch.autograd.functional.jacobian(by_hand, x)
    assert_close([torch.func.jacrev(run)(x), torch.func.jacfwd(run)(x)], [wanted, wanted])
    curvature = torch.func.hessian(lambda x: loss_of(run(x)))(x)
    assert_close([curvature], [torch.autograd.functional.hessian(lambda x: loss_of(by_hand(x)), x)])


def test_plain_dual_numbers() -> None:
    weight, x = TANH.parameters
    direction = torch.ones_like(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        value = solve(TANH.fn, TANH.start, (weight, dual), solver=LAPS)
        pushed = torch.autograd.forward_ad.unpack_dual(value).tangent
    wanted = torch.tensordot(dense_of("tanh").sensitivities()[1], direction, 2)
    assert_close([pushed.flatten()], [wanted])


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("way", ["argument", "captured"])
@pytest.mark.parametrize("kind", ["mask", "clamp"])
def test_infinite_inputs_with_finite_answers_are_ordinary(
    kind: str, way: str, blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention mask of −∞, a clamp without a lower end: the steps written out by hand.

    Beside them a sample whose input is NaN, which alone fails. ``blind``: as on a GPU.
    """
    if blind:
        as_on_a_gpu(monkeypatch)
    weight, x = draw(80, 4, 4, scale=0.2).requires_grad_(), draw(81, 3, 4)
    edge = torch.zeros(3, 4, dtype=torch.float64)
    edge[0, 1:3] = edge[2, 0] = float("-inf")
    x[1, 2] = float("nan")

    def fn(z: Tensor, edge: Tensor, x: Tensor) -> Tensor:
        if kind == "mask":
            return torch.softmax(z @ weight.T + edge, 1) + x
        return torch.maximum(z @ weight.T + x, edge)

    map_, args = (fn, (edge, x)) if way == "argument" else (lambda z: fn(z, edge, x), ())
    start = torch.zeros(3, 4, dtype=torch.float64)
    sol = eq.fixed_point(map_, start, args, solver=FEW, adjoint=eq.Unrolled())
    assert sol.result.tolist() == [int(c) for c in (FIXED, eq.Result.nonfinite, FIXED)]
    rest = [0, 2]
    z = start[rest]
    for _ in range(4):
        z = fn(z, edge[rest], x[rest])
    torch.testing.assert_close(sol.value[rest], z, rtol=1e-14, atol=1e-14)
    found = torch.autograd.grad(loss_of(sol.value[rest]), weight)
    assert_close(found, torch.autograd.grad(loss_of(z), weight), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("blind", [False, True])
def test_coupled_samples_fail_together(blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps spread a NaN input to all samples, though T(z0) is finite for the others."""
    if blind:
        as_on_a_gpu(monkeypatch)
    weight, x = draw(82, 4, 4, scale=0.2).requires_grad_(), draw(83, 3, 4)
    x[1, 2] = float("nan")

    def fn(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ weight.T + z.mean(0) + x)

    start, adjoint = torch.zeros(3, 4, dtype=torch.float64), eq.Unrolled()
    sol = eq.fixed_point(fn, start, (x,), solver=FEW, adjoint=adjoint, coupled=True)
    assert sol.result.tolist() == [int(eq.Result.nonfinite)] * 3
    assert torch.equal(sol.value, start)
    assert torch.equal(*torch.autograd.grad(sol.value.sum(), weight), torch.zeros(4, 4).double())


def relu_gradient(weight: Tensor, x: Tensor) -> Tensor:
    """∂(Σz*)/∂W of z = relu(Wz + x) in float64: z* by plain iteration, (I − DW)ᵀu = 1 dense."""
    z = torch.zeros_like(x)
    for _ in range(400):
        z = torch.relu(z @ weight.T + x)
    total = torch.zeros_like(weight)
    for row in z:
        d = torch.diag((row > 0).double())
        u = torch.linalg.solve((torch.eye(len(row)).double() - d @ weight).T, torch.ones_like(row))
        total += torch.outer(d @ u, row)
    return total


@pytest.mark.parametrize("scale", [1.0, 1e-14, 1e17])
@pytest.mark.parametrize(
    "solver",
    [
        eq.Broyden(rtol=1e-6),
        eq.Broyden(rtol=0.0, atol=0.0, max_steps=60),
        eq.Broyden(rtol=0.0, atol=0.0, max_steps=60, safeguard=None),
        eq.Anderson(rtol=1e-6),
        eq.Anderson(rtol=0.0, atol=0.0, max_steps=60),
        eq.BestIterate(eq.Broyden(rtol=1e-6)),
    ],
    ids=["broyden", "broyden-fixed", "broyden-bare", "anderson", "anderson-fixed", "best"],
)
def test_derivatives_of_short_steps_do_not_overflow(solver: Any, scale: float) -> None:
    """float32, ‖W‖ = 0.9: 1/sᵀHy of a step of 1e-10 has a derivative of 1e40."""
    for seed in range(4):
        weight, x = contraction(seed, 8, 8, 0.9), draw(seed + 100, 4, 8, scale=scale)
        w, single = weight.float().requires_grad_(), x.float()
        fn = lambda z, x, w=w: torch.relu(z @ w.T + x)
        value = solve(fn, torch.zeros(4, 8), (single,), solver=solver)
        (found,) = torch.autograd.grad(value.sum(), w)
        wanted = relu_gradient(w.detach().double(), single.double())
        # Iterates to 1e-6 of a map with 1/(1 − ‖W‖) = 10; their derivatives follow behind.
        assert (found.double() - wanted).norm() <= 3e-3 * wanted.norm()
