"""GMRES, CG and ``linear_solve`` against numpy's dense solves, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria import CG, GMRES, ConvergenceWarning, NotConvergedError, Result
from equilibria.engine.krylov import LinearSolver
from tests.contracts import problems
from tests.contracts.problems import norm, quietly, randn

law = settings(max_examples=10, deadline=None, derandomize=True)
RTOL = 1e-10  # the default in float64


def times(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """x ↦ A x, a matrix a sample."""
    return lambda x: (matrix @ x.unsqueeze(-1)).squeeze(-1)


def dense(matrix: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(np.linalg.solve(matrix.numpy(), b.numpy()[..., None])[..., 0])


def positive(batch: int, size: int, seed: int, least: float = 0.1) -> Tensor:
    """Symmetric, eigenvalues from ``least`` to 1."""
    values = torch.linspace(least, 1.0, size, dtype=torch.float64).expand(batch, size)
    q = problems.orthogonal(batch, size, seed)
    return q * values.unsqueeze(1) @ q.mT


def assert_solved(matrix: Tensor, b: Tensor, found: Any, rtol: float = RTOL) -> None:
    """Converged, ‖b − Ax‖ ≤ rtol‖b‖, and so ‖x − x*‖ ≤ ‖A⁻¹‖ rtol ‖b‖."""
    assert found.result.tolist() == [Result.converged] * len(b)
    inverse = 1 / torch.linalg.svdvals(matrix)[:, -1]
    largest = torch.linalg.svdvals(matrix)[:, 0]
    # The recursion's residual drifts from the true one by rounding of the iterates' size.
    drift = 1e-13 * (1 + largest * inverse)
    residual = norm(b - times(matrix)(found.value))
    assert (residual <= (rtol * 1.01 + drift) * norm(b)).all()
    assert (norm(found.value - dense(matrix, b)) <= inverse * (rtol * 1.01 + drift) * norm(b)).all()


SOLVERS = [GMRES(), CG()]
both = pytest.mark.parametrize("solver", SOLVERS, ids=["GMRES", "CG"])

# ---------------------------------------------------------------------- answers


@law
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4), size=st.integers(1, 12))
def test_gmres_on_nonsymmetric_systems(seed: int, batch: int, size: int) -> None:
    matrix = torch.eye(size).double() - problems.linear(batch, size, 0.9, seed).args[0]
    b = randn(batch, size, seed=seed + 7)
    found = eq.linear_solve(times(matrix), b)
    assert_solved(matrix, b, found)
    assert int(found.stats.steps.max()) <= size


@law
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4), size=st.integers(1, 12))
def test_cg_on_positive_systems(seed: int, batch: int, size: int) -> None:
    matrix, b = positive(batch, size, seed), randn(batch, size, seed=seed + 7)
    found = eq.linear_solve(times(matrix), b, solver=CG())
    assert_solved(matrix, b, found)
    assert int(found.stats.steps.max()) <= size + 2  # n in exact arithmetic


@pytest.mark.parametrize("restart", [1, 2, 5])
def test_gmres_restarted_on_definite_systems(restart: int) -> None:
    """A positive definite symmetric part: every restart length converges."""
    matrix = positive(3, 10, 0, 0.3) + 0.2 * (
        randn(3, 10, 10, seed=1) - randn(3, 10, 10, seed=1).mT
    )
    b = randn(3, 10, seed=2)
    found = eq.linear_solve(times(matrix), b, solver=GMRES(restart=restart, max_steps=2000))
    assert_solved(matrix, b, found)
    assert int(found.stats.steps.max()) > restart


def test_linear_solve_meets_its_tolerance_on_systems_of_some_size() -> None:
    """A random rotation, and a Laplacian of 30 points: a restart after 20 products loses them."""
    rotation = torch.linalg.qr(randn(30, 30, seed=1))[0]
    line = torch.diff(torch.eye(30).double(), dim=0)
    for matrix in (rotation, line.mT @ line + 0.01 * torch.eye(30)):
        b = randn(1, 30, seed=2).requires_grad_()
        found = eq.linear_solve(times(matrix[None]), b)
        assert_solved(matrix[None], b.detach(), found)
        (slope,) = torch.autograd.grad(found.value.sum(), b)
        wanted = torch.linalg.solve(matrix.mT, torch.ones(1, 30, 1).double()).squeeze(-1)
        torch.testing.assert_close(slope, wanted, rtol=1e-6, atol=1e-6)


def test_gmres_on_the_shift_needs_the_whole_space() -> None:
    """The cyclic shift makes no progress for n − 1 steps, and none at all if restarted before."""
    n = 8
    matrix = torch.roll(torch.eye(n).double(), 1, 0).expand(2, n, n)
    b = torch.zeros(2, n).double()
    b[:, 0] = torch.tensor([1.0, -3.0])
    found = eq.linear_solve(times(matrix), b)
    assert_solved(matrix, b, found)
    assert found.stats.steps.tolist() == [n, n]
    with pytest.warns(ConvergenceWarning, match="2 of 2 samples max_steps"):
        stuck = eq.linear_solve(times(matrix), b, solver=GMRES(restart=4, max_steps=40))
    np.testing.assert_allclose(stuck.stats.relative, 1.0, rtol=1e-12)


@pytest.mark.parametrize("gap", [1e-4, 1e-7])
def test_nearly_singular_systems(gap: float) -> None:
    matrix = torch.eye(8).double() - problems.nearly_singular(gap=gap).args[0]
    b = randn(3, 8, seed=0)
    for solver in SOLVERS:
        found = eq.linear_solve(times(matrix), b, solver=solver)
        assert_solved(matrix, b, found)


@pytest.mark.parametrize("symmetric", [True, False])
def test_ill_conditioned_system_needs_an_orthogonal_basis(symmetric: bool) -> None:
    """Singular values 1e-6 … 1: a basis orthogonalized once, or wrongly, never gets there."""
    n = 30
    values = torch.logspace(-6, 0, n, dtype=torch.float64)
    left = problems.orthogonal(2, n, 0)
    right = left if symmetric else problems.orthogonal(2, n, 1)
    matrix = left * values @ right.mT
    b = times(matrix)(randn(2, n, seed=3))
    found = eq.linear_solve(times(matrix), b, solver=GMRES(restart=60))
    assert found.converged.all()
    assert int(found.stats.steps.max()) <= n
    assert (norm(b - times(matrix)(found.value)) <= 1.01 * RTOL * norm(b)).all()


def test_far_from_normal_system_is_solved_or_reported() -> None:
    """A Jordan-like block with eigenvalues 1e-10 … 1: what is called converged must be."""
    n = 20
    values = torch.logspace(-10, 0, n, dtype=torch.float64)
    matrix = (torch.diag(values) + torch.diag(torch.ones(n - 1).double(), 1))[None]
    b = times(matrix)(randn(1, n, seed=3))
    with quietly():
        found = eq.linear_solve(times(matrix), b, solver=GMRES(restart=60))
    residual = norm(b - times(matrix)(found.value)) / norm(b)
    assert bool(found.converged[0]) == (float(residual[0]) <= 1.01 * RTOL)
    assert float(found.stats.relative[0]) >= 0.5 * float(residual[0]) - 1e-13


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("solver", [GMRES(), GMRES(restart=3)])
def test_singular_inconsistent_system_is_never_called_converged(
    rotated: bool, solver: GMRES
) -> None:
    """b has a part outside the range of A: no x exists; the best residual is that part."""
    values = torch.tensor([1.0, 2, 3, 4, 5, 0]).double()
    q = problems.orthogonal(3, 6, 0) if rotated else torch.eye(6).double().expand(3, 6, 6)
    matrix = q * values @ q.mT
    b = randn(3, 6, seed=1)
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        found = eq.linear_solve(times(matrix), b, solver=solver)
    assert not found.converged.any()
    assert torch.isfinite(found.value).all()
    outside = (q[:, :, -1] * b).sum(1).abs() / norm(b)
    assert (found.stats.relative >= 0.9 * outside).all()
    residual = norm(b - times(matrix)(found.value)) / norm(b)
    np.testing.assert_allclose(found.stats.relative, residual, rtol=1e-3)


def test_singular_consistent_system_is_solved() -> None:
    q = problems.orthogonal(3, 6, 0)
    values = torch.tensor([1.0, 2, 3, 4, 5, 0]).double()
    matrix = q * values @ q.mT
    b = times(matrix)(randn(3, 6, seed=1))
    for solver in SOLVERS:
        found = eq.linear_solve(times(matrix), b, solver=solver)
        assert found.converged.all()
        # b itself is in the range only to rounding: allow that beside rtol.
        assert (norm(b - times(matrix)(found.value)) <= 2 * RTOL * norm(b)).all()
        assert (norm(found.value) <= 10 * norm(b)).all()


def test_hard_breakdown_is_reported() -> None:
    """A = [[0, 1], [0, 0]], b = e₂: A e₂ = e₁, A e₁ = 0; the space is full and holds no answer."""
    matrix = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]).double()
    with pytest.warns(ConvergenceWarning):
        found = eq.linear_solve(times(matrix), torch.tensor([[0.0, 1.0]]).double())
    assert not found.converged.any()
    assert torch.isfinite(found.value).all()
    np.testing.assert_allclose(found.stats.relative, 1.0)


@both
def test_lucky_breakdown(solver: LinearSolver) -> None:
    """b is an eigenvector, a sum of two, or generic: 1, 2 and n steps in one batch."""
    matrix = positive(3, 5, 0)
    vectors = torch.linalg.eigh(matrix).eigenvectors
    b = torch.stack([vectors[0, :, 1], vectors[1, :, 1] + vectors[1, :, 4], randn(5, seed=1)])
    found = eq.linear_solve(times(matrix), b, solver=solver)
    assert_solved(matrix, b, found)
    assert found.stats.steps.tolist()[:2] == [1, 2]
    assert int(found.stats.steps[2]) >= 4


@both
def test_zero_right_hand_side_has_the_zero_answer(solver: LinearSolver) -> None:
    matrix = positive(3, 4, 0)
    b = randn(3, 4, seed=1)
    b[1] = 0
    found = eq.linear_solve(times(matrix), b, solver=solver)
    assert found.converged.all()
    assert found.value[1].tolist() == [0.0] * 4
    assert float(found.stats.relative[1]) == 0.0
    assert int(found.stats.steps[1]) == 0
    everywhere = eq.linear_solve(times(matrix), torch.zeros(3, 4).double(), solver=solver)
    assert everywhere.value.abs().sum() == 0
    assert everywhere.converged.all()


# ---------------------------------------------------------------------- per sample


@both
@law
@given(seed=st.integers(0, 10**6))
def test_batch_mates_do_not_matter(solver: LinearSolver, seed: int) -> None:
    scales = torch.tensor([1.0, 0.5, 0.1, 0.01]).double()[:, None, None]
    matrix = torch.eye(7).double() - (1 - scales) * positive(4, 7, seed, 0.0)
    b = randn(4, 7, seed=seed + 1)
    together = eq.linear_solve(times(matrix), b, solver=solver)
    assert_solved(matrix, b, together)
    for i in range(4):
        alone = eq.linear_solve(times(matrix[[i]]), b[[i]], solver=solver)
        assert int(alone.stats.steps) == int(together.stats.steps[i])
        torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-9, atol=1e-11)


@both
def test_finished_sample_is_frozen(solver: LinearSolver) -> None:
    """At a loose tolerance: it gains nothing from the steps that its mate still takes."""
    matrix, b = positive(2, 15, 0, 1e-3), randn(2, 15, seed=1)
    matrix[0] = positive(1, 15, 3, 0.3)[0]
    made = type(solver)(rtol=1e-2)
    alone = eq.linear_solve(times(matrix[:1]), b[:1], solver=made)
    together = eq.linear_solve(times(matrix), b, solver=made)
    assert int(alone.stats.steps[0]) == int(together.stats.steps[0]) < int(together.stats.steps[1])
    assert float(alone.stats.relative[0]) > 1e-4  # there was something to gain
    torch.testing.assert_close(together.value[:1], alone.value, rtol=1e-11, atol=1e-12)


@both
@pytest.mark.parametrize("exponent", [-27, 27])
def test_power_of_two_scale_changes_no_bit(solver: LinearSolver, exponent: int) -> None:
    matrix = positive(3, 6, 0)
    for dtype in (torch.float32, torch.float64):
        a, b = matrix.to(dtype), randn(3, 6, seed=0).to(dtype)
        one = eq.linear_solve(times(a), b, solver=solver)
        other = eq.linear_solve(times(a), b * 2.0**exponent, solver=solver)
        assert torch.equal(other.value, one.value * 2.0**exponent)
        assert torch.equal(other.stats.steps, one.stats.steps)
        assert torch.equal(other.stats.relative, one.stats.relative)


@both
@pytest.mark.parametrize("where", ["matrix", "b"])
def test_nan_sample_is_contained(solver: LinearSolver, where: str) -> None:
    matrix, b = positive(3, 5, 0), randn(3, 5, seed=1)
    mates = [0, 2]
    expected = eq.linear_solve(times(matrix[mates]), b[mates], solver=solver)
    (matrix if where == "matrix" else b)[1] = float("nan")
    with pytest.warns(ConvergenceWarning, match="1 of 3 samples"):
        found = eq.linear_solve(times(matrix), b, solver=solver)
    assert found.converged.tolist() == [True, False, True]
    torch.testing.assert_close(found.value[mates], expected.value, rtol=1e-12, atol=1e-13)
    assert found.stats.steps[mates].tolist() == expected.stats.steps.tolist()


@both
def test_finished_sample_survives_the_restarts_of_its_mate(solver: LinearSolver) -> None:
    """A = 0.3·I (exact after one step, residual zero) beside one that takes long."""
    matrix, b = positive(2, 12, 0, 1e-2), randn(2, 12, seed=1)
    matrix[0] = 0.3 * torch.eye(12)
    made = GMRES(restart=4, max_steps=4000) if isinstance(solver, GMRES) else solver
    found = eq.linear_solve(times(matrix), b, solver=made)
    assert_solved(matrix, b, found)
    assert int(found.stats.steps[0]) == 1
    alone = eq.linear_solve(times(matrix[:1]), b[:1], solver=made)
    torch.testing.assert_close(found.value[0], alone.value[0], rtol=1e-13, atol=1e-14)


def test_cg_on_an_indefinite_sample_says_so() -> None:
    matrix = positive(3, 5, 0)
    matrix[1] = -matrix[1]
    b = randn(3, 5, seed=1)
    with pytest.warns(ConvergenceWarning, match="1 of 3 samples"):
        found = eq.linear_solve(times(matrix), b, solver=CG())
    assert found.converged.tolist() == [True, False, True]
    assert torch.isfinite(found.value).all()
    # GMRES minds no signs.
    assert_solved(matrix, b, eq.linear_solve(times(matrix), b))


@both
def test_step_limit_is_reported_with_the_true_residual(solver: LinearSolver) -> None:
    matrix, b = positive(3, 20, 0, 1e-3), randn(3, 20, seed=1)
    cut = type(solver)(max_steps=6)
    said = r"linear_solve did not .* 3 of 3 samples max_steps"
    with pytest.warns(ConvergenceWarning, match=said) as caught:
        found = eq.linear_solve(times(matrix), b, solver=cut)
    assert caught[0].filename == __file__
    assert found.stats.steps.tolist() == [6] * 3
    residual = norm(b - times(matrix)(found.value))
    np.testing.assert_allclose(found.stats.residual, residual, rtol=1e-9)
    np.testing.assert_allclose(found.stats.relative, residual / norm(b), rtol=1e-9)
    with pytest.raises(NotConvergedError, match=r"linear_solve .* max_steps") as raised:
        eq.linear_solve(times(matrix), b, solver=cut, throw=True)
    assert torch.equal(raised.value.solution.value, found.value)


def test_gmres_minimizes_the_residual_over_the_krylov_space() -> None:
    """After k steps: no better x in span{b, Ab, …}; by numpy's least squares."""
    matrix = torch.eye(10).double() - problems.linear(2, 10, 0.9).args[0]
    b = randn(2, 10, seed=3)
    for k in (1, 3, 5):
        with pytest.warns(ConvergenceWarning):
            found = eq.linear_solve(times(matrix), b, solver=GMRES(max_steps=k))
        for i in range(2):
            a, right = matrix[i].numpy(), b[i].numpy()
            space = np.stack([np.linalg.matrix_power(a, j) @ right for j in range(k)], 1)
            best = np.linalg.norm(right - a @ space @ np.linalg.lstsq(a @ space, right)[0])
            np.testing.assert_allclose(found.stats.residual[i], best, rtol=1e-8)


