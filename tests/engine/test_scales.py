"""Problems of every size: scaling by a power of two changes no digit that matters, and no norm
under- or overflows into convergence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.engine.result import ConvergenceWarning, describe_failures
from equilibria.engine.tree import quick_norm, sample_norm, strange
from equilibria.nn.multi_branch import combine
from tests.contracts.problems import quietly

SOLVERS = [eq.Picard(), eq.Picard(damping=0.7), eq.Anderson(), eq.Anderson(damping=0.5)]
SOLVERS += [eq.Broyden(), eq.ProximalGradient(), eq.Auto(), eq.BestIterate(eq.Anderson())]
ADJOINTS = [eq.Implicit(), eq.Implicit(solver=eq.Anderson()), eq.Implicit(solver=eq.Picard())]
ADJOINTS += [eq.Implicit(solver=eq.CG()), eq.Unrolled()]
RANGES = {torch.float32: (-116, 116), torch.float64: (-1000, 1000), torch.bfloat16: (-110, 116)}
law = settings(max_examples=25, deadline=None)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(n: int, norm: float, seed: int = 0) -> Tensor:
    """Symmetric, so that CG serves the backward pass."""
    a = randn(n, n, seed=seed)
    a = a + a.T
    return norm * a / torch.linalg.matrix_norm(a, 2)


def affine(w: Tensor) -> Any:
    return lambda z, b: z @ w.T + b


# Norms


@given(st.integers(0, 10**6), st.sampled_from(list(RANGES)), st.floats(0, 1))
@law
def test_norms_are_right_at_every_scale(seed: int, dtype: torch.dtype, where: float) -> None:
    low, high = RANGES[dtype]
    size = 2.0 ** round(low + where * (high - low))
    x = (randn(3, 4, 5, seed=seed) * size).to(dtype)
    y = (randn(3, 2, seed=seed + 1) * size).to(dtype)
    for leaves in ([x], [y], [x, y]):
        rows = np.concatenate([t.double().flatten(1).numpy() / size for t in leaves], axis=1)
        exact = np.linalg.norm(rows, axis=1)
        norm = sample_norm(leaves)
        np.testing.assert_allclose(norm.double().numpy() / size, exact, rtol=1e-6)
        if not bool(strange(norm).any()):
            torch.testing.assert_close(quick_norm(leaves), norm, rtol=1e-6, atol=0)


def test_norms_of_zero_and_of_what_is_not_finite() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0], [3.0, 4.0]], dtype=dtype)
        found = sample_norm([x]).tolist()
        assert found[:2] == [0.0, math.inf]
        assert math.isnan(found[2])
        assert found[3] == pytest.approx(5.0)


# Forward


@pytest.mark.parametrize("solver", [eq.Picard(), eq.Anderson(), eq.Broyden()])
@pytest.mark.parametrize("size", [1e-35, 1e-25, 1e-22, 1e19, 1e35])
def test_a_small_or_large_problem_is_solved(solver: eq.Solver, size: float) -> None:
    """z ↦ 0.5z + b has z* = 2b. With b of 1e-25 zero was 'converged', with 1e19 it was 12% off."""
    b = torch.tensor([[size, 2 * size], [1.0, 2.0]])
    found = eq.fixed_point(lambda z, b: 0.5 * z + b, torch.zeros(2, 2), b, solver=solver)
    assert found.converged.all()
    torch.testing.assert_close(found.value / b, torch.full((2, 2), 2.0), rtol=3e-4, atol=0)
    apart = eq.fixed_point(lambda z, b: 0.5 * z + b, torch.zeros(1, 2), b[1:], solver=solver)
    assert torch.equal(apart.value[0], found.value[1])  # its mate's units are not its own


@given(
    st.integers(0, 10**6),
    st.sampled_from(SOLVERS),
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(0, 1),
    st.booleans(),
)
@law
@example(0, eq.Anderson(), torch.float32, 0.375, True)  # differs by one unit in the last place
def test_a_power_of_two_changes_no_digit_that_matters(
    seed: int, solver: eq.Solver, dtype: torch.dtype, where: float, relu: bool
) -> None:
    w, b = matrix(6, 0.8, seed).to(dtype), randn(3, 6, seed=seed).to(dtype)
    low, high = RANGES[dtype]
    size = 2.0 ** round(low + 20 + where * (high - low - 40))  # with room for small residuals
    act = torch.relu if relu else (lambda t: t)
    fn = lambda z, b: act(z @ w.T + b)
    with quietly():  # momentum need not converge on a map with negative slopes
        plain = eq.fixed_point(fn, torch.zeros_like(b), b, solver=solver)
        found = eq.fixed_point(fn, torch.zeros_like(b), size * b, solver=solver)
    assert torch.equal(found.result, plain.result)
    assert torch.equal(found.stats.steps, plain.stats.steps)
    # Equal up to the last digit: Anderson's Gram matrix has a floor so that it can be factored, and
    # squares of a residual of one unit in the last place may come near it.
    last = 4 * torch.finfo(dtype).eps
    norms = plain.value.norm(dim=1, keepdim=True)
    assert ((found.value / size - plain.value).abs() <= last * norms).all()
    torch.testing.assert_close(found.stats.relative, plain.stats.relative, rtol=1e-4, atol=last)


@given(
    st.integers(0, 10**6),
    st.sampled_from(SOLVERS),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(-35, 35),
    st.sampled_from([0.0, 1.0, 1e6]),
)
@law
def test_converged_means_the_tolerance(
    seed: int, solver: eq.Solver, dtype: torch.dtype, power: int, start: float
) -> None:
    """‖z − T(z)‖ ≤ rtol‖T(z)‖ by an evaluation in float64 on the same numbers."""
    if dtype == torch.float16:
        power, start = power // 12, min(start, 1.0)
    size = 10.0 ** (8 * power if dtype == torch.float64 else power)
    w, b = matrix(6, 0.9, seed).to(dtype), (randn(4, 6, seed=seed) * size).to(dtype)
    z0 = (start * randn(4, 6, seed=seed + 1)).to(dtype)
    with quietly():
        found = eq.fixed_point(affine(w), z0, b, solver=solver)
    z = found.value.double()
    image = z @ w.double().T + b.double()
    unit = torch.stack([z, image]).abs().amax((0, 2)).clamp_min(1e-307).unsqueeze(1)
    z, image = (z / unit).numpy(), (image / unit).numpy()
    rtol = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 4e-3}.get(dtype, 2e-2)
    noise = 16 * torch.finfo(dtype).eps
    done = found.converged.numpy()
    left = np.linalg.norm(image - z, axis=1)
    assert (left[done] <= (rtol + noise) * np.linalg.norm(image, axis=1)[done]).all()
    if start == 0.0 and dtype in (torch.float32, torch.float64) and type(solver) is eq.Anderson:
        assert done.all()


@pytest.mark.parametrize("size", [2.0**-100, 2.0**100])
@pytest.mark.parametrize("compact", [False, True])
def test_units_travel_with_absolute_tolerances_callbacks_and_compaction(
    size: float, compact: bool
) -> None:
    w, b = matrix(5, 0.9).float(), randn(6, 5).float() * torch.logspace(-1, 1, 6).unsqueeze(1)
    seen: dict[float, list[tuple[int, Tensor]]] = {}
    for unit in (1.0, size):
        rows = seen.setdefault(unit, [])
        solver = eq.Anderson(rtol=0.0, atol=1e-4 * unit, compact=compact, block=1)
        found = eq.fixed_point(
            affine(w),
            torch.zeros_like(b),
            unit * b,
            solver=solver,
            callback=lambda step, z, r, unit=unit, rows=rows: rows.append((step, r / unit)),
        )
        assert found.converged.all()
        assert (found.stats.residual <= 1e-4 * unit).all()
    assert [step for step, _ in seen[size]] == [step for step, _ in seen[1.0]]
    for (_, ours), (_, theirs) in zip(seen[size], seen[1.0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("solver", [eq.Anderson, eq.Picard])
@pytest.mark.parametrize("size", [2.0**-100, 2.0**100])
def test_fixed_steps_at_any_scale(solver: type[eq.Solver], size: float) -> None:
    made = solver(rtol=0.0, atol=0.0, max_steps=12)
    w, b = matrix(6, 0.8).float(), randn(3, 6).float()
    plain = eq.fixed_point(affine(w), torch.zeros_like(b), b, solver=made)
    found = eq.fixed_point(affine(w), torch.zeros_like(b), size * b, solver=made)
    torch.testing.assert_close(found.value / size, plain.value, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.result, plain.result)


# Backward


@given(
    st.integers(0, 10**6),
    st.sampled_from(ADJOINTS),
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(0, 1),
)
@law
def test_gradients_of_every_size(
    seed: int, adjoint: eq.Adjoint, dtype: torch.dtype, where: float
) -> None:
    """z = Wz + b has dL/db = (I − Wᵀ)⁻¹g, by dense algebra in float64."""
    w, b = matrix(6, 0.8, seed).to(dtype), randn(3, 6, seed=seed).to(dtype).requires_grad_()
    low, high = RANGES[dtype]
    size = 2.0 ** round(low + 20 + where * (high - low - 40))
    g = randn(3, 6, seed=seed + 1)
    solver = eq.Picard(rtol=1e-6, max_steps=400)
    found = eq.fixed_point(
        affine(w), torch.zeros(3, 6, dtype=dtype), b, solver=solver, adjoint=adjoint
    )
    (gradient,) = torch.autograd.grad(found.value, b, (size * g).to(dtype))
    exact = torch.linalg.solve(torch.eye(6).double() - w.double().T, g.T).T
    miss = torch.linalg.vector_norm(gradient.double() / size - exact, dim=1)
    assert (miss <= 2e-3 * torch.linalg.vector_norm(exact, dim=1)).all()


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1.0, 1e25])
@pytest.mark.parametrize("solver", [eq.PeacemanRachford(), eq.ForwardBackward()])
def test_gradients_of_a_monotone_layer_of_every_size(solver: eq.Solver, size: float) -> None:
    """They were 17% off near 1e-22."""
    torch.manual_seed(0)
    layer = eq.nn.MonotoneDEQ(8, in_channels=4, solver=solver)
    x, g = torch.randn(5, 4), torch.randn(5, 8)
    (exact,) = torch.autograd.grad(layer(x), layer.U.weight, g)
    (found,) = torch.autograd.grad(layer(x), layer.U.weight, size * g)
    torch.testing.assert_close(found / size, exact, rtol=1e-4, atol=1e-5)


# Results


def test_leaves_are_held_to_their_own_precision() -> None:
    """A bfloat16 leaf beside it used to give a float64 leaf the tolerance of 2e-2."""
    fn = lambda z: (0.9 * z[0] + 1.0, (0.5 * z[1].float() + 0.5).to(z[1].dtype))
    z0 = (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.bfloat16))
    found = eq.fixed_point(fn, z0, solver=eq.Picard(max_steps=1000))
    assert found.converged.all()
    torch.testing.assert_close(found.value[0], torch.full_like(z0[0], 10.0), rtol=1e-6, atol=0)
    loose = eq.fixed_point(fn, z0, solver=eq.Picard(rtol=1e-2, max_steps=1000))
    assert loose.stats.steps.max() < found.stats.steps.min()


def test_gradients_of_leaves_have_their_own_precision() -> None:
    """Beside a bfloat16 leaf linear systems of a float64 leaf were solved to 2e-2."""
    torch.manual_seed(0)
    matrix = torch.randn(5, 5, dtype=torch.float64)
    matrix = torch.eye(5) - 0.9 * matrix / torch.linalg.matrix_norm(matrix, 2)
    b = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    half = torch.ones(3, 2, dtype=torch.bfloat16)
    exact = torch.linalg.solve(matrix, b.detach().T).T
    for solver in (eq.GMRES(), eq.CG()):
        a = matrix if isinstance(solver, eq.GMRES) else matrix @ matrix.T
        wanted = torch.linalg.solve(a, b.detach().T).T
        fn = lambda v, a=a: (v[0] @ a.T, 2 * v[1])
        found = eq.linear_solve(fn, (b, half), solver=solver)
        torch.testing.assert_close(found.value[0], wanted, rtol=1e-6, atol=1e-8)
    layer = lambda z, b: (z[0] - z[0] @ matrix.T + b, 0.5 * z[1])
    found = eq.fixed_point(layer, (torch.zeros_like(exact), half), (b,))
    (grad,) = torch.autograd.grad(found.value[0].sum(), b)
    wanted = torch.linalg.solve(matrix.T, torch.ones(5, 1, dtype=torch.float64)).T.expand(3, 5)
    torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_norms_over_a_coupled_batch_and_over_branches(size: float) -> None:
    """Stated as 0 or infinite where their squares under- or overflow."""
    torch.manual_seed(0)
    matrix = torch.eye(4) + 0.2 * torch.randn(4, 4)
    b = size * torch.randn(4, 3)
    with pytest.warns(ConvergenceWarning):
        found = eq.linear_solve(lambda v: matrix @ v, b, solver=eq.GMRES(max_steps=2))
    exact = (b.double() - matrix.double() @ found.value.double()).norm()
    torch.testing.assert_close(found.stats.residual.double(), exact.expand(4), rtol=1e-2, atol=0)
    x = b.clone().requires_grad_()
    adjoint = eq.Implicit(solver=eq.Picard(rtol=0.0, max_steps=3))
    fn = lambda z, x: 0.2 * matrix @ z + x
    sol = eq.fixed_point(fn, torch.zeros_like(b), (x,), adjoint=adjoint, coupled=True)
    with pytest.warns(ConvergenceWarning):
        (sol.value * b).sum().backward()
    residual = sol.stats.backward.residual
    assert ((residual > 1e-6) & (residual < 1.0)).all()
    parts = [eq.fixed_point(lambda z: 0.5 * z + b, torch.zeros_like(b)) for _ in range(2)]
    both, one = combine(parts).stats.residual.double(), parts[0].stats.residual.double()
    torch.testing.assert_close(both, math.sqrt(2.0) * one)


def test_an_answer_is_not_the_memory_of_its_start() -> None:
    z0 = torch.full((2, 3), 2.0)
    for adjoint in (eq.Implicit(), eq.Phantom(), eq.Unrolled()):
        for start in (z0, torch.full((2, 3), math.nan)):
            with quietly():
                found = eq.fixed_point(lambda z: 0.5 * z + 1.0, start, adjoint=adjoint)
            assert found.value.data_ptr() != start.data_ptr()
    with torch.no_grad():
        assert eq.fixed_point(lambda z: 0.5 * z + 1.0, z0).value.data_ptr() != z0.data_ptr()


def test_advice_names_nothing_that_is_in_use() -> None:
    ended = dict.fromkeys(eq.Result, 1)
    told = describe_failures(ended, options=eq.Anderson(), dtype=torch.float64) or ""
    assert "use Anderson" not in told
    assert "float64" not in told
    told = describe_failures(ended, options=eq.Picard(damping=0.5), dtype=torch.float32) or ""
    assert "use Anderson" in told
    assert "use float64" in told
    assert "damp the solver" not in told
    assert "lower damping" in told
    with pytest.warns(ConvergenceWarning, match="raise max_steps or loosen rtol"):
        eq.fixed_point(lambda z: 0.99 * z + 1, torch.zeros(1, 2), solver=eq.Broyden(max_steps=2))


@pytest.mark.parametrize("wrap", [lambda solver: solver, eq.BestIterate])
def test_a_slow_proximal_gradient_is_not_called_stagnated(wrap: Any) -> None:
    """min ½ zᵀAz − bᵀz with condition 1e5: ISTA gains less than 1% in 48 steps, but always."""
    curvature = torch.logspace(-5, 0, 6, dtype=torch.float64)
    step = lambda z: z - (curvature * z - 1e-5)
    solver = wrap(eq.ProximalGradient(accelerate=False, max_steps=3000))
    with pytest.warns(ConvergenceWarning):
        found = eq.fixed_point(step, torch.zeros(1, 6, dtype=torch.float64), solver=solver)
    assert found.result.tolist() == [int(eq.Result.max_steps)]
    swinging = lambda z: torch.where(z > 1.0, z - 0.5, z + 0.5)  # no fall at all is still seen
    with pytest.warns(ConvergenceWarning):
        found = eq.fixed_point(swinging, torch.full((1, 2), 0.75), solver=solver)
    assert found.result.tolist() == [int(eq.Result.stagnated)]


def test_a_norm_beyond_the_dtype_never_passes() -> None:
    """Entries of 3e38 fit float32 and their norm does not: rtol·∞ would admit any residual."""
    target = torch.tensor([[3e38] * 4, [1.0] * 4])
    with pytest.warns(ConvergenceWarning, match="1 of 2"):
        sol = eq.fixed_point(
            lambda z: target + 0 * z, torch.zeros(2, 4), solver=eq.Picard(damping=0.5)
        )
    assert sol.converged.tolist() == [False, True]
