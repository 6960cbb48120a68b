"""Implicit under torch.func and forward mode: each transform equals the dense derivative."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import equilibria as eq
from tests.contracts.adjoint_contract import (
    CONV,
    DEEP,
    FORWARD,
    ONLY_SYMMETRIC,
    TANH,
    TREE,
    Problem,
    assert_close,
    attempt,
    contraction,
    dense_of,
    draw,
    exact_propagator,
    flat,
    loss_of,
    quiet,
    ways_to_capture,
    weights_of_loss,
    zeros,
)
from tests.contracts.problems import randn

from .test_implicit import Layer, run_of, solve

BACKWARDS = {
    "anderson": eq.Anderson(rtol=1e-12, max_steps=300),
    "picard": eq.Picard(rtol=1e-12, max_steps=300),
    "cg": eq.CG(rtol=1e-13),
}


@pytest.mark.parametrize("problem", [TANH, DEEP, TREE, CONV], ids=lambda p: p.name)
@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobians_equal_the_dense_sensitivities(transform: Any, problem: Problem) -> None:
    everything = tuple(range(len(problem.parameters)))
    found = transform(run_of(problem), argnums=everything)(*problem.parameters)
    assert_close(found, dense_of(problem.name).sensitivities())


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_any_backward_solver_serves_the_transforms(transform: Any, backward: str) -> None:
    problem = ONLY_SYMMETRIC[0] if backward == "cg" else TANH
    run = run_of(problem, adjoint=eq.Implicit(solver=BACKWARDS[backward]))
    found = transform(run, argnums=(0, 1))(*problem.parameters)
    assert_close(found, dense_of(problem.name).sensitivities())


def test_jvp_and_vjp_equal_products_with_the_dense_jacobian() -> None:
    run = run_of(TANH)
    sensitivities = dense_of("tanh").sensitivities()
    directions = tuple(draw(70 + i, *p.shape) for i, p in enumerate(TANH.parameters))
    value, pushed = jvp(run, TANH.parameters, directions)
    torch.testing.assert_close(value, dense_of("tanh").z, rtol=1e-10, atol=1e-10)
    assert_close([pushed], [pushed_by_hand(directions)])
    c = weights_of_loss(value)
    pulled = vjp(run, *TANH.parameters)[1](c)
    assert_close(pulled, [torch.tensordot(c, s, 1) for s in sensitivities])


def pushed_by_hand(directions: tuple[Tensor, ...]) -> Tensor:
    """The dense sensitivities of TANH times the directions."""
    pairs = zip(dense_of("tanh").sensitivities(), directions, strict=True)
    return sum(torch.tensordot(s, d, d.dim()) for s, d in pairs)


def by_hand(x: Tensor) -> Tensor:
    """z* of TANH by plain steps, each of which halves the error."""
    z = TANH.start
    for _ in range(80):
        z = TANH.fn(z, TANH.parameters[0], x)
    return z


@pytest.mark.parametrize(
    "transform",
    [
        hessian,
        lambda f: jacrev(jacrev(f)),
        lambda f: jacrev(jacfwd(f)),
        lambda f: jacfwd(jacfwd(f)),
        lambda f: lambda x: torch.autograd.functional.hessian(f, x),
    ],
    ids=["forward over reverse", "reverse twice", "reverse over forward", "forward twice", "plain"],
)
def test_hessians_of_every_mixture_of_modes(transform: Any, request: pytest.FixtureRequest) -> None:
    """Also where the value of the solve is changed in place, as nn.ReLU(inplace=True) does."""
    weight, x = TANH.parameters
    loss = lambda x: loss_of(solve(TANH.fn, TANH.start, (weight, x)).mul_(2.0))
    found, error = attempt(lambda: transform(loss)(x))
    if found is None:
        assert "forward twice" in request.node.name
        assert "jacrev" in error or "hessian" in error
    else:
        wanted = torch.autograd.functional.hessian(lambda x: loss_of(2.0 * by_hand(x)), x)
        assert_close([found], [wanted])


# vmap ----------------------------------------------------------------------------------------


def test_vmap_over_inputs_weights_and_both() -> None:
    weights = torch.stack([contraction(80 + i, 4, 4) for i in range(3)])
    inputs = draw(83, 3, 2, 4)
    run = lambda w, x: solve(TANH.fn, zeros(2, 4), (w, x))

    def each(ws: Any, xs: Any) -> Tensor:
        return torch.stack([run(w, x) for w, x in zip(ws, xs, strict=True)])

    assert_close([vmap(run, (None, 0))(weights[0], inputs)], [each([weights[0]] * 3, inputs)])
    assert_close([vmap(run, (0, None))(weights, inputs[0])], [each(weights, [inputs[0]] * 3)])
    assert_close([vmap(run)(weights, inputs)], [each(weights, inputs)])
    moved = vmap(run, in_dims=(2, 1), out_dims=1)(weights.permute(1, 2, 0), inputs.permute(1, 0, 2))
    assert_close([moved.transpose(0, 1)], [each(weights, inputs)])
    nested = vmap(vmap(run, (None, 0)), (0, None))(weights, inputs)
    assert_close(nested, [each([w] * 3, inputs) for w in weights])


def test_vmap_over_the_start_and_over_a_tree() -> None:
    starts = {k: draw(84 + i, 3, *v.shape) for i, (k, v) in enumerate(TREE.start.items())}
    inputs = draw(86, 3, *TREE.parameters[2].shape)
    found = vmap(lambda s, x: solve(TREE.fn, s, (*TREE.parameters[:2], x)))(starts, inputs)
    for i in range(3):
        start = {k: v[i] for k, v in starts.items()}
        wanted = solve(TREE.fn, start, (*TREE.parameters[:2], inputs[i]))
        assert_close([found["a"][i], found["b"][i]], [wanted["a"], wanted["b"]])


def test_vmap_over_the_start_alone() -> None:
    weight, x = TANH.leaves()
    starts = draw(88, 3, *TANH.start.shape)
    found = vmap(lambda s: solve(TANH.fn, s, (weight, x)))(starts)
    wanted = dense_of("tanh").z.view(TANH.start.shape).expand_as(found)
    assert_close([found], [wanted])
    gradients = torch.autograd.grad(loss_of(found[1]), (weight, x))
    assert_close(gradients, dense_of("tanh").gradients(exact_propagator))


def test_statistics_under_vmap_belong_to_each_sample() -> None:
    weight = contraction(93, 4, 4)
    inputs = draw(94, 3, 2, 4)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        sol = eq.fixed_point(TANH.fn, torch.zeros_like(x), (weight, x), solver=FORWARD)
        return sol.value, sol.result, sol.stats.steps, sol.stats.residual, sol.stats.relative

    value, result, steps, residual, relative = vmap(run)(inputs)
    assert value.shape == (3, 2, 4)
    for i in range(3):
        alone = eq.fixed_point(TANH.fn, zeros(2, 4), (weight, inputs[i]), solver=FORWARD)
        assert torch.equal(result[i], alone.result)
        assert torch.equal(steps[i], alone.stats.steps)
        gap = TANH.fn(value[i], weight, inputs[i]) - value[i]
        # The residual of the returned z, at the level of rounding.
        torch.testing.assert_close(residual[i], gap.norm(dim=1), rtol=0.5, atol=1e-14)
        assert (relative[i] <= 1e-13).all()


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_functional_call_around_the_equilibrium(transform: Any) -> None:
    """Parameters given to functional_call, other numbers than the module's own."""
    layer = Layer()

    def run(w: Tensor, x: Tensor) -> Tensor:
        return flat(functional_call(layer, {"inner.weight": w}, (x,)))

    found = transform(run, argnums=(0, 1))(*TANH.parameters)
    assert_close(found, dense_of("tanh").sensitivities())


