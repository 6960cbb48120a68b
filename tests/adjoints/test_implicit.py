"""Implicit: the contract for each backward solver, derivatives of every order, memory, failures."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from tests.contracts.adjoint_contract import (
    CLOSE,
    FORWARD,
    GENERAL,
    ONLY_SYMMETRIC,
    TANH,
    WAYS,
    AdjointContract,
    Problem,
    assert_close,
    attempt,
    contraction,
    dense,
    dense_of,
    draw,
    exact_propagator,
    flat,
    loss_of,
    quiet,
    saved_tensors,
    ways_to_capture,
)

TIGHT = eq.Implicit(solver=eq.GMRES(rtol=1e-13))


def solve(fn: Any, start: Any, args: Any = (), **options: Any) -> Any:
    return eq.fixed_point(fn, start, args, **{"solver": FORWARD, "adjoint": TIGHT, **options}).value


def run_of(problem: Problem, **options: Any) -> Callable[..., Tensor]:
    """Parameters ↦ flat z*."""
    return lambda *parameters: flat(solve(problem.fn, problem.start, parameters, **options))


class ImplicitContract(AdjointContract):
    """What is asked of Implicit beyond other adjoints."""

    compiles = False
    backward: Any
    options: ClassVar[dict[str, int]] = {}

    def make_adjoint(self) -> Any:
        return eq.Implicit(solver=self.backward(rtol=1e-12, **self.options))

    def loose_adjoint(self, rtol: float | None) -> Any:
        return eq.Implicit(solver=self.backward(rtol=rtol))

    @pytest.mark.parametrize("way", ["args", "closure", "intermediate"])
    def test_bad_samples_do_no_harm_when_a_graph_is_asked_for(self, way: str) -> None:
        self.check_bad_batch(way, self.tolerant, create_graph=True)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "intermediate"])
    def test_gradients_reach_what_is_captured_when_a_graph_is_asked_for(
        self, way: str, leaf: bool
    ) -> None:
        """(gradgradcheck does not see this: it compares such gradients with themselves.)"""
        weight, x = self.base.leaves()
        held = (weight, x) if leaf else (1.0 * weight, x.clone())
        fn, args = ways_to_capture(self.base.fn)[way](*held)
        value = self.solve(fn, self.base.start, args).value
        found = torch.autograd.grad(loss_of(value), (weight, x), create_graph=True)
        assert_close([f.detach() for f in found], self.wanted(self.base))

    def test_bad_samples_are_counted_and_get_zero(self) -> None:
        sol = self.check_bad_batch("args", self.tolerant)
        blown = (sol.result == eq.Result.diverged) | (sol.result == eq.Result.nonfinite)
        assert blown[1]
        assert sol.stats.backward.masked == int(blown.sum())
        assert sol.stats.backward.solves == 1
        assert sol.stats.backward.unconverged == 0

    def test_gradcheck_and_gradgradcheck(self) -> None:
        def run(*parameters: Tensor) -> Tensor:
            return flat(self.solve(self.base.fn, self.base.start, parameters).value)

        assert gradcheck(run, self.base.leaves(), fast_mode=True)
        assert gradgradcheck(run, self.base.leaves(), fast_mode=True)


class TestImplicitGMRES(ImplicitContract):
    backward = eq.GMRES


class TestImplicitCG(ImplicitContract):
    backward = eq.CG
    symmetric = True


class TestImplicitAnderson(ImplicitContract):
    backward = eq.Anderson
    options: ClassVar = {"max_steps": 300}


class TestImplicitPicard(ImplicitContract):
    backward = eq.Picard
    options: ClassVar = {"max_steps": 300}


# Derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", GENERAL, ids=lambda p: p.name)
def test_gradcheck_of_every_kind_of_map(problem: Problem) -> None:
    """Against finite differences, to all parameters at once."""
    assert gradcheck(run_of(problem), problem.leaves(), fast_mode=True)
    assert gradgradcheck(run_of(problem), problem.leaves(), fast_mode=True)


def test_gradgradcheck_with_everything_captured() -> None:
    """Second derivatives reach closures, intermediates and module parameters too."""
    weight, x = TANH.leaves()

    def run(weight: Tensor, x: Tensor) -> Tensor:
        feature = torch.sin(x) + weight.sum()
        return solve(lambda z: TANH.fn(z, weight, feature), TANH.start)

    assert gradcheck(run, (weight, x), fast_mode=True)
    assert gradgradcheck(run, (weight, x), fast_mode=True)


@pytest.mark.parametrize("carry", [False, True], ids=["constant", "argument"])
def test_a_leaf_returned_as_it_was_given_when_a_graph_is_asked_for(carry: bool) -> None:
    """T((z, h), x) = (…, x): the second leaf is a tensor from outside, touched by no operation."""
    weight, x = TANH.leaves()
    fixed = x.detach().clone()

    def fn(state: tuple[Tensor, Tensor], w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(state[0] @ w.T + torch.sin(state[1]) + x), x if carry else fixed

    def reference(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ w.T + torch.sin(x if carry else fixed) + x)

    value = solve(fn, (TANH.start, TANH.start), (weight, x))[0]
    found = torch.autograd.grad(loss_of(value), (weight, x), create_graph=True)
    wanted = dense(reference, TANH.start, (weight, x)).gradients(exact_propagator)
    assert_close([f.detach() for f in found], wanted)


def test_four_derivatives_of_a_scalar_equilibrium_by_hand() -> None:
    """z = f(z) + x, f = tanh/2: z′ = 1/(1 − f′), z″ = f″z′³, z‴ = f‴z′⁴ + 3f″²z′⁵, …"""
    x = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    z = solve(lambda z, x: 0.5 * torch.tanh(z) + x, torch.zeros(1).double(), (x,))
    found = []
    derivative = z.sum()
    for _ in range(4):
        (derivative,) = torch.autograd.grad(derivative.sum(), x, create_graph=True)
        found.append(derivative.detach())
    t = torch.tanh(z.detach())
    s = 1 - t * t
    f1, f2 = 0.5 * s, -t * s
    f3, f4 = -s * (1 - 3 * t * t), t * s * (8 - 12 * t * t)
    d1 = 1 / (1 - f1)
    wanted = [
        d1,
        f2 * d1**3,
        f3 * d1**4 + 3 * f2**2 * d1**5,
        f4 * d1**5 + 10 * f2 * f3 * d1**6 + 15 * f2**3 * d1**7,
    ]
    assert_close(found, wanted)


def test_double_backward_twice_through_one_graph() -> None:
    weight, x = TANH.leaves()
    value = solve(TANH.fn, TANH.start, (weight, x))
    (first,) = torch.autograd.grad(loss_of(value), weight, create_graph=True)
    one = torch.autograd.grad((first**2).sum(), (weight, x), retain_graph=True)
    two = torch.autograd.grad((first**2).sum(), (weight, x), retain_graph=True)
    assert_close(two, one, rtol=0, atol=0)
    # And the first derivative can still be taken anew from the same graph.
    (again,) = torch.autograd.grad(loss_of(value), weight)
    assert_close([again], [first.detach()])


def test_an_equilibrium_inside_the_map_of_another() -> None:
    """T(z) = tanh(zWᵀ + y*(z)), y* itself a fixed point; first and second derivatives."""
    weight, x = contraction(1, 2, 2).requires_grad_(), draw(2, 1, 2).requires_grad_()
    inner = contraction(62, 2, 2, 0.3)

    def outer(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        within = lambda y: torch.tanh(y @ inner.T + 0.5 * z)
        y = solve(within, torch.zeros_like(z), adjoint=eq.Implicit())
        return torch.tanh(z @ weight.T + 0.5 * y + x)

    def run(weight: Tensor, x: Tensor) -> Tensor:
        return solve(outer, torch.zeros_like(x), (weight, x), solver=eq.Anderson(rtol=1e-12))

    assert gradcheck(run, (weight, x), fast_mode=True)
    assert gradgradcheck(run, (weight, x), fast_mode=True)


def gradient_map_by_autograd(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """T = −∇E(z) with the gradient taken by torch.autograd inside the map."""
    with torch.enable_grad():
        inside = z if z.requires_grad else z.detach().requires_grad_()
        energy = torch.log(torch.cosh(inside @ weight.T)).sum() - (inside * x).sum()
        (slope,) = torch.autograd.grad(energy, inside, create_graph=True)
    return -slope


def gradient_map_by_func(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    def energy(z: Tensor) -> Tensor:
        return torch.log(torch.cosh(z @ weight.T)).sum() - (z * x).sum()

    return -torch.func.grad(energy)(z)


@pytest.mark.parametrize("fn", [gradient_map_by_autograd, gradient_map_by_func])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_map_that_is_itself_a_gradient(fn: Callable[..., Tensor], create_graph: bool) -> None:
    """Energy models: −∇E is symmetric_map. First derivatives are right by both ways to take ∇E.

    Second derivatives through torch.autograd.grad inside a map may be refused (the rule is written
    with torch.func, which does not see through it), and must not be wrong.
    """
    problem = ONLY_SYMMETRIC[0]
    parameters = problem.leaves()
    value = solve(fn, problem.start, parameters)
    try:
        found = torch.autograd.grad(loss_of(value), parameters, create_graph=create_graph)
    except RuntimeError:
        assert create_graph
        assert fn is gradient_map_by_autograd
        return
    wanted = dense_of("symmetric").gradients(exact_propagator)
    assert_close([f.detach() for f in found], wanted)


class Layer(nn.Module):
    """The equilibrium inside of a module's forward: the map reads the module's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return solve(lambda z: torch.tanh(self.inner(z) + x), torch.zeros_like(x))