# ---------------------------------------------------------------------- starts, blocks, counts


@both
def test_start_at_the_answer(solver: LinearSolver) -> None:
    matrix, b = positive(3, 6, 0), randn(3, 6, seed=1)
    answer = dense(matrix, b)
    found = eq.linear_solve(times(matrix), b, x0=answer, solver=solver)
    assert found.stats.steps.tolist() == [0] * 3
    assert torch.equal(found.value, answer)


@both
def test_start_elsewhere_gives_the_same_answer(solver: LinearSolver) -> None:
    matrix, b = positive(3, 6, 0), randn(3, 6, seed=1)
    for x0 in (randn(3, 6, seed=2), dense(matrix, b) * (1 + 1e-6)):
        kept = x0.clone()
        assert_solved(matrix, b, eq.linear_solve(times(matrix), b, x0=x0, solver=solver))
        assert torch.equal(x0, kept)
    b[1] = 0.0  # no steps from x0 would leave a residual of 0
    assert_solved(matrix, b, eq.linear_solve(times(matrix), b, x0=x0, solver=solver))


@both
@pytest.mark.parametrize("x0", [torch.zeros(3, 5), torch.zeros(2, 6), torch.zeros(1, 6)])
def test_start_of_another_shape_is_refused(solver: LinearSolver, x0: Tensor) -> None:
    matrix, b = positive(3, 6, 0), randn(3, 6, seed=1)
    with pytest.raises(ValueError, match="x0"):
        eq.linear_solve(times(matrix), b, x0=x0.double(), solver=solver)
    with pytest.raises(ValueError, match="x0"):
        eq.linear_solve(times(matrix), b, x0=(b, b), solver=solver)


