"""Maps that couple the samples of a batch: values and gradients against dense joint algebra.

The oracle solves z = T(z) by Newton's method on the whole batch as one vector, and differentiates
by the dense joint Jacobian or by finite differences of such solves. It shares no code with us.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.functional import jacobian

import equilibria as eq
from equilibria.problems import DenseOperator

law = settings(max_examples=12, deadline=None, derandomize=True)

TIGHT = {"rtol": 1e-12, "max_steps": 400}
BACKWARD = {
    "GMRES": eq.GMRES(rtol=1e-11, max_steps=300),
    "Anderson": eq.Anderson(**TIGHT),
    "Broyden": eq.Broyden(**TIGHT),
    "Picard": eq.Picard(rtol=1e-12, max_steps=2000),
}


def joint_root(fn: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """z = fn(z) by Newton's method on the whole batch."""
    z = start.clone()
    eye = torch.eye(z.numel(), dtype=z.dtype)
    for _ in range(60):
        residual = (fn(z) - z).detach()
        if float(residual.norm()) <= 1e-14 * (1 + float(z.norm())):
            break
        j = jacobian(fn, z).reshape(z.numel(), -1)
        z = z + torch.linalg.solve(eye - j, residual.flatten()).view_as(z)
    assert float((fn(z) - z).detach().norm()) <= 1e-12 * (1 + float(z.norm()))
    return z.detach()


def joint_gradients(
    fn: Callable[..., Tensor], start: Tensor, deps: list[Tensor], g: Tensor
) -> list[Tensor]:
    """(∂T/∂deps)ᵀ(I − Jᵀ)⁻¹g at the joint root."""
    z = joint_root(lambda x: fn(x, *deps), start)
    j = jacobian(lambda x: fn(x, *deps), z).reshape(z.numel(), -1)
    u = torch.linalg.solve(torch.eye(len(j), dtype=j.dtype) - j.T, g.flatten()).view_as(z)
    leaves = [d.detach().clone().requires_grad_() for d in deps]
    return list(torch.autograd.grad(fn(z, *leaves), leaves, u))