@pytest.mark.parametrize("create_graph", [False, True])
def test_functional_call_with_the_equilibrium_inside_the_module(create_graph: bool) -> None:
    """The parameters are swapped back before the backward pass runs: right, or an error."""
    weight, x = TANH.leaves()
    value = torch.func.functional_call(Layer(), {"inner.weight": weight}, (x,))
    found, error = attempt(
        lambda: torch.autograd.grad(loss_of(value), (weight, x), create_graph=create_graph)
    )
    if found is None:
        assert create_graph
        assert "functional_call" in error
    else:
        assert_close([f.detach() for f in found], dense_of("tanh").gradients(exact_propagator))


def test_parametrization_changed_between_forward_and_second_derivative() -> None:
    """The map evaluated anew must see the weights of the forward pass, or refuse."""
    layer = Layer()
    first = nn.Parameter(TANH.parameters[0].clone())
    layer.inner.weight = first
    x = TANH.parameters[1].clone().requires_grad_()
    value = layer(x)
    layer.inner.weight = nn.Parameter(0.5 * first.detach())
    found, error = attempt(
        lambda: torch.autograd.grad(loss_of(value), (first, x), create_graph=True)
    )
    if found is None:
        assert error
    else:
        assert_close([f.detach() for f in found], dense_of("tanh").gradients(exact_propagator))


