"""Phantom: the contract for both forms, the hand-written loop, the dense series, the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from tests.contracts.adjoint_contract import (
    FORWARD,
    TANH,
    AdjointContract,
    assert_close,
    dense_of,
    draw,
    exact_propagator,
    loss_of,
    saved_tensors,
    series_propagator,
    weights_of_loss,
)
from tests.contracts.problems import as_on_a_gpu, quietly


class PhantomContract(AdjointContract):
    adjoint = eq.Phantom(steps=4, damping=0.7)

    def make_adjoint(self) -> Any:
        return self.adjoint

    def propagator(self, jacobian: Tensor) -> Tensor:
        return series_propagator(self.adjoint.steps, self.adjoint.damping)(jacobian)


class TestPhantomUnrolled(PhantomContract):
    pass


class TestPhantomPlainSteps(PhantomContract):
    """β = 1 takes another road through the code."""

    adjoint = eq.Phantom(steps=3, damping=1.0)


class TestPhantomNeumann(PhantomContract):
    adjoint = eq.Phantom(steps=4, damping=0.7, form="neumann")
    under_transforms = twice = False


@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (1, 0.5), (3, 1.0), (5, 0.8)])
def test_unrolled_form_equals_a_hand_written_loop_of_a_rough_solve(
    steps: int, damping: float
) -> None:
    """After a solve of two steps only, so that iterates move: the solver's value, the gradient of
    the loop."""
    weight, x = TANH.leaves()
    rough, adjoint = eq.Picard(rtol=0.0, max_steps=2), eq.Phantom(steps=steps, damping=damping)
    value = eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=rough, adjoint=adjoint).value
    with torch.no_grad():
        z = TANH.start
        for _ in range(2):
            z = torch.tanh(z @ weight.T + x)
    torch.testing.assert_close(value, z, rtol=1e-14, atol=1e-14)
    g = (weights_of_loss(z) + z.reshape(-1)).view(z.shape)
    for _ in range(steps):
        z = (1 - damping) * z + damping * torch.tanh(z @ weight.T + x)
    found = torch.autograd.grad(loss_of(value), (weight, x))
    assert_close(found, torch.autograd.grad(z, (weight, x), g), rtol=1e-12, atol=1e-13)


def test_second_derivative_of_the_unrolled_form_is_that_of_its_steps() -> None:
    weight, x = TANH.leaves()
    value = eq.fixed_point(
        TANH.fn, TANH.start, (weight, x), solver=FORWARD, adjoint=eq.Phantom(steps=3, damping=0.5)
    ).value
    z = dense_of("tanh").z.view(3, 4)
    for _ in range(3):
        z = 0.5 * z + 0.5 * torch.tanh(z @ weight.T + x)
    seconds = []
    for end in (value, z):
        (first,) = torch.autograd.grad(loss_of(end), weight, create_graph=True)
        seconds.append(torch.autograd.grad((first**2).sum(), (weight, x)))
    assert_close(seconds[0], seconds[1])


@pytest.mark.parametrize("form", ["unrolled", "neumann"])
def test_gradient_tends_to_the_implicit_one_at_the_rate_of_the_map(form: str) -> None:
    """‖u_K − u‖ falls like ρ(βJ + (1 − β)I)ᴷ, and 60 steps are exact to 1e-9."""
    wanted = dense_of("tanh").gradients(exact_propagator)[0]
    errors = []
    for steps in (1, 4, 16, 60):
        weight, x = TANH.leaves()
        adjoint = eq.Phantom(steps=steps, damping=0.8, form=form)
        value = eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=FORWARD, adjoint=adjoint)
        (found,) = torch.autograd.grad(loss_of(value.value), weight)
        errors.append(float((found - wanted).norm() / wanted.norm()))
    assert errors[0] > 1e-2  # one step is far off, or the test shows nothing
    # ‖J‖ ≤ 1/2, so each step gains a factor of 0.2 + 0.8/2 = 0.6 or better.
    assert errors[1] < errors[0] * 0.6**2
    assert errors[2] < errors[1] * 0.6**10
    assert errors[3] < 1e-9


@pytest.mark.parametrize("wanted", ["input", "weight", "backward"])
def test_neumann_form_says_that_it_has_no_second_derivative(wanted: str) -> None:
    """An error on every road to a second derivative, and not a number with parts missing."""
    weight, x = TANH.leaves()
    adjoint = eq.Phantom(form="neumann")
    value = eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=FORWARD, adjoint=adjoint).value
    with pytest.raises(RuntimeError, match=r"differentiable|second"):  # noqa: PT012
        (first,) = torch.autograd.grad(loss_of(value), weight, create_graph=True)
        if wanted == "backward":
            first.sum().backward()
        else:
            torch.autograd.grad(first.sum(), x if wanted == "input" else weight)


def test_neumann_form_under_transforms_says_what_to_use() -> None:
    weight, x = TANH.parameters

    def run(x: Tensor) -> Tensor:
        return eq.fixed_point(
            TANH.fn, TANH.start, (weight, x), adjoint=eq.Phantom(form="neumann")
        ).value

    for transform in (torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match=r"form='unrolled'"):
            transform(run)(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"form='unrolled'"):
            run(dual)


def test_memory_of_the_neumann_form_does_not_grow_with_its_steps() -> None:
    few, many = (saved_tensors(eq.Phantom(steps=k, form="neumann")) for k in (2, 20))
    assert few == many > 0
    few, many = (saved_tensors(eq.Phantom(steps=k)) for k in (2, 20))
    assert many >= 10 * few > 0


def test_forward_mode_and_jacobians_of_the_unrolled_form_agree() -> None:
    """jacfwd, jacrev and jvp push the same four steps: one Jacobian."""
    weight, x = TANH.parameters

    def run(x: Tensor) -> Tensor:
        adjoint = eq.Phantom(steps=4, damping=0.7)
        return eq.fixed_point(
            TANH.fn, TANH.start, (weight, x), solver=FORWARD, adjoint=adjoint
        ).value

    reference = dense_of("tanh")
    wanted = torch.tensordot(
        series_propagator(4, 0.7)(reference.jacobian), reference.partials[1], 1
    )
    wanted = wanted.view(3, 4, 3, 4)
    assert_close([torch.func.jacrev(run)(x)], [wanted])
    assert_close([torch.func.jacfwd(run)(x)], [wanted])
    direction = weights_of_loss(x).view(3, 4)
    pushed = torch.func.jvp(run, (x,), (direction,))[1]
    assert_close([pushed], [torch.tensordot(wanted, direction, 2)])


@pytest.mark.parametrize("blind", [False, True])
def test_a_sample_out_of_steps_whose_next_step_is_nan_harms_no_weight(
    blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample 1: z = √(z − 1) from 3 is √2 after one step, 0.64 after two and NaN after three.

    ``blind``: as on a GPU, where the solve itself told the host that it did not converge.
    """
    if blind:
        as_on_a_gpu(monkeypatch)
    x = draw(90, 3, 3)
    bad = torch.tensor([[False], [True], [False]])

    def loss(weight: Tensor, rows: list[int]) -> Tensor:
        def fn(z: Tensor, w: Tensor) -> Tensor:
            root = torch.where(bad[rows], z - 1, 1.0).sqrt() + 0.0 * w.sum()
            return torch.where(bad[rows], root, torch.tanh(z @ w.T + x[rows]))

        start = torch.full((len(rows), 3), 3.0, dtype=torch.float64)
        solver, adjoint = eq.Picard(rtol=1e-12, max_steps=2), eq.Phantom(steps=2)
        with quietly():
            sol = eq.fixed_point(fn, start, (weight,), solver=solver, adjoint=adjoint)
        return sol.value[[0, -1]].sin().sum()

    weight = draw(91, 3, 3, scale=0.2).requires_grad_()
    wanted = torch.autograd.grad(loss(weight, [0, 2]), weight)
    assert_close(torch.autograd.grad(loss(weight, [0, 1, 2]), weight), wanted)