@both
@pytest.mark.parametrize("block", [1, 3, 8])
def test_host_reads_are_counted_and_bounded(solver: LinearSolver, block: int) -> None:
    matrix, b = positive(3, 20, 0, 0.05), randn(3, 20, seed=1)
    made = type(solver)(block=block)
    right, product = [b], times(matrix)
    with problems.HostReads() as reads, torch.no_grad():
        found = made.solve(lambda v: [product(v[0])], right)
    steps = int(found.steps.max())
    assert reads.count == found.syncs
    assert found.syncs <= steps // block + 3  # one reads the residual
    assert found.result.tolist() == [0] * 3


@both
def test_products_are_counted(solver: LinearSolver) -> None:
    matrix, b = positive(3, 12, 0, 0.01), randn(3, 12, seed=1)
    calls = 0

    def product(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return times(matrix)(x)

    with torch.no_grad():
        found = eq.linear_solve(product, b, solver=solver)
    assert found.stats.evaluations == calls
    assert calls <= int(found.stats.steps.max()) + 3
    calls = 0
    restarts = {"restart": 3} if isinstance(solver, GMRES) else {}  # they count too
    limited = type(solver)(max_steps=7, rtol=1e-14, **restarts)
    with torch.no_grad(), pytest.warns(ConvergenceWarning):
        eq.linear_solve(product, b, solver=limited)
    assert calls <= 7 + 2  # "products with A, at most", the residual, and why it is too large


# ---------------------------------------------------------------------- states


@both
@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "nested"])
def test_trees(solver: LinearSolver, kind: str) -> None:
    matrix, b = positive(4, 8, 0), randn(4, 8, seed=1)
    flat = problems.replace(problems.linear(4, 8), fn=lambda x, m: times(m)(x), args=(matrix,))
    tree = problems.trees(problems.replace(flat, z0=b, answer=dense(matrix, b)))[kind]
    found = eq.linear_solve(lambda x: tree.fn(x, matrix), tree.z0, solver=solver)
    straight = eq.linear_solve(times(matrix), b, solver=solver)
    assert found.stats.steps.tolist() == straight.stats.steps.tolist()
    assert (tree.error(found.value) <= 11 * RTOL * norm(b)).all()  # ‖A⁻¹‖ = 10


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision(solver: LinearSolver, dtype: torch.dtype) -> None:
    matrix, b = positive(3, 8, 0, 0.5).to(dtype), randn(3, 8, seed=1).to(dtype)
    found = eq.linear_solve(times(matrix), b, solver=solver)
    assert found.value.dtype == dtype
    assert found.stats.relative.dtype == torch.float32
    assert found.converged.all()
    exact = dense(matrix.double(), b.double())
    rtol = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
    # ‖A⁻¹‖ = 2; rounding of the answer and of eight-term products beside the tolerance.
    allowed = 2 * (rtol + 8 * torch.finfo(dtype).eps) * norm(b)
    assert (norm(found.value.double() - exact) <= allowed).all()


