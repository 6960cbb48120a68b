"""Complex states, against dense complex algebra in float64 and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq

C = torch.complex128
TIGHT = {
    "anderson": eq.Anderson(rtol=1e-12, max_steps=300),
    "broyden": eq.Broyden(rtol=1e-12, max_steps=300),
    "picard": eq.Picard(rtol=1e-12, max_steps=2000),
}


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=C)


def contraction(seed: int, n: int, norm: float = 0.6) -> Tensor:
    a = draw(seed, n, n)
    return norm * a / torch.linalg.matrix_norm(a, 2)


@pytest.mark.parametrize("solver", TIGHT)
@pytest.mark.parametrize(
    "adjoint",
    [eq.Implicit(), eq.Implicit(solver=eq.Anderson(rtol=1e-12)), eq.Unrolled()],
    ids=["gmres", "anderson", "unrolled"],
)
def test_a_linear_map_is_solved_and_differentiated(solver: str, adjoint: Any) -> None:
    """z = zAᵀ + b has z = (I − A)⁻¹b, and the same gradients through torch.linalg.solve."""
    eye = torch.eye(6, dtype=C)
    found, wanted = [], []
    for dense, into in ((False, found), (True, wanted)):
        a, b = contraction(0, 6).requires_grad_(), draw(1, 4, 6).requires_grad_()
        if dense:
            z = torch.linalg.solve(eye - a, b.mT).mT
        else:
            sol = eq.fixed_point(
                lambda z, a, b: z @ a.mT + b,
                torch.zeros(4, 6, dtype=C),
                (a, b),
                solver=TIGHT[solver],
                adjoint=adjoint,
            )
            assert bool(sol.converged.all())
            assert sol.stats.residual.dtype == torch.float64
            z = sol.value
        loss = (z * draw(2, 4, 6)).sum().abs() + z.abs().square().sum()
        into += [z, *torch.autograd.grad(loss, (a, b))]
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def shrinkage(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Not complex-differentiable: magnitudes are shrunk, phases kept, and a conjugate is taken."""
    v = z @ a.mT + 0.2 * z.conj() + b
    return v * (1 - 0.1 / torch.sqrt(v.abs().square() + 0.01))


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_map_without_a_complex_derivative_passes_gradcheck(order: int) -> None:
    a, b = contraction(0, 2, 0.4).requires_grad_(), draw(1, 1, 2).requires_grad_()

    def solve(a: Tensor, b: Tensor) -> Tensor:
        start = torch.zeros(1, 2, dtype=C)
        return eq.fixed_point(shrinkage, start, (a, b), solver=TIGHT["anderson"]).value

    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    assert check(solve, (a, b), atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=10, derandomize=True)
@given(seed=st.integers(0, 2**16), power=st.sampled_from([0, -60, 60]))
def test_samples_scale_and_turn_by_themselves(seed: int, power: int) -> None:
    """Scaling one sample of a linear problem by c scales its answer by c, and no other."""
    a, b = contraction(seed, 4), draw(seed + 1, 3, 4)
    factor = torch.tensor([1, (2.0**power) * 1j, 1], dtype=C).unsqueeze(1)

    def solve(b: Tensor) -> Tensor:
        start = torch.zeros(3, 4, dtype=C)
        return eq.fixed_point(lambda z: z @ a.mT + b, start, solver=TIGHT["anderson"]).value

    torch.testing.assert_close(solve(factor * b) / factor, solve(b), rtol=1e-9, atol=1e-9)


def test_reconstruction_from_some_frequencies() -> None:
    """z ↦ z − Fᴴ M(Fz − y) − λz/(1 + λ): MRI with a quadratic prior, solved per frequency."""
    mask = (torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5).to(torch.float64)
    y = mask * torch.fft.fft2(draw(0, 2, 1, 8, 8), norm="ortho")
    ridge = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def data_step(z: Tensor, y: Tensor, ridge: Tensor) -> Tensor:
        gap = mask * (torch.fft.fft2(z, norm="ortho") - y)
        return (z - torch.fft.ifft2(gap, norm="ortho")) / (1 + ridge)

    sol = eq.fixed_point(data_step, torch.zeros_like(y), (y, ridge), solver=TIGHT["anderson"])
    wanted = torch.fft.ifft2(y / (mask + ridge), norm="ortho")
    torch.testing.assert_close(sol.value, wanted, rtol=1e-9, atol=1e-10)
    g = torch.autograd.grad(sol.value.abs().square().sum(), ridge)[0]
    want = torch.autograd.grad(wanted.abs().square().sum(), ridge)[0]
    torch.testing.assert_close(g, want, rtol=1e-8, atol=1e-8)


def test_trees_callbacks_and_single_precision() -> None:
    a, seen = contraction(0, 4).to(torch.complex64), []
    b = draw(1, 3, 4).to(torch.complex64)

    def fn(z: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"c": z["c"] @ a.mT + b + 0.1 * z["r"], "r": 0.3 * z["c"].abs() + 0.1 * z["r"]}

    start = {"c": torch.zeros(3, 4, dtype=torch.complex64), "r": torch.zeros(3, 4)}
    sol = eq.fixed_point(fn, start, callback=lambda k, z, r: seen.append(z["c"].dtype))
    assert sol.value["c"].dtype == torch.complex64 == seen[0]
    assert sol.value["r"].dtype == torch.float32
    image = fn(sol.value)
    gap = torch.cat([(image[k] - sol.value[k]).abs() for k in start], 1).norm(dim=1)
    torch.testing.assert_close(gap, sol.stats.residual, rtol=0.1, atol=1e-6)


def test_a_bad_sample_does_no_harm() -> None:
    a = contraction(0, 4).requires_grad_()
    b = draw(1, 3, 4)
    b[1, 2] = complex(float("nan"), 0.0)
    with pytest.warns(eq.ConvergenceWarning, match="nonfinite"):
        sol = eq.fixed_point(lambda z, b: z @ a.mT + b, torch.zeros_like(b), (b,))
    sol.value[[0, 2]].abs().sum().backward()
    assert a.grad is not None
    assert bool(torch.isfinite(a.grad).all())


def test_roots_and_linear_systems() -> None:
    b = draw(0, 3, 4)
    root = eq.root(lambda z: z * z - b, torch.ones_like(b)).value
    torch.testing.assert_close(root * root, b, rtol=1e-8, atol=1e-8)
    a = contraction(1, 4)
    hermitian = a @ a.mH + torch.eye(4, dtype=C)
    for solver in (eq.GMRES(), eq.CG()):
        x = eq.linear_solve(lambda x: x @ hermitian.mT, b, solver=solver).value
        torch.testing.assert_close(x, torch.linalg.solve(hermitian, b.mT).mT)


def test_what_is_wrong_with_a_map_is_said() -> None:
    start = torch.zeros(2, 3, dtype=C)
    with pytest.raises(ValueError, match="shape"):
        eq.fixed_point(lambda z: z[:, :2], start)
    with pytest.raises(ValueError, match="scalar"):
        eq.fixed_point(lambda z: z, torch.tensor(1j))
    with pytest.raises(TypeError, match=r"complex128 for a state of torch\.float64"):
        eq.fixed_point(lambda z: z * 1j, torch.zeros(2, 3, dtype=torch.float64))