# Closures ------------------------------------------------------------------------------------


CAPTURES: dict[str, Callable[[Tensor, Tensor], tuple[Any, Any]]] = {
    **ways_to_capture(TANH.fn),
    "intermediate": lambda w, x: (lambda z, h=x * 1.0, v=w * 1.0: TANH.fn(z, v, h), ()),
    "twice": lambda w, x: (lambda z, a: TANH.fn(z, w, 0.5 * a + 0.5 * x), (x,)),
    "detached too": lambda w, x: (lambda z, d: TANH.fn(z, w, x + d - d.clone()), (x.detach(),)),
}


@pytest.mark.parametrize("way", CAPTURES)
@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_transforms_follow_what_the_map_captures(transform: Any, way: str) -> None:
    def run(w: Tensor, x: Tensor) -> Tensor:
        fn, args = CAPTURES[way](w, x)
        return flat(solve(fn, TANH.start, args))

    found = transform(run, argnums=(0, 1))(*TANH.parameters)
    assert_close(found, dense_of("tanh").sensitivities())


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_a_leaf_returned_as_it_was_given(transform: Any) -> None:
    """T((z, h), x) = (tanh(zWᵀ + h), x): ∂z/∂x runs through h alone."""
    weight, x = TANH.parameters

    def run(x: Tensor) -> Tensor:
        def fn(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            return TANH.fn(state[0], weight, state[1]), x

        return flat(solve(fn, (TANH.start, TANH.start), (x,))[0])

    assert_close([transform(run)(x)], dense_of("tanh").sensitivities()[1:])


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_a_constant_map(transform: Any) -> None:
    """T(z) = x: the answer is x and its derivative the identity."""
    x = draw(97, 2, 2)
    run = lambda x: solve(lambda z, x: x, torch.zeros_like(x), (x,))
    found = transform(run)(x)
    assert_close([found.view(4, 4)], [torch.eye(4, dtype=torch.float64)])


class Product(torch.autograd.Function):
    """zWᵀ, with its own rule: torch.func sees a single operation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, weight: Tensor) -> Tensor:
        return z @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        z, weight = ctx.saved_tensors
        return g @ weight, g.T @ z


def test_a_custom_function_inside_the_map() -> None:
    weight, x = TANH.parameters

    def run(w: Tensor, x: Tensor) -> Tensor:
        return flat(solve(lambda z: torch.tanh(Product.apply(z, w) + x), TANH.start))

    assert_close(jacrev(run, argnums=(0, 1))(weight, x), dense_of("tanh").sensitivities())


# Forward mode outside torch.func -------------------------------------------------------------


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("way", CAPTURES)
def test_plain_dual_numbers(way: str, slices: bool) -> None:
    """Also where T(z) is slices of a tensor, whose tangents lie otherwise in memory."""
    weight, x = TANH.parameters
    directions = draw(98, 4, 4), draw(99, 3, 4)

    def parts(z: Tensor) -> Any:
        return (z[:, :1], z[:, 1:]) if slices else (z,)

    with forward_ad.dual_level():
        w, d = (forward_ad.make_dual(p, v) for p, v in zip((weight, x), directions, strict=True))
        fn, args = CAPTURES[way](w, d)
        found = eq.fixed_point(
            lambda z, *args: parts(fn(torch.cat(z, 1), *args)),
            parts(TANH.start),
            args,
            solver=BACKWARDS["picard"],
            adjoint=eq.Implicit(solver=eq.GMRES(rtol=1e-13)),
            coupled=slices,  # so that all samples end at one step, in the memory of T(z)
        ).value
        value, tangent = forward_ad.unpack_dual(torch.cat(found, 1))
    assert_close([value.flatten()], [dense_of("tanh").z])
    assert_close([tangent.flatten()], [pushed_by_hand(directions)])


def test_a_dual_level_without_duals_leaves_reverse_mode_as_it_is() -> None:
    weight, x = TANH.leaves()
    with forward_ad.dual_level():
        value = solve(TANH.fn, TANH.start, (weight, x))
        assert forward_ad.unpack_dual(value).tangent is None
        found = torch.autograd.grad(loss_of(value), (weight, x))
    assert_close(found, dense_of("tanh").gradients(exact_propagator))


def test_reverse_of_forward_with_dual_numbers() -> None:
    """∂/∂x of the directional derivative in x, reverse mode over plain duals."""
    weight = TANH.parameters[0]
    x = TANH.parameters[1].clone().requires_grad_()
    direction = draw(101, 3, 4)
    with forward_ad.dual_level():
        value = solve(TANH.fn, TANH.start, (weight, forward_ad.make_dual(x, direction)))
        slope = (forward_ad.unpack_dual(value).tangent ** 2).sum()
        (found,) = torch.autograd.grad(slope, x)
    wanted = grad(lambda x: (jvp(by_hand, (x,), (direction,))[1] ** 2).sum())(x.detach())
    assert_close([found], [wanted])


# What is refused, and what is reported -------------------------------------------------------


@pytest.mark.parametrize("transform", [grad, jacfwd, vmap])
def test_throw_under_transforms_says_what_to_read(transform: Any) -> None:
    weight, x = TANH.parameters

    def run(x: Tensor) -> Tensor:
        x = x.view(-1, 4)
        return eq.fixed_point(TANH.fn, torch.zeros_like(x), (weight, x), throw=True).value.sum()

    with pytest.raises(ValueError, match=r"sol\.result"):
        transform(run)(x)


@pytest.mark.parametrize("transform", [grad, jacfwd, vmap])
def test_linear_solve_under_transforms_says_what_to_use(transform: Any) -> None:
    def run(b: Tensor) -> Tensor:
        return eq.linear_solve(lambda v: 2.0 * v, b.view(-1, 4)).value.sum()

    with pytest.raises(RuntimeError, match="fixed_point"):
        transform(run)(TANH.parameters[1])


def test_what_linear_solve_advises_works() -> None:
    """fixed_point(lambda x: x + b − A(x), b) under jacrev: ∂x/∂b = A⁻¹."""
    matrix = torch.eye(4, dtype=torch.float64) + contraction(102, 4, 4)
    b = draw(103, 1, 4)
    found = jacrev(lambda b: solve(lambda v: v + b - v @ matrix.T, b))(b)
    assert_close([found.view(4, 4)], [torch.linalg.inv(matrix)])


@pytest.mark.parametrize("transform", [grad, vmap])
def test_forward_failure_under_transforms_warns_once_and_is_not_called_converged(
    transform: Any,
) -> None:
    codes: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        x = x.view(-1, 4)
        fn = lambda z, x: torch.exp(z) + 1.0 + x * x
        sol = eq.fixed_point(fn, torch.zeros_like(x), (x,), solver=eq.Picard())
        if transform is vmap:
            return sol.converged
        codes.append(sol.converged)
        return sol.value.sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = transform(run)(TANH.parameters[1])
    messages = [str(w.message) for w in caught if w.category is eq.ConvergenceWarning]
    assert sum(m.startswith("fixed_point did not converge") for m in messages) == 1
    assert not (codes[0] if codes else found).any()


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
@pytest.mark.parametrize("way", ["args", "closure"])
def test_the_start_may_be_the_input_itself(transform: Any, way: str) -> None:
    """z0 = x, one tensor in two roles: the derivative is that of its role in the map."""
    weight, x = TANH.parameters

    def run(x: Tensor) -> Tensor:
        if way == "args":
            return flat(solve(TANH.fn, x, (weight, x)))
        return flat(solve(lambda z: TANH.fn(z, weight, x), x))

    assert_close([transform(run)(x)], dense_of("tanh").sensitivities()[1:])


def test_backward_failure_under_transforms_warns_once_and_is_counted() -> None:
    weight, x = TANH.parameters
    kept = []
    hasty = eq.Implicit(solver=eq.GMRES(rtol=1e-12, max_steps=2))

    def loss(x: Tensor) -> Tensor:
        sol = eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=FORWARD, adjoint=hasty)
        kept.append(sol.stats.backward)
        return loss_of(sol.value)

    with pytest.warns(eq.ConvergenceWarning, match="backward solve missed") as caught:
        grad(loss)(x)
    assert len(caught) == 1
    assert (kept[0].solves, kept[0].unconverged) == (1, 3)


def test_evaluations_are_counted_under_transforms() -> None:
    """stats.evaluations is what the forward solve took, not the limit of the solver."""
    counts = []

    def loss(x: Tensor) -> Tensor:
        sol = eq.fixed_point(TANH.fn, TANH.start, (TANH.parameters[0], x), solver=FORWARD)
        counts.append(sol.stats.evaluations)
        return sol.value.sum()

    loss(TANH.parameters[1])
    grad(loss)(TANH.parameters[1])
    assert counts[1] == counts[0]


@pytest.mark.parametrize("transform", [grad, vmap])
def test_callback_is_called_or_refused_under_transforms(transform: Any) -> None:
    calls = []
    note = lambda step, z, residual: calls.append(step)

    def run(x: Tensor) -> Tensor:
        x = x.view(-1, 4)
        args = (TANH.parameters[0], x)
        return solve(TANH.fn, torch.zeros_like(x), args, adjoint=None, callback=note).sum()

    found, error = attempt(lambda: transform(run)(TANH.parameters[1]))
    if found is None:
        assert "callback" in error
    else:
        assert calls
        assert calls[0] == 1


def test_one_bad_sample_under_vmap_does_not_harm_the_gradients_of_others() -> None:
    weight, x = TANH.parameters
    spoilt = x.clone()
    spoilt[1, 0] = float("nan")

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return solve(TANH.fn, torch.zeros_like(x).unsqueeze(0), (w, x.unsqueeze(0))).sin().sum()

    each = vmap(grad(loss), in_dims=(None, 0))
    found = quiet(lambda: each(weight, spoilt))
    wanted = each(weight, x)
    assert_close([found[0], found[2]], [wanted[0], wanted[2]])


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_a_diverged_sample_has_a_zero_derivative(transform: Any) -> None:
    """z = az + x: 1/(1 − a) for the healthy samples, 0 for the one with a = 7."""
    rate = torch.tensor([[0.5], [7.0], [0.5]], dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return solve(lambda z: rate * z + x, zeros(3, 1), solver=eq.Picard(rtol=1e-12))

    found = quiet(lambda: transform(run)(torch.ones(3, 1, dtype=torch.float64)))
    assert_close([found.view(3, 3)], [torch.diag(torch.tensor([2.0, 0.0, 2.0])).double()])


def test_a_constant_changed_in_place_before_the_pullback_is_an_error() -> None:
    x = draw(11, 3, 4)
    fn: Any = lambda w: solve(lambda z: torch.sin(z @ w.mT + x), torch.zeros_like(x))
    value, pull = vjp(fn, TANH.parameters[0])
    x.zero_()
    with pytest.raises(RuntimeError, match="in place"):
        pull(torch.ones_like(value))


def forward_derivative(run: Any, x: Tensor, tangent: Tensor, way: str) -> Tensor:
    if way == "jvp":
        return jvp(run, (x,), (tangent,))[1]
    with forward_ad.dual_level():
        found: Tensor = forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent))).tangent
    return found


@pytest.mark.parametrize("way", ["jvp", "dual"])
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("solver", [eq.Broyden, eq.Anderson])
def test_forward_mode_through_steps(solver: Any, graph: bool, way: str) -> None:
    """Also past convergence, where steps are zero, and under no_grad, which it does not ask for."""
    weight, x, tangent = 0.2 * randn(2, 2, seed=0), randn(3, 2, seed=1), randn(3, 2, seed=2)
    ways = {eq.Unrolled(): "all", eq.Phantom(steps=60): "all", eq.OneStep(): "last"}
    z = torch.zeros_like(x)
    for _ in range(300):
        z = torch.tanh(z @ weight + x)
    slope = 1 - z**2
    jacobian = slope.unsqueeze(2) * weight.mT
    last = slope * tangent
    whole = torch.linalg.solve(torch.eye(2, dtype=torch.float64) - jacobian, last)
    exact = {"all": whole, "last": last}
    for adjoint, kind in ways.items():

        def run(x: Tensor, adjoint: Any = adjoint) -> Tensor:
            steps = solver(rtol=0.0, max_steps=30)
            start = torch.zeros(3, 2, dtype=x.dtype)
            found = eq.fixed_point(
                lambda z, x: torch.tanh(z @ weight + x), start, (x,), solver=steps, adjoint=adjoint
            )
            return found.value

        with torch.set_grad_enabled(graph):
            found = forward_derivative(run, x, tangent, way)
        torch.testing.assert_close(found, exact[kind], rtol=1e-9, atol=1e-12)