def test_channels_last_right_hand_side() -> None:
    problem = problems.convolution()
    b = problem.args[0]
    found = eq.linear_solve(lambda x: x - problem.fn(x, torch.zeros_like(b)), b)
    assert found.value.is_contiguous(memory_format=torch.channels_last)
    assert (problem.error(found.value) <= problem.gain * RTOL * 1.01 * norm(b)).all()


# ---------------------------------------------------------------------- gradients


@both
def test_gradients_to_b_and_the_captured_matrix(solver: LinearSolver) -> None:
    b = randn(2, 3, seed=1).requires_grad_()
    free = (0.3 * randn(3, 3, seed=0)).requires_grad_()

    def answer(b: Tensor, free: Tensor) -> Tensor:
        matrix = free @ free.mT + torch.eye(3).double()  # an intermediate that the closure holds
        return eq.linear_solve(lambda x: x @ matrix, b, solver=type(solver)(rtol=1e-13)).value

    assert torch.autograd.gradcheck(answer, (b, free), fast_mode=True)
    assert torch.autograd.gradgradcheck(answer, (b, free), fast_mode=True)


def test_gradients_of_a_nonsymmetric_system() -> None:
    """The backward system is the transposed one: a symmetric test would not see it."""
    b = randn(2, 4, seed=1).requires_grad_()
    matrix = (torch.eye(4).double() + 0.4 * randn(4, 4, seed=0)).requires_grad_()
    expected = torch.linalg.solve(matrix, b.unsqueeze(-1)).squeeze(-1)
    weights = randn(2, 4, seed=5)
    solution = eq.linear_solve(lambda x: x @ matrix.T, b, solver=GMRES(rtol=1e-13))
    ours = torch.autograd.grad((solution.value * weights).sum(), (b, matrix))
    assert solution.stats.backward.solves == 1
    dense = torch.autograd.grad((expected * weights).sum(), (b, matrix))
    for left, right in zip(ours, dense, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


@both
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e25])
@pytest.mark.parametrize("nonzero", [1.0, 0.0])
def test_the_size_of_the_matrix_does_not_matter(
    solver: LinearSolver, size: float, nonzero: float
) -> None:
    """Of x + b − Ax rounding leaves little of a small A. Where b = 0, x says nothing of it."""
    sizes = torch.tensor([[size], [size ** (5 / 6)], [size]], dtype=torch.float64)
    matrix, weights = positive(3, 5, 0), randn(3, 5, seed=1).float()
    matrix.requires_grad_()
    b = randn(3, 5, seed=2) * torch.tensor([[1.0], [0.0], [1.0]]) * nonzero
    b = b.float().requires_grad_()
    expected = torch.linalg.solve(matrix, b.double().unsqueeze(-1)).squeeze(-1)
    wanted = torch.autograd.grad((expected * weights).sum(), (b, matrix))
    held = (sizes.unsqueeze(-1) * matrix.detach()).float().requires_grad_()
    found = eq.linear_solve(times(held), b, solver=solver)
    assert found.converged.all()
    torch.testing.assert_close((sizes * found.value.double()), expected, rtol=0, atol=1e-3)
    slope_b, slope = torch.autograd.grad((sizes * found.value * weights).sum(), (b, held))
    torch.testing.assert_close(slope_b, wanted[0], rtol=0, atol=1e-3)
    slope = sizes.unsqueeze(-1) * slope.double()
    torch.testing.assert_close(slope, wanted[1], rtol=0, atol=1e-2)