OFFSET = draw(11, 3, 4)


@pytest.mark.parametrize("way", ["argument", "captured", "global"])
def test_a_constant_changed_in_place_before_a_second_derivative_is_an_error(way: str) -> None:
    """The first derivative holds what it needs; with a graph the map is evaluated anew."""
    weight = TANH.leaves()[0]
    x = OFFSET if way == "global" else draw(12, 3, 4)
    kept = x.clone()
    fn: Any = lambda z: torch.sin(z @ weight.mT + x)
    if way == "argument":
        fn = lambda z, x: torch.sin(z @ weight.mT + x)
    elif way == "global":
        fn = lambda z: torch.sin(z @ weight.mT + OFFSET)
    value = solve(fn, torch.zeros_like(x), (x,) if way == "argument" else ())
    (first,) = torch.autograd.grad(value.sum(), weight, retain_graph=True)
    x.zero_()
    (again,) = torch.autograd.grad(value.sum(), weight, retain_graph=True)
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="in place"):
        torch.autograd.grad(value.sum(), weight, create_graph=True)
    x.copy_(kept)  # as it was: what counts is that the map answers as it did
    (again,) = torch.autograd.grad(value.sum(), weight, create_graph=True)
    assert_close([again.detach()], [first])


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_module_has_a_first_derivative_and_refuses_a_second() -> None:
    plain = nn.Linear(4, 4, bias=False).double()
    plain.weight.data.copy_(TANH.parameters[0])
    scripted, x = torch.jit.script(plain), TANH.parameters[1]
    value = solve(lambda z: torch.tanh(scripted(z) + x), TANH.start)
    found = torch.autograd.grad(loss_of(value), scripted.weight, retain_graph=True)
    assert_close(found, dense_of("tanh").gradients(exact_propagator)[:1])
    with pytest.raises(RuntimeError, match=r"torch\.jit"):
        torch.autograd.grad(loss_of(value), scripted.weight, create_graph=True)


# Failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [False, True], ids=["tolerance", "fixed"])
def test_a_diverged_sample_gets_a_zero_gradient_and_is_counted(fixed: bool) -> None:
    slope = torch.tensor([[0.5], [7.0], [0.5]], dtype=torch.float64)
    x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=60) if fixed else eq.Picard(rtol=1e-12)
    fn = lambda z, x: slope * z + x
    sol = quiet(lambda: eq.fixed_point(fn, torch.zeros(3, 2).double(), (x,), solver=solver))
    assert sol.result[1] == eq.Result.diverged
    (found,) = torch.autograd.grad(sol.value.sum(), x)
    assert_close([found], [torch.tensor([[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]]).double()])
    assert sol.stats.backward.masked == 1


