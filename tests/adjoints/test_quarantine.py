"""Samples that failed are kept from the gradients of others: what is exchanged, what is not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.adjoints.graph import clean, cut_off, isolate, lend
from equilibria.engine.iterate import Iterated
from equilibria.engine.maps import Map
from equilibria.engine.result import Result
from equilibria.engine.tree import flatten_state

NAN, INF = float("nan"), float("inf")
FAILED = torch.tensor([True, False, False])


def test_only_what_is_not_finite_in_failed_rows_becomes_zero() -> None:
    """NaN elsewhere is the user's own, and numbers of failed samples stay."""
    t = torch.tensor([[NAN, 1.0], [NAN, 2.0], [INF, 3.0]])
    found = clean(t, FAILED)
    assert found[0].tolist() == [0.0, 1.0]
    assert torch.isnan(found[1, 0])
    assert torch.isinf(found[2, 0])


def test_tensors_without_a_row_a_sample_are_left_alone() -> None:
    for t in (torch.full((2, 3), NAN), torch.tensor(NAN)):
        assert clean(t, FAILED) is t
        assert lend(t, FAILED) is t
    t = torch.full((3, 2), NAN)
    assert clean(t, None) is t
    assert lend(t, None) is t


def test_a_failed_row_is_a_copy_of_the_first_healthy_one() -> None:
    """Of every dtype; an infinity of the healthy sample is its own and stays."""
    failed = torch.tensor([True, False, True])
    t = torch.tensor([[NAN, 1.0], [-INF, 2.0], [5.0, 3.0]])
    assert lend(t, failed).tolist() == [[-INF, 2.0]] * 3
    assert lend(torch.tensor([7, 8, 9]), failed).tolist() == [8, 8, 8]
    assert lend(torch.tensor([True, False, True]), failed).tolist() == [False] * 3


def test_without_a_healthy_sample_nothing_is_infinite() -> None:
    t = torch.tensor([[NAN, 1.0], [INF, 2.0]])
    assert torch.isfinite(lend(t, torch.tensor([True, True]))).all()