# ---------------------------------------------------------------------- options and bad input


def test_solver_must_be_a_linear_one() -> None:
    for wrong in (eq.Anderson(), "gmres", GMRES):
        with pytest.raises(TypeError, match=r"solver must be GMRES\(\.\.\.\) or CG\(\.\.\.\)"):
            eq.linear_solve(lambda x: x, torch.ones(1, 2), solver=wrong)


def test_absolute_tolerance() -> None:
    matrix, b = positive(3, 40, 0, 0.1), randn(3, 40, seed=0)
    for solver in (GMRES(rtol=0.0, atol=1e-3), CG(rtol=0.0, atol=1e-3)):
        found = eq.linear_solve(times(matrix), b, solver=solver)
        assert found.converged.all()
        residual = norm(b - times(matrix)(found.value))
        assert (residual <= 1.01e-3).all()
        assert (residual > 1e-9).all()  # it stopped by the tolerance, not by chance


@both
@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((s, torch.float32) for s in (3e-23, 1e-30, 1e22, 1e30)),
     *((s, torch.float64) for s in (1e-300, 1e-200, 1e200, 1e300))],
)  # fmt: skip
def test_the_size_of_b_does_not_matter(
    solver: LinearSolver, size: float, dtype: torch.dtype
) -> None:
    """Its square is not a normal number, and zero for an answer would pass as converged."""
    matrix, b = positive(3, 5, 0), randn(3, 5, seed=1)
    expected = dense(matrix, b)
    sizes = torch.tensor([[1.0], [size], [size]], dtype=torch.float64)
    found = eq.linear_solve(times(matrix.to(dtype)), (sizes * b).to(dtype), solver=solver)
    assert found.converged.all()
    error = norm(found.value.double() / sizes - expected) / norm(expected)
    assert float(error.max()) < (1e-4 if dtype == torch.float32 else 1e-8)