def test_samples_that_ran_out_of_steps_keep_their_gradient() -> None:
    """Not converged is not blown up: the gradient at the iterate is as good as the iterate."""
    weight, x = TANH.leaves()
    few = eq.Picard(rtol=1e-13, max_steps=14)
    with pytest.warns(eq.ConvergenceWarning):
        sol = eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=few)
    found = torch.autograd.grad(loss_of(sol.value), (weight, x))
    # 14 steps of a contraction by 1/2 leave 6e-5 of ‖z* − z0‖ ≈ 2 at most.
    assert_close(found, dense_of("tanh").gradients(exact_propagator), rtol=1e-3, atol=1e-3)
    assert sol.stats.backward.masked == 0


def test_backward_solver_must_be_a_solver() -> None:
    with pytest.raises(TypeError, match="GMRES"):
        eq.Implicit(solver="gmres")
    with pytest.raises(TypeError, match="solver"):
        eq.Implicit(sovler=eq.GMRES())


# Memory --------------------------------------------------------------------------------------


def test_saved_graph_does_not_grow_with_the_steps() -> None:
    few, many = (
        saved_tensors(eq.Implicit(), eq.Picard(rtol=0.0, atol=0.0, max_steps=steps))
        for steps in (5, 80)
    )
    assert few == many > 0
    # One evaluation of tanh(zWᵀ + x) saves z, W and tanh; the rule itself saves z*, W and x, to
    # see whether they were changed.
    assert many <= 8


def test_one_evaluation_for_the_backward_graph() -> None:
    """The map is evaluated once more than the solver needs, and never in the backward pass."""
    weight, x = TANH.leaves()
    calls = 0

    def counted(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return TANH.fn(z, w, x)

    sol = eq.fixed_point(counted, TANH.start, (weight, x), solver=FORWARD)
    assert calls == sol.stats.evaluations + 1
    torch.autograd.grad(loss_of(sol.value), (weight, x))
    assert calls == sol.stats.evaluations + 1


# torch.compile -------------------------------------------------------------------------------


# Dynamo asks tensors that are not leaves for .grad, and torch warns about that itself.
dynamo_warns = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@dynamo_warns
@pytest.mark.parametrize("way", ["args", "intermediate in args", "parameters"])
def test_a_compiled_map(fresh_compiler: None, way: str) -> None:
    """torch.compile around T, fixed_point outside of it: values and gradients are the same."""
    weight, x = TANH.leaves()
    wanted = dense_of("tanh").gradients(exact_propagator)
    if way == "parameters":
        linear = nn.Linear(4, 4, bias=False).double()
        with torch.no_grad():
            linear.weight.copy_(weight)
        weight = linear.weight
        module = torch.compile(linear, backend="aot_eager")
        fn: Any = lambda z, x: torch.tanh(module(z) + x)
        args: Any = (x,)
    else:
        fn = torch.compile(TANH.fn, backend="aot_eager")
        args = (weight, x) if way == "args" else (weight * 1.0, x * 1.0)
    value = solve(fn, TANH.start, args)
    torch.testing.assert_close(value.flatten(), dense_of("tanh").z, **CLOSE)
    assert_close(torch.autograd.grad(loss_of(value), (weight, x)), wanted)


@dynamo_warns
def test_a_compiled_map_with_a_captured_intermediate_is_right_or_says_what_to_do(
    fresh_compiler: None,
) -> None:
    weight, x = TANH.leaves()
    feature = x * 1.0
    fn = torch.compile(lambda z: TANH.fn(z, weight, feature), backend="aot_eager")

    found, error = attempt(lambda: torch.autograd.grad(loss_of(solve(fn, TANH.start)), (weight, x)))
    if found is None:
        assert "args" in error
    else:
        assert_close(found, dense_of("tanh").gradients(exact_propagator))


@dynamo_warns
def test_second_derivative_of_a_compiled_map_is_right_or_an_error(fresh_compiler: None) -> None:
    """aot_autograd has no double backward; whatever happens, no wrong number comes out."""
    weight, x = TANH.leaves()
    fn = torch.compile(TANH.fn, backend="aot_eager")
    value = solve(fn, TANH.start, (weight, x))
    second = None
    with contextlib.suppress(RuntimeError):
        (first,) = torch.autograd.grad(loss_of(value), weight, create_graph=True)
        second = torch.autograd.grad((first**2).sum(), (weight, x))
    if second is not None:
        plain = solve(TANH.fn, TANH.start, (weight, x))
        (first,) = torch.autograd.grad(loss_of(plain), weight, create_graph=True)
        assert_close(second, torch.autograd.grad((first**2).sum(), (weight, x)))


@dynamo_warns
@pytest.mark.slow
def test_compile_around_the_solve_breaks_the_graph_and_stays_right(fresh_compiler: None) -> None:
    weight, x = TANH.leaves()

    def run(w: Tensor, x: Tensor) -> Tensor:
        solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=6)
        value = eq.fixed_point(TANH.fn, TANH.start, (w, 1.0 * x), solver=solver).value
        return value * 2.0

    value = torch.compile(run, backend="aot_eager")(weight, x)
    plain = run(weight, x)
    torch.testing.assert_close(value, plain, **CLOSE)
    found = torch.autograd.grad(loss_of(value), (weight, x))
    assert_close(found, torch.autograd.grad(loss_of(plain), (weight, x)))