def deep_layer(weight: float, seed: int, **options: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The layer of the report, its input, an incoming gradient and a direction in U."""
    torch.manual_seed(seed)
    layer = eq.nn.DeepOptEq(6, (8, 8), regularizer=eq.Decorrelation(weight), **options)
    layer = layer.double().eval()
    x = torch.randn(4, 6).double()
    g = torch.randn(4, 6).double()
    d = torch.randn_like(layer.blocks[0].U.weight)
    return layer, x, g, d / d.norm()


def layer_root(layer: Any, x: Tensor) -> Tensor:
    step, injected = layer.bound_step(), [c.detach() for c in layer.inject(x)]
    return joint_root(lambda z: step(z, *injected), x)


def finite_difference(layer: Any, x: Tensor, g: Tensor, d: Tensor, eps: float = 1e-5) -> float:
    """The derivative of ⟨g, z*⟩ along d in U, by two joint Newton solves."""
    p = layer.blocks[0].U.weight
    found = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            p.add_(sign * eps * d)
        found.append(float((layer_root(layer, x) * g).sum()))
        with torch.no_grad():
            p.sub_(sign * eps * d)
    return (found[0] - found[1]) / (2 * eps)


def derivative(layer: Any, x: Tensor, g: Tensor, d: Tensor) -> float:
    p = layer.blocks[0].U.weight
    (found,) = torch.autograd.grad((layer(x) * g).sum(), p)
    return float((found * d).sum())


ADJOINTS = {
    "default": {},
    "implicit Anderson": {"adjoint": eq.Implicit(solver=eq.Anderson())},
    "unrolled Anderson": {"adjoint": eq.Unrolled(), "solver": eq.Anderson()},
    "unrolled Broyden": {"adjoint": eq.Unrolled(), "solver": eq.Broyden()},
    "unrolled Picard": {"adjoint": eq.Unrolled(), "solver": eq.Picard(max_steps=500)},
    "phantom": {"adjoint": eq.Phantom(steps=80), "solver": eq.Anderson()},
    "neumann": {"adjoint": eq.Phantom(steps=80, form="neumann"), "solver": eq.Anderson()},
}


@pytest.mark.parametrize("name", ADJOINTS)
@pytest.mark.parametrize(("seed", "weight"), [(0, 0.05), (1, 0.2)])
def test_decorrelated_layer_has_the_joint_derivative(seed: int, weight: float, name: str) -> None:
    layer, x, g, d = deep_layer(weight, seed, **ADJOINTS[name])
    wanted = finite_difference(layer, x, g, d)
    if seed == 0:
        assert wanted == pytest.approx(-0.03691, abs=6e-5)
    # Unrolled: the derivative of an iterate that is 1e-8 from the answer.
    assert derivative(layer, x, g, d) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("regularizer", [eq.Decorrelation(0.05), eq.HSIC(0.5)], ids=["R", "HSIC"])
def test_minimized_problem_with_a_coupling_regularizer(regularizer: Any) -> None:
    """A hidden problem, not a map: minimize declares the coupling too."""
    torch.manual_seed(2)
    weight, c, g = 0.4 * torch.randn(5, 4), torch.randn(3, 5), torch.randn(3, 5)
    weight, c, g = weight.double(), c.double().requires_grad_(), g.double()

    def problem(c: Tensor) -> Any:
        return eq.Problem(eq.Free(), eq.Linear(DenseOperator(0.5 * weight.T), c), regularizer)

    sol = eq.minimize(problem(c), solver=eq.Anderson(**TIGHT), adjoint=eq.Implicit())
    assert sol.converged.all()
    assert sol.stats.steps.unique().numel() == 1
    (found,) = torch.autograd.grad((sol.value * g).sum(), c)
    step = lambda z, c: problem(c).step(z, 1.0)
    (wanted,) = joint_gradients(step, sol.value.detach(), [c.detach()], g)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


# ---------------------------------------------------------------------- plain maps


MIXTURES: dict[str, Callable[[Tensor], Tensor]] = {
    "apart": torch.zeros_like,
    "mean": lambda z: z.mean(0, keepdim=True).expand_as(z),
    "batch statistics": lambda z: torch.nn.functional.batch_norm(
        z, None, None, training=True, eps=0.1
    ),
    # Each sample gets the one before it; the last gets the first.
    "chain": lambda z: torch.cat([torch.zeros_like(z[:1]), z[:-1]]),
    "one pair": lambda z: torch.cat([torch.zeros_like(z[:-1]), z[:1]]),
    "attention": lambda z: torch.softmax(z @ z.T, 1) @ z,
}


def mixing_map(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """T(z; W, x) = tanh(zW + 0.4·mixture(z) + x)."""
    mix = MIXTURES[name]
    return lambda z, weight, x: torch.tanh(z @ weight + 0.4 * mix(z) + x)


def symmetric_map(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """A symmetric joint Jacobian: z ↦ x − 0.5·∇φ(z), φ convex in the whole batch."""
    return x - 0.5 * (torch.tanh((z - z.mean(0) + 0.2) @ weight.T) @ weight) - 0.3 * z.mean(0)


def scene(seed: int, batch: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, size, generator=generator, dtype=torch.float64)
    weight = 0.4 * weight / torch.linalg.matrix_norm(weight, 2)
    return weight, torch.randn(batch, size, generator=generator, dtype=torch.float64)


def incoming(seed: int, x: Tensor, rows: str) -> Tensor:
    """A gradient for all samples, or for the last one alone."""
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=x.dtype)
    if rows == "last":
        g[:-1] = 0.0
    return g


WAYS: dict[str, dict[str, Any]] = {
    **{f"implicit {k}": {"adjoint": eq.Implicit(solver=v)} for k, v in BACKWARD.items()},
    "implicit short GMRES": {"adjoint": eq.Implicit(solver=eq.GMRES(rtol=1e-11, restart=3))},
    "unrolled Anderson": {"adjoint": eq.Unrolled()},
    "unrolled Broyden": {"adjoint": eq.Unrolled(), "solver": eq.Broyden(**TIGHT)},
    "unrolled Picard": {"adjoint": eq.Unrolled(), "solver": eq.Picard(rtol=1e-12, max_steps=2000)},
    "phantom": {"adjoint": eq.Phantom(steps=150)},
    "neumann": {"adjoint": eq.Phantom(steps=150, form="neumann")},
}


@settings(law, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 5),
    size=st.integers(1, 4),
    mixture=st.sampled_from(sorted(MIXTURES)),
    way=st.sampled_from(sorted(WAYS)),
    declared=st.booleans(),
    rows=st.sampled_from(["all", "last"]),
)
def test_gradients_are_those_of_the_dense_joint_system(
    seed: int, batch: int, size: int, mixture: str, way: str, declared: bool, rows: str
) -> None:
    if mixture == "batch statistics":
        batch = max(batch, 2)
    fn = mixing_map(mixture)
    deps = [d.requires_grad_() for d in scene(seed, batch, size)]
    start, g = torch.zeros_like(deps[1]), incoming(seed, deps[1], rows)
    options = {"solver": eq.Anderson(**TIGHT), **WAYS[way]}
    sol = eq.fixed_point(fn, start, tuple(deps), coupled=declared, **options)
    assert sol.converged.all()
    plain = [d.detach() for d in deps]
    root = joint_root(lambda z: fn(z, *plain), start)
    torch.testing.assert_close(sol.value.detach(), root, rtol=1e-9, atol=1e-10)
    found = torch.autograd.grad((sol.value * g).sum(), deps)
    wanted = joint_gradients(fn, start, plain, g)
    # Unrolled differentiates an iterate that is 1e-12 away; its derivative lags behind.
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm()) <= 1e-6 * (1e-3 + float(b.norm()))


@settings(law, max_examples=15)
@given(seed=st.integers(0, 10**6), mixture=st.sampled_from(sorted(MIXTURES)))
def test_one_step_gradient_is_the_dense_one_at_the_joint_root(seed: int, mixture: str) -> None:
    fn = mixing_map(mixture)
    weight, x = scene(seed, 3, 2)
    w, g = weight.clone().requires_grad_(), incoming(seed, x, "all")
    options = {"solver": eq.Anderson(**TIGHT), "adjoint": eq.OneStep()}
    sol = eq.fixed_point(fn, torch.zeros_like(x), (w, x), **options)
    (found,) = torch.autograd.grad((sol.value * g).sum(), w)
    root, leaf = joint_root(lambda z: fn(z, weight, x), torch.zeros_like(x)), w.detach().clone()
    (wanted,) = torch.autograd.grad(fn(root, leaf.requires_grad_(), x), leaf, g)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@law
@given(seed=st.integers(0, 10**6), declared=st.booleans(), rows=st.sampled_from(["all", "last"]))
def test_conjugate_gradients_on_a_symmetric_joint_jacobian(
    seed: int, declared: bool, rows: str
) -> None:
    weight, x = scene(seed, 4, 3)
    leaf, g = x.clone().requires_grad_(), incoming(seed, x, rows)
    options = {"solver": eq.Anderson(**TIGHT), "adjoint": eq.Implicit(solver=eq.CG(rtol=1e-11))}
    start = torch.zeros_like(x)
    sol = eq.fixed_point(symmetric_map, start, (weight, leaf), coupled=declared, **options)
    (found,) = torch.autograd.grad((sol.value * g).sum(), leaf)
    wanted = joint_gradients(lambda z, x: symmetric_map(z, weight, x), x, [x], g)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)


# ---------------------------------------------------------------------- what is stated


def true_backward_residual(fn: Any, z: Tensor, u: Tensor, g: Tensor) -> float:
    """‖u − g − Jᵀu‖/‖g‖ with the dense joint J."""
    j = jacobian(fn, z).reshape(z.numel(), -1)
    return float((u.flatten() - g.flatten() - j.T @ u.flatten()).norm() / g.norm())


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("name", ["GMRES", "Anderson"])
def test_backward_residual_is_the_true_one_and_a_miss_warns(name: str, declared: bool) -> None:
    """x enters T by a sum inside tanh: u is its gradient divided by tanh'."""
    solver = type(BACKWARD[name])(max_steps=3, rtol=1e-11)
    weight, x = scene(3, 4, 3)
    leaf, g = x.clone().requires_grad_(), incoming(3, x, "all")
    fn = lambda z: mixing_map("mean")(z, weight, torch.zeros_like(z))
    options = {"solver": eq.Anderson(**TIGHT), "adjoint": eq.Implicit(solver=solver)}
    start = torch.zeros_like(x)
    sol = eq.fixed_point(lambda z, x: fn(z) + x, start, (leaf,), coupled=declared, **options)
    with pytest.warns(eq.ConvergenceWarning, match="4 of 4"):
        (u,) = torch.autograd.grad((sol.value * g).sum(), leaf)
    wanted = true_backward_residual(fn, sol.value.detach(), u, g)
    stated = sol.stats.backward.residual
    assert stated is not None
    if declared or name == "GMRES":
        torch.testing.assert_close(stated, torch.full_like(stated, wanted), rtol=1e-6, atol=1e-14)
    else:
        # Three steps do not show that samples are coupled: each has its own residual.
        joint = float((stated * g.norm(dim=1)).norm() / g.norm())
        assert joint == pytest.approx(wanted, rel=1e-6)


def test_stated_residual_of_uncoupled_samples_is_their_own() -> None:
    """Also where the recursion of GMRES believes less: here it stops at rounding."""
    weight, x = scene(5, 3, 4)
    leaf, g = x.clone().requires_grad_(), incoming(5, x, "all")
    sol = eq.fixed_point(lambda z, x: 0.9 * z @ weight + x, torch.zeros_like(x), (leaf,))
    (u,) = torch.autograd.grad((sol.value * g).sum(), leaf)
    true = (u - g - 0.9 * u @ weight.T).norm(dim=1) / g.norm(dim=1)
    torch.testing.assert_close(sol.stats.backward.residual, true, rtol=1e-3, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_linear_solve_states_the_residual_of_what_it_returns(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    matrix = (torch.eye(12) + 0.25 * torch.randn(12, 12)).to(dtype)
    b = torch.randn(5, 12).to(dtype)
    with torch.no_grad():
        sol = eq.linear_solve(lambda v: v @ matrix.T, b)
        exact = b.double() - (sol.value @ matrix.T).double()
    wanted = exact.norm(dim=1) / b.double().norm(dim=1)
    torch.testing.assert_close(sol.stats.relative.double(), wanted, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(sol.stats.residual.double(), exact.norm(dim=1), rtol=1e-3, atol=1e-6)


# ---------------------------------------------------------------------- linear systems


@law
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 4),
    size=st.integers(1, 4),
    symmetric=st.booleans(),
    rows=st.sampled_from(["all", "last"]),
)
def test_linear_solve_with_an_operator_across_the_batch(
    seed: int, batch: int, size: int, symmetric: bool, rows: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = batch * size
    noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
    matrix = 0.6 * noise / torch.linalg.matrix_norm(noise, 2) + torch.eye(n)
    if symmetric:
        matrix = matrix @ matrix.T
    b = incoming(seed, torch.zeros(batch, size, dtype=torch.float64), rows).requires_grad_()
    leaf = matrix.clone().requires_grad_()
    solver = eq.CG() if symmetric else eq.GMRES()
    sol = eq.linear_solve(lambda v: (leaf @ v.flatten()).view_as(v), b, solver=solver)
    assert sol.converged.all()
    right = b.detach().flatten()
    wanted = torch.linalg.solve(matrix, right)
    torch.testing.assert_close(sol.value.detach().flatten(), wanted, rtol=1e-8, atol=1e-8)
    left = float((right - matrix @ sol.value.detach().flatten()).norm())
    stated = sol.stats.residual
    if batch > 1 and len(stated.unique()) == 1:
        assert float(stated[0]) == pytest.approx(left, rel=1e-3, abs=1e-14)
    g = incoming(seed + 1, b.detach(), "all")
    found = torch.autograd.grad((sol.value * g).sum(), (b, leaf))
    u = torch.linalg.solve(matrix.T, g.flatten())
    torch.testing.assert_close(found[0].flatten(), u, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found[1], -torch.outer(u, wanted), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scale", [1e-12, 1e-7, 1e12])
def test_a_linear_operator_of_any_norm_across_the_batch(symmetric: bool, scale: float) -> None:
    """Where A is small beside 1, x is large beside b: its rounding once hid the coupling. And where
    x of one sample is small, its b, which the others make, says nothing of the norm of A."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(12, 12, generator=generator)
    matrix = 0.6 * noise / torch.linalg.matrix_norm(noise, 2) + torch.eye(12)
    matrix = scale * (matrix @ matrix.T if symmetric else matrix)
    x = torch.randn(4, 3, generator=generator) * torch.tensor([[1.0], [30.0], [1e-5], [0.1]])
    b = (matrix @ x.flatten()).view_as(x).requires_grad_()
    leaf = matrix.clone().requires_grad_()
    solver = eq.CG() if symmetric else eq.GMRES()
    sol = eq.linear_solve(lambda v: (leaf @ v.flatten()).view_as(v), b, solver=solver)
    assert sol.converged.all()
    g = torch.randn(4, 3, generator=generator)
    slope_b, slope = torch.autograd.grad((sol.value * g).sum(), (b, leaf))
    dense, right = matrix.double(), b.detach().double().flatten()
    x, u = torch.linalg.solve(dense, right), torch.linalg.solve(dense.T, g.double().flatten())
    found = (sol.value.detach().flatten(), slope_b.flatten(), slope)
    for ours, wanted in zip(found, (x, u, -torch.outer(u, x)), strict=True):
        assert float((ours.double() - wanted).norm()) <= 1e-4 * float(wanted.norm())


# ---------------------------------------------------------------------- transforms, second order


def dense_jacobian(fn: Any, x: Tensor) -> Tensor:
    """dz*/dx of z = fn(z, x), dense: (I − J)⁻¹ ∂T/∂x, [N, N]."""
    z = joint_root(lambda z: fn(z, x), torch.zeros_like(x))
    j, k = jacobian(fn, (z, x))
    n = x.numel()
    return torch.linalg.solve(torch.eye(n).double() - j.reshape(n, n), k.reshape(n, n))


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("name", ["GMRES", "Anderson"])
@pytest.mark.parametrize("mixture", ["batch statistics", "one pair"])
def test_transforms_of_coupled_maps(mixture: str, name: str, declared: bool) -> None:
    weight, x = scene(11, 3, 2)
    fn = mixing_map(mixture)
    wanted = dense_jacobian(lambda z, x: fn(z, weight, x), x)
    options: dict[str, Any] = {
        "solver": eq.Anderson(**TIGHT),
        "adjoint": eq.Implicit(solver=BACKWARD[name]),
        "coupled": declared,
    }

    def solve(x: Tensor) -> Any:
        return eq.fixed_point(lambda z, x: fn(z, weight, x), torch.zeros_like(x), (x,), **options)

    close = {"rtol": 1e-7, "atol": 1e-8}
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        found = transform(lambda x: solve(x).value)(x)
        torch.testing.assert_close(found.reshape(wanted.shape), wanted, **close)
    t = incoming(12, x, "last")
    _, pushed = torch.func.jvp(lambda x: solve(x).value, (x,), (t,))
    torch.testing.assert_close(pushed.flatten(), wanted @ t.flatten(), **close)
    many = torch.stack([x, 0.5 * x, -x])
    values = torch.func.vmap(lambda x: solve(x).value)(many)
    for one, value in zip(many, values, strict=True):
        alone = joint_root(lambda z, one=one: fn(z, weight, one), torch.zeros_like(one))
        torch.testing.assert_close(value, alone, **close)


@pytest.mark.parametrize("mixture", ["batch statistics", "chain"])
@pytest.mark.parametrize("adjoint", [eq.Implicit(solver=eq.GMRES(rtol=1e-12)), eq.Unrolled()])
def test_second_derivatives_of_coupled_maps(adjoint: Any, mixture: str) -> None:
    weight, x = scene(21, 3, 2)
    fn = mixing_map(mixture)
    solver = eq.Anderson(rtol=1e-13, max_steps=200)
    if isinstance(adjoint, eq.Unrolled):
        solver = eq.Picard(rtol=1e-13, max_steps=500)

    def value(x: Tensor) -> Tensor:
        found = eq.fixed_point(fn, torch.zeros_like(x), (weight, x), solver=solver, adjoint=adjoint)
        return found.value

    leaf = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(value, leaf, atol=1e-6, rtol=1e-5, fast_mode=True)
    assert torch.autograd.gradgradcheck(value, leaf, atol=1e-5, rtol=1e-4, fast_mode=True)


# ---------------------------------------------------------------------- how it is solved


def test_declared_and_found_coupling_agree_and_the_batch_ends_as_one() -> None:
    layer, x, _, _ = deep_layer(0.2, 1, solver=eq.Anderson(rtol=1e-10))
    declared = layer.solve(x)
    found = layer.solve(x, coupled=False)
    torch.testing.assert_close(found.value, declared.value, rtol=1e-7, atol=1e-8)
    for sol in (declared, found):
        assert sol.converged.all()
    assert declared.stats.steps.unique().numel() == 1
    assert int(declared.stats.steps.max()) <= int(found.stats.steps.max())


def test_a_sample_that_was_done_is_solved_on_when_its_mates_move() -> None:
    """Sample 0 starts at its answer beside mates that are far from theirs; it follows them."""
    matrix = torch.tensor([0.0, 0.9, 0.95], dtype=torch.float64).view(3, 1)

    def fn(z: Tensor) -> Tensor:
        pull = torch.cat([0.5 * (z[1:2] + z[2:3]), torch.zeros_like(z[1:])])
        return matrix * z + pull + torch.tensor([[0.0], [1.0], [1.0]])

    start = torch.zeros(3, 2, dtype=torch.float64)
    for solver in (eq.Picard(rtol=1e-6, max_steps=2000), eq.Anderson(rtol=1e-6)):
        sol = eq.fixed_point(fn, start, solver=solver)
        assert sol.converged.all()
        wanted = torch.tensor([15.0, 10.0, 20.0]).double().view(3, 1).expand(3, 2)
        torch.testing.assert_close(sol.value, wanted, rtol=1e-4, atol=0)

    with pytest.warns(eq.ConvergenceWarning, match="1 of 3"):  # the one that had passed before
        eq.fixed_point(fn, start, solver=eq.Anderson(rtol=1e-6, max_steps=3))


def test_a_diverged_sample_is_a_constant_to_those_that_read_it() -> None:
    """Fixed steps look for no coupling: sample 0 reads sample 1, whose gradient is zero."""
    w = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    slope = torch.tensor([[1.0], [7.5]], dtype=torch.float64)

    def fn(z: Tensor, w: Tensor) -> Tensor:
        return w * slope * z + torch.cat([1 + 0.3 * torch.sin(z[1:]), torch.ones_like(z[:1])])

    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=12, divergence=100.0)
    sol = eq.fixed_point(fn, torch.zeros(2, 3, dtype=torch.float64), (w,), solver=solver)
    assert sol.result[1] == eq.Result.diverged
    (found,) = torch.autograd.grad(sol.value[0].sum(), w)
    torch.testing.assert_close(found, sol.value[0].detach().sum() / 0.6)  # ∂z/∂w = z/(1 − w)


@pytest.mark.parametrize("seed", range(4))
def test_a_coupling_that_vanishes_at_the_start_is_found(seed: int) -> None:
    """At z = 0 no sample moves another here. Unrolled Anderson was wrong by a factor of 9."""
    torch.manual_seed(seed)
    weight = torch.randn(5, 5, dtype=torch.float64)
    weight = 0.5 * weight / torch.linalg.matrix_norm(weight, 2)
    x, g = torch.randn(2, 4, 5, dtype=torch.float64)

    def fn(z: Tensor, weight: Tensor) -> Tensor:
        t = torch.tanh(z)
        return torch.tanh(z @ weight.T + x) - 0.15 * (t @ t.T) @ t

    start, leaf = torch.zeros_like(x), weight.clone().requires_grad_()
    solver = eq.Anderson(rtol=1e-10)
    sol = eq.fixed_point(lambda z: fn(z, leaf), start, solver=solver, adjoint=eq.Unrolled())
    (found,) = torch.autograd.grad((sol.value * g).sum(), leaf)
    (wanted,) = joint_gradients(fn, start, [weight], g)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_best_iterates_of_coupled_samples_are_of_one_step() -> None:
    """The best iterate of each sample by itself is not the state that any residual belongs to."""
    pull = torch.tensor([[0.3], [-1.2], [0.9]], dtype=torch.float64)
    fn = lambda z: pull * z + torch.tanh(3.0 * z.mean(0)) - 0.5
    start = torch.tensor([[2.0, -1.0], [1.0, 3.0], [-2.0, 0.5]], dtype=torch.float64)
    for steps in (3, 5, 9):
        solver = eq.BestIterate(eq.Picard(rtol=1e-12, max_steps=steps))
        with pytest.warns(eq.ConvergenceWarning):
            sol = eq.fixed_point(fn, start, solver=solver)
        residual = (fn(sol.value) - sol.value).norm(dim=1)
        torch.testing.assert_close(sol.stats.residual, residual)


def test_uncoupled_solves_take_no_further_evaluation() -> None:
    weight, x = scene(0, 6, 4)
    calls = 0

    def fn(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.tanh(z @ weight + x)

    with torch.no_grad():
        sol = eq.fixed_point(fn, torch.zeros_like(x), solver=eq.Picard(max_steps=500))
    assert calls == sol.stats.evaluations == int(sol.stats.steps.max())
    leaf, start, calls = torch.zeros_like(x).requires_grad_(), torch.zeros_like(x), 0
    options = {"solver": eq.Picard(), "adjoint": eq.Unrolled()}
    sol = eq.fixed_point(lambda z: fn(z) + leaf, start, **options)
    assert calls == sol.stats.evaluations == int(sol.stats.steps.max()) + 1


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
def test_fixed_steps_of_a_declared_coupled_map_compile_and_read_nothing() -> None:
    weight, x = scene(4, 4, 3)
    fn, start = mixing_map("mean"), torch.zeros_like(x)
    options = {"solver": eq.Anderson(rtol=0.0, max_steps=4), "adjoint": eq.Unrolled()}

    def solve(x: Tensor) -> Tensor:
        return eq.fixed_point(fn, start, (weight, x), coupled=True, **options).value

    compiled = torch.compile(solve, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), solve(x), rtol=1e-10, atol=1e-12)


def test_trees_and_channels_last_states_are_joined() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 5).double().to(memory_format=torch.channels_last)

    def fn(z: dict[str, Tensor]) -> dict[str, Tensor]:
        a, b = z["a"], z["b"]
        return {
            "a": torch.tanh(0.3 * a + 0.4 * a.mean(0) + x + 0.1 * b.mean()),
            "b": 0.5 * b.flip(0) + a.mean((1, 2, 3)),
        }

    start = {"a": torch.zeros_like(x), "b": torch.zeros(3).double()}
    sol = eq.fixed_point(fn, start, coupled=True)
    again = fn(sol.value)
    assert sol.value["a"].is_contiguous(memory_format=torch.channels_last)
    for name in ("a", "b"):
        torch.testing.assert_close(again[name], sol.value[name], rtol=1e-6, atol=1e-6)
    assert sol.result.shape == sol.stats.steps.shape == (3,)


def test_a_coupled_batch_that_does_not_converge_says_so_for_all() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    fn = lambda z: 0.5 * z + 1.5 * z.mean(0) + x
    for coupled in (False, True):
        with pytest.warns(eq.ConvergenceWarning, match="4 of 4"):
            sol = eq.fixed_point(
                fn, torch.zeros_like(x), coupled=coupled, solver=eq.Picard(max_steps=200)
            )
        assert not sol.converged.any()


@pytest.mark.parametrize("solver", [eq.Broyden, eq.Anderson])
def test_a_residual_that_underflows_is_not_taken_for_coupling(
    solver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the square root of the smallest number the quick norm is zero and the exact one is not:
    a sample passes by the first and not by the second, though no other sample moved it."""
    begun: list[int] = []
    init = solver.init
    monkeypatch.setattr(solver, "init", lambda self, z: begun.append(len(z[0])) or init(self, z))
    torch.manual_seed(0)
    matrix = torch.linalg.qr(torch.randn(20, 20)).Q * 0.95
    size = torch.tensor([1e-24, 1.0]).repeat(4)[:, None]  # beside a coordinate of size 1
    c = torch.cat([torch.ones(8, 1), size * torch.randn(8, 20)], 1)

    def fn(z: Tensor) -> Tensor:
        moving = size * torch.sin(z[:, 1:] @ matrix / size)
        return torch.cat([torch.zeros(8, 1), moving], 1) + c

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        sol = eq.fixed_point(fn, torch.zeros(8, 21), solver=solver(rtol=1e-30, max_steps=60))
    assert begun == [8]
    torch.testing.assert_close(sol.value[:, 0], torch.ones(8))