def test_entries_that_are_equal_keep_their_gradient() -> None:
    """A bias of zeros with as many rows as the batch has samples is nobody's row."""
    t = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]], requires_grad=True)
    (found,) = torch.autograd.grad((lend(t, FAILED) * torch.ones(3, 2)).sum(), t)
    assert found.tolist() == [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def isolated(fn: Any, args: tuple[Tensor, ...], z: Tensor) -> Any:
    leaves, spec = flatten_state(z)
    code = torch.where(FAILED, int(Result.nonfinite), int(Result.converged)).to(torch.int8)
    norms = torch.zeros(3)
    counts = {Result.nonfinite: 1, Result.converged: 2}
    done = Iterated(leaves, code, norms, norms, norms, 1, 1, counts)
    return isolate(Map(fn, args, spec, leaves), done)


def test_arguments_and_captured_tensors_are_exchanged_alike() -> None:
    x = torch.tensor([[NAN, 1.0], [2.0, 3.0], [4.0, 5.0]])
    held = x.clone().requires_grad_()
    made = 1.0 * held
    for fn, args in (
        (lambda z, x: z + x, (x,)),
        (lambda z: z + x, ()),
        (lambda z: z + held, ()),
        (lambda z: z + made, ()),
    ):
        part = isolated(fn, args, torch.zeros(3, 2))
        (out,) = part.fn(part.z)
        assert out.tolist() == [[2.0, 3.0], [2.0, 3.0], [4.0, 5.0]]
        if out.requires_grad:
            (found,) = torch.autograd.grad(out.sum(), held)
            assert found.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("way", ["argument", "captured"])
@pytest.mark.parametrize("at", [0.0, 1.0])
def test_a_weight_with_as_many_rows_as_samples_is_left_alone(way: str, at: float) -> None:
    """Also at z = 0, where its product is zero whatever its rows are."""
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = torch.tensor([[NAN, 1.0, 0.0], [2.0, 3.0, 1.0], [4.0, 5.0, 2.0]])
    z = torch.full((3, 3), at)
    if way == "argument":
        part = isolated(lambda z, w, x: z @ w.T + x, (weight, x), z)
    else:
        part = isolated(lambda z: z @ weight.T + x, (), z)
    (out,) = part.fn([torch.ones(3, 3)])
    by_hand = torch.ones(3, 3) @ weight.T + x
    assert torch.equal(out[1:], by_hand[1:])
    assert torch.equal(out[0], out[1])
    (found,) = torch.autograd.grad(out[1:].sum(), weight)
    assert torch.equal(found, torch.full((3, 3), 2.0))


def test_where_samples_are_coupled_nan_becomes_zero_and_no_more() -> None:
    """With another sample in place of the failed one the others would answer differently."""
    x = torch.tensor([[NAN, 1.0], [2.0, 3.0], [4.0, 5.0]])
    z = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    part = isolated(lambda z, x: z.mean(0, keepdim=True) + x, (x,), z)
    assert not part.apart
    assert part.fn(part.z)[0].tolist() == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


def test_cut_off_takes_the_constant_for_failed_samples() -> None:
    value = torch.full((3, 2), 2.0, requires_grad=True)
    constant = torch.zeros(3, 2)
    (out,) = cut_off(FAILED, [value * 1.0], [constant])
    assert out.tolist() == [[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]
    (found,) = torch.autograd.grad(out.sum(), value)
    assert found.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert cut_off(None, [value], [constant])[0] is value


@pytest.mark.parametrize(
    "adjoint",
    [eq.Implicit(), eq.Phantom(), eq.Phantom(form="neumann"), eq.OneStep()],
    ids=repr,
)
@pytest.mark.parametrize(
    ("steps", "start", "first", "weight"), [(1, 0, 0.1, 0.5), (2, 0.4, 0.3, 0.7)]
)
def test_an_answer_outside_the_domain_of_the_map_harms_no_weight(
    adjoint: Any, steps: int, start: float, first: float, weight: float
) -> None:
    """After ``steps`` of √(x − wz) the next evaluation at the first sample is NaN."""
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=steps)

    def solve(x: Tensor, z0: Tensor) -> tuple[Tensor, Tensor]:
        w = torch.tensor(weight, requires_grad=True)
        sol = eq.fixed_point(
            lambda z, x: torch.sqrt(x - w * z), z0, (x,), solver=solver, adjoint=adjoint
        )
        (found,) = torch.autograd.grad(sol.value.sum(), w)
        return sol.value.detach(), found

    x, z0 = torch.tensor([[first], [4.0]]), torch.tensor([[start], [0.0]])
    value, found = solve(x, z0)
    alone, wanted = solve(x[1:], z0[1:])
    assert torch.isfinite(value).all()
    assert torch.equal(value[1:], alone)
    assert torch.isfinite(found)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "adjoint",
    [eq.Implicit(), eq.Unrolled(), eq.Phantom(), eq.Phantom(form="neumann"), eq.OneStep()],
    ids=repr,
)
@pytest.mark.parametrize("fixed", [False, True])
def test_where_all_samples_failed_gradients_are_zero(adjoint: Any, fixed: bool) -> None:
    """Not None, and not an error: a training step of one bad sample does nothing."""
    weight = torch.full((4, 4), 0.1, requires_grad=True)
    x = torch.full((1, 4), -5.0, requires_grad=True)
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=5) if fixed else eq.Picard()
    with contextlib.nullcontext() if fixed else pytest.warns(eq.ConvergenceWarning):
        sol = eq.fixed_point(
            lambda z, x: torch.sqrt(z @ weight.T + x),
            torch.ones(1, 4),
            (x,),
            solver=solver,
            adjoint=adjoint,
        )
    assert sol.result.tolist() == [int(Result.nonfinite)]
    for g in torch.autograd.grad(sol.value.sum(), (weight, x)):
        assert float(g.abs().max()) == 0.0