FIXED = {"rtol": 0.0, "atol": 0.0, "max_steps": 12}
SLOW, FAILED = pytest.mark.slow, torch.tensor([1])


class _Outer(nn.Module):
    """A network with an implicit layer in the middle; its map captures a weight and a feature."""

    def __init__(self, solver: Any, adjoint: Any, *, coupled: bool = False) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(3, 4), nn.Parameter(contraction(1, 4, 4))
        self.solver, self.adjoint, self.coupled = solver, adjoint, coupled

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)

        def fn(z: Tensor) -> Tensor:
            mean = 0.3 * z.mean(0, keepdim=True) if self.coupled else 0.0
            return torch.tanh(z @ self.weight.mT + h + mean)

        how = {"solver": self.solver, "adjoint": self.adjoint, "coupled": self.coupled}
        return torch.relu(eq.fixed_point(fn, torch.zeros_like(h), **how).value)


@pytest.mark.parametrize(
    ("solver", "back", "coupled"),
    [
        (eq.Picard(rtol=0.0, max_steps=2), eq.Picard(rtol=0.0, max_steps=2), False),
        pytest.param(eq.Picard(**FIXED), eq.GMRES(**FIXED, restart=4), False, marks=SLOW),
        pytest.param(eq.Picard(**FIXED), eq.GMRES(**FIXED, restart=8), True, marks=SLOW),
        pytest.param(eq.Anderson(**FIXED), eq.Anderson(**FIXED), False, marks=SLOW),
    ],
    ids=["picard", "gmres", "coupled", "anderson"],
)
@dynamo_warns
@pytest.mark.filterwarnings("ignore:the backward solve missed its tolerance")
def test_an_outer_graph_goes_through_the_layer(
    fresh_compiler: None, solver: Any, back: Any, coupled: bool
) -> None:
    """fullgraph=True around a network: value and gradients are those of the network run eagerly."""
    net = _Outer(solver, eq.Implicit(solver=back), coupled=coupled).double()
    x = draw(2, 2, 3).requires_grad_()
    sources = [x, *net.parameters()]
    wanted = net(x)
    plain = torch.autograd.grad(wanted.square().sum(), sources)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    value = compiled(x)
    torch.testing.assert_close(value, wanted, **CLOSE)
    assert_close(torch.autograd.grad(value.square().sum(), sources), plain)
    if not coupled:  # a failed sample returns its start, and not the row that stands in for it
        known = torch.stack([wanted[0], torch.zeros_like(wanted[1])])
        torch.testing.assert_close(compiled(x.index_fill(0, FAILED, math.nan)), known, **CLOSE)


# The peer ------------------------------------------------------------------------------------


def test_agrees_with_torchdeq() -> None:
    """One map, one set of weights, side by side with torchdeq 0.1.0: z* and ∂L/∂θ agree."""
    torchdeq = pytest.importorskip("torchdeq")
    ours, theirs = TANH.leaves(), TANH.leaves()
    options = {"solver": "anderson", "max_iter": 200, "tol": 1e-12, "stop_mode": "rel"}
    both = {f"{way}_{key}": value for key, value in options.items() for way in "fb"}
    deq = torchdeq.get_deq(ift=True, **both)
    peer = deq(lambda z: TANH.fn(z, *theirs), TANH.start)[0][-1]
    value = solve(TANH.fn, TANH.start, ours)
    # Both to 1e-12 in z; Anderson with an absolute ridge reaches about 1e-9 in the backward.
    torch.testing.assert_close(value, peer, rtol=1e-8, atol=1e-8)
    found = torch.autograd.grad(loss_of(value), ours)
    assert_close(found, torch.autograd.grad(loss_of(peer), theirs), rtol=1e-6, atol=1e-6)
