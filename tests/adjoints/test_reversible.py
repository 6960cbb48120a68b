"""Reversible, against autograd through the same steps written as a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from tests.contracts.adjoint_contract import draw

W = 0.7 * torch.linalg.qr(draw(0, 5, 5)).Q


def tanh_map(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ w.mT + x)


def steps(beta: float, count: int, **more: Any) -> eq.Picard:
    return eq.Picard(damping=beta, rtol=0.0, max_steps=count, **more)


def loop(z: Tensor, w: Tensor, x: Tensor, beta: float, count: int) -> Tensor:
    """The paper's two states, for autograd."""
    y = z
    for _ in range(count):
        y = (1 - beta) * y + beta * tanh_map(z, w, x)
        z = (1 - beta) * z + beta * tanh_map(y, w, x)
    return z


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [t.to(dtype).requires_grad_() for t in (draw(1, 3, 5), W, draw(2, 3, 5))]


@pytest.mark.parametrize(("beta", "count"), [(0.5, 1), (0.5, 10), (0.8, 8), (0.3, 40)])
def test_gradients_are_those_of_the_steps(beta: float, count: int) -> None:
    z0, w, x = leaves()
    sol = eq.fixed_point(tanh_map, z0, (w, x), solver=steps(beta, count), adjoint=eq.Reversible())
    wanted = loop(z0, w, x, beta, count)
    torch.testing.assert_close(sol.value, wanted, rtol=1e-12, atol=1e-12)
    assert sol.stats.evaluations >= 2 * count
    g = draw(3, 3, 5)
    found = torch.autograd.grad(sol.value, (z0, w, x), g)
    for a, b in zip(found, torch.autograd.grad(wanted, (z0, w, x), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_a_hook_on_a_captured_weight_sees_its_whole_gradient_once() -> None:
    z0, w, x = leaves()
    w.register_hook(lambda g: 2.0 * g)
    solver, adjoint = steps(0.5, 6), eq.Reversible()
    sol = eq.fixed_point(lambda z, x: tanh_map(z, w, x), z0, (x,), solver=solver, adjoint=adjoint)
    g = draw(3, 3, 5)
    found = torch.autograd.grad(sol.value, (z0, w, x), g)
    for a, b in zip(found, torch.autograd.grad(loop(z0, w, x, 0.5, 6), (z0, w, x), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_captured_tensors_and_trees() -> None:
    z0, w, x = leaves()
    h = 2.0 * x

    def fn(z: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": torch.tanh(z["b"] @ w.mT + h), "b": 0.5 * torch.sin(z["a"])}

    start = {"a": z0, "b": 0.1 * z0}
    sol = eq.fixed_point(fn, start, solver=steps(0.5, 6), adjoint=eq.Reversible())
    y = z = start
    for _ in range(6):
        y = {k: 0.5 * y[k] + 0.5 * f for k, f in fn(z).items()}
        z = {k: 0.5 * z[k] + 0.5 * f for k, f in fn(y).items()}
    loss = sol.value["a"].sum() + sol.value["b"].sum()
    found = torch.autograd.grad(loss, (z0, w, x), retain_graph=True)
    wanted = torch.autograd.grad(z["a"].sum() + z["b"].sum(), (z0, w, x))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_samples_that_stop_at_their_tolerance_have_their_own_steps() -> None:
    z0, w, x = leaves()
    x = (x.detach() * torch.tensor([[0.5], [1.0], [8.0]], dtype=x.dtype)).requires_grad_()
    solver = eq.Picard(damping=0.5, rtol=1e-3, block=1)
    sol = eq.fixed_point(tanh_map, z0, (w, x), solver=solver, adjoint=eq.Reversible())
    assert len(set(sol.stats.steps.tolist())) > 1
    assert int(sol.stats.steps.max()) < 30  # 2³⁰ roundings of 1e-16 are 1e-7
    image = tanh_map(sol.value, w, x)
    assert bool(((image - sol.value).norm(dim=1) <= 1.001e-3 * image.norm(dim=1)).all())
    found = torch.autograd.grad(sol.value.sum(), (z0, w, x))
    each = [
        loop(z0[i : i + 1], w, x[i : i + 1], 0.5, int(k) - 1) for i, k in enumerate(sol.stats.steps)
    ]
    wanted = torch.autograd.grad(torch.cat(each).sum(), (z0, w, x))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_float32_keeps_its_digits_through_many_steps() -> None:
    """(1 − β)⁻ⁿ = 10⁹: without the wider sums nothing would be left of float32."""
    z0, w, x = leaves(torch.float32)
    sol = eq.fixed_point(tanh_map, z0, (w, x), solver=steps(0.5, 30), adjoint=eq.Reversible())
    assert sol.value.dtype == torch.float32
    wide = [t.detach().double().requires_grad_() for t in (z0, w, x)]
    wanted = torch.autograd.grad(loop(*wide, 0.5, 30).sum(), wide)
    for a, b in zip(torch.autograd.grad(sol.value.sum(), (z0, w, x)), wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_memory_does_not_grow_with_the_steps() -> None:
    def kept(adjoint: Any, count: int) -> int:
        z0, w, x = leaves()
        sizes: list[int] = []

        def pack(t: Tensor) -> Tensor:
            sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            eq.fixed_point(tanh_map, z0, (w, x), solver=steps(0.5, count), adjoint=adjoint)
        return sum(sizes)

    assert kept(eq.Reversible(), 3) == kept(eq.Reversible(), 50)
    assert kept(eq.Unrolled(), 3) < kept(eq.Unrolled(), 50)


def test_a_bad_sample_does_no_harm() -> None:
    z0, w, x = leaves()
    x = x.detach().clone()
    x[1, 0] = float("nan")
    sol = eq.fixed_point(tanh_map, z0, (w, x), solver=steps(0.5, 8), adjoint=eq.Reversible())
    assert sol.result.tolist()[1] == eq.Result.nonfinite
    found = torch.autograd.grad(sol.value.sum(), (z0, w))
    part = [z0.detach()[[0, 2]].requires_grad_(), w, x[[0, 2]]]
    wanted = torch.autograd.grad(loop(*part, 0.5, 8).sum(), part[:2])
    torch.testing.assert_close(found[0][[0, 2]], wanted[0], rtol=1e-9, atol=1e-10)
    assert not bool(found[0][1].any())
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-9, atol=1e-10)


def test_what_it_refuses() -> None:
    z0, w, x = leaves()
    for solver in (eq.Anderson(), eq.Picard(), eq.Broyden()):
        with pytest.raises(ValueError, match=r"Picard\(damping=β\) with β < 1"):
            eq.fixed_point(tanh_map, z0, (w, x), solver=solver, adjoint=eq.Reversible())
    with pytest.raises(RuntimeError, match="use Unrolled"):
        torch.func.grad(
            lambda w: eq.fixed_point(
                tanh_map, z0, (w, x), solver=steps(0.5, 3), adjoint=eq.Reversible()
            ).value.sum()
        )(w)
    sol = eq.fixed_point(tanh_map, z0, (w, x), solver=steps(0.5, 3), adjoint=eq.Reversible())
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(sol.value.sum(), w, create_graph=True)


def test_steps_that_cannot_be_undone_are_an_error() -> None:
    """The gradient would be off by 10²⁰ and more."""
    z0, w, x = leaves()
    sol = eq.fixed_point(tanh_map, z0, (w, x), solver=steps(0.6, 80), adjoint=eq.Reversible())
    with pytest.raises(RuntimeError, match=r"80 steps with damping=0.6 cannot be undone"):
        sol.value.sum().backward()


def test_a_feature_that_is_an_argument_and_captured_too() -> None:
    w = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    h = 2.0 * w

    def solve(adjoint: eq.Adjoint) -> torch.Tensor:
        z0 = torch.zeros(2, 1, dtype=torch.float64)
        solver = eq.Picard(damping=0.5, rtol=0.0, max_steps=8)
        found = eq.fixed_point(
            lambda z, a: 0.3 * torch.sin(z) + a * h, z0, (h,), solver=solver, adjoint=adjoint
        )
        return torch.autograd.grad(found.value.sum(), w, retain_graph=True)[0]

    z, y = (torch.zeros(2, 1, dtype=torch.float64) for _ in range(2))
    for _ in range(8):  # the paper's steps, on plain autograd
        y = 0.5 * y + 0.5 * (0.3 * torch.sin(z) + h * h)
        z = 0.5 * z + 0.5 * (0.3 * torch.sin(y) + h * h)
    (exact,) = torch.autograd.grad(z.sum(), w, retain_graph=True)
    torch.testing.assert_close(solve(eq.Reversible()), exact)
