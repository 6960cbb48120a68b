"""Samples that failed are kept from the gradients of others: what is cleaned, what is not."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.adjoints.quarantine import clean, cut_off, quarantine
from equilibria.engine.maps import Map
from equilibria.engine.tree import flatten_state

NAN = float("nan")
FAILED = torch.tensor([True, False, False])


def test_only_what_is_not_finite_in_failed_rows_becomes_zero() -> None:
    """NaN elsewhere is the user's own, and numbers of failed samples stay."""
    t = torch.tensor([[NAN, 1.0], [NAN, 2.0], [float("inf"), 3.0]])
    found = clean(t, FAILED)
    assert found[0].tolist() == [0.0, 1.0]
    assert torch.isnan(found[1, 0])
    assert torch.isinf(found[2, 0])


def test_tensors_without_a_row_a_sample_are_left_alone() -> None:
    for t in (torch.full((2, 3), NAN), torch.tensor(NAN), torch.ones(3, dtype=torch.int64)):
        assert clean(t, FAILED) is t
    t = torch.full((3, 2), NAN)
    assert clean(t, None) is t


def test_gradients_pass_through_cleaning_but_not_to_what_was_replaced() -> None:
    t = torch.tensor([[NAN, 1.0], [2.0, 2.0], [3.0, 3.0]], requires_grad=True)
    (found,) = torch.autograd.grad((clean(t, FAILED) ** 2).sum(), t)
    assert found.tolist() == [[0.0, 2.0], [4.0, 4.0], [6.0, 6.0]]


def cleaned_map(fn: object, args: tuple[Tensor, ...]) -> Tensor:
    z = torch.zeros(3, 2)
    leaves, spec = flatten_state(z)
    return quarantine(Map(fn, args, spec, leaves), FAILED)(leaves)[0]


def test_arguments_and_captured_tensors_are_cleaned_alike() -> None:
    x = torch.ones(3, 2)
    x[0, 0] = NAN
    held = x.clone().requires_grad_()
    made = 1.0 * held
    for fn, args in (
        (lambda z, x: z + x, (x,)),
        (lambda z: z + x, ()),
        (lambda z: z + held, ()),
        (lambda z: z + made, ()),
    ):
        out = cleaned_map(fn, args)
        assert out.tolist() == [[0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
        if out.requires_grad:
            (found,) = torch.autograd.grad(out.sum(), held)
            assert found.tolist() == [[0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]


def test_cut_off_takes_the_constant_for_failed_samples() -> None:
    value = torch.full((3, 2), 2.0, requires_grad=True)
    constant = torch.zeros(3, 2)
    (out,) = cut_off(FAILED, [value * 1.0], [constant])
    assert out.tolist() == [[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]
    (found,) = torch.autograd.grad(out.sum(), value)
    assert found.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert cut_off(None, [value], [constant])[0] is value