def test_a_product_that_is_not_linear_is_never_called_converged() -> None:
    """The recursion believes its own residual; b − A(x) of the x that is returned decides."""
    b = randn(3, 6, seed=1)
    with pytest.warns(ConvergenceWarning, match="3 of 3"):
        found = eq.linear_solve(lambda v: v + 0.3 * v.abs(), b, solver=CG())
    residual = norm(b - found.value - 0.3 * found.value.abs()) / norm(b)
    assert not found.converged.any()
    np.testing.assert_allclose(found.stats.relative, residual, rtol=1e-6)


def test_products_that_round_more_than_their_dtype_are_no_failure() -> None:
    """As those of TF32 or bfloat16: A(1.1x)/1.1 shows how much of b − Ax is their rounding."""
    matrix = torch.eye(6) + 0.3 * randn(6, 6, seed=0).float() / 6

    def product(v: Tensor) -> Tensor:
        return (v.bfloat16() @ matrix.bfloat16().T).float()

    found = eq.linear_solve(product, randn(3, 6, seed=1).float(), solver=GMRES(rtol=1e-4))
    assert found.converged.all()


@pytest.mark.parametrize("solver", [CG(max_steps=300), GMRES(restart=2, max_steps=300), GMRES()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_of_a_singular_system_is_not_called_converged(solver: Any, dtype: Any) -> None:
    """x runs along the null space, where rounding of Ax grows past b and would excuse any x."""
    for seed in range(40):
        q = problems.orthogonal(1, 5, seed)[0]
        values = torch.tensor([0.0, 0.5, 0.8, 1.0, 1.3], dtype=torch.float64)
        matrix = ((q * values) @ q.mT).to(dtype)
        b = randn(1, 5, seed=seed + 100).to(dtype)
        with quietly():
            found = eq.linear_solve(lambda v: v @ matrix.mT, b, solver=solver)  # noqa: B023
        left = norm(b.double() - found.value.double() @ matrix.double().mT) / norm(b.double())
        assert not (found.result == Result.converged).any() or left.item() < 0.2, (seed, left)


def test_an_answer_that_overflows_is_not_called_converged() -> None:
    """x = 1e6 is no float16, though the solver's own float32 holds it."""
    b = torch.tensor([[1.0], [2.0]], dtype=torch.float16)
    scale = torch.tensor([[1e-6], [0.5]], dtype=torch.float16)
    with quietly():
        found = eq.linear_solve(lambda v: scale * v, b)
    assert found.result.tolist() == [Result.nonfinite, Result.converged]
    assert found.value.tolist() == [[0.0], [4.0]]
