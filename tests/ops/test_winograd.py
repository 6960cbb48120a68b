"""Winograd's convolution against the direct sum in float64, in value and in every gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equilibria.ops import winograd as module
from equilibria.ops.winograd import can_use_winograd, transformed_weight, winograd

LAST = torch.channels_last


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def both(weight: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(transformed_weight(weight, adjoint=a) for a in (False, True))  # type: ignore[return-value]


def direct(x: Tensor, weight: Tensor) -> np.ndarray:
    """The zero-padded sum over the kernel, written out in NumPy."""
    wide = np.pad(x.double().numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
    h, w = x.shape[2:]
    total = np.zeros((x.shape[0], weight.shape[0], h, w))
    for i, j in np.ndindex(3, 3):
        part = wide[:, :, i : i + h, j : j + w]
        total += np.einsum("oc,bchw->bohw", weight.double().numpy()[:, :, i, j], part)
    return total


def distance(found: Tensor, exact: Tensor | np.ndarray) -> float:
    exact = torch.as_tensor(exact)
    return float((found.detach().double() - exact).norm() / exact.norm())


@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5)
)
@settings(max_examples=25, deadline=None)
def test_it_is_the_convolution(b: int, c: int, o: int, tall: int, wide: int) -> None:
    x = randn(b, c, 4 * tall, 4 * wide).to(memory_format=LAST)
    weight = randn(o, c, 3, 3, seed=1)
    found = winograd(x, weight, *both(weight), adjoint=False)
    assert found.shape == (b, o, 4 * tall, 4 * wide)
    assert found.is_contiguous(memory_format=LAST)
    assert distance(found, direct(x, weight)) < 1e-5


def test_its_adjoint_is_the_transpose() -> None:
    weight, x = randn(6, 4, 3, 3), randn(3, 4, 8, 12, seed=1).to(memory_format=LAST)
    y = randn(3, 6, 8, 12, seed=2).to(memory_format=LAST)
    there, back = both(weight)
    forward = winograd(x, weight, there, back, adjoint=False)
    backward = winograd(y, weight, back, there, adjoint=True)
    assert float((forward * y).sum()) == pytest.approx(float((x * backward).sum()), rel=1e-4)
    exact = F.conv_transpose2d(y.double(), weight.double(), padding=1)
    assert distance(backward, exact) < 1e-5


@pytest.mark.parametrize("adjoint", [False, True])
def test_gradients_of_first_and_second_order(adjoint: bool) -> None:
    weight = randn(5, 4, 3, 3).requires_grad_()
    x = randn(2, 5 if adjoint else 4, 8, 4, seed=1).to(memory_format=LAST).requires_grad_()
    maps = both(weight)
    out = winograd(x, weight, *(maps[::-1] if adjoint else maps), adjoint=adjoint)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    plain = (F.conv_transpose2d if adjoint else F.conv2d)(*wide, padding=1)
    g = randn(*out.shape, seed=2)
    once = torch.autograd.grad(out, (x, weight), g, create_graph=True)
    exact = torch.autograd.grad(plain, wide, g.double(), create_graph=True)
    twice = torch.autograd.grad(sum((t**3).sum() for t in once), (x, weight))
    exact2 = torch.autograd.grad(sum((t**3).sum() for t in exact), wide)
    for found, known in zip((*once, *twice), (*exact, *exact2), strict=True):
        assert distance(found, known.detach()) < 1e-4
    # And without a graph, where the fast form is used.
    out = winograd(x, weight, *(maps[::-1] if adjoint else maps), adjoint=adjoint)
    for found, known in zip(torch.autograd.grad(out, (x, weight), g), exact, strict=True):
        assert distance(found, known.detach()) < 1e-5


def test_a_product_with_the_jacobian_does_not_touch_the_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = randn(4, 4, 3, 3).requires_grad_()
    x = randn(1, 4, 4, 4, seed=1).to(memory_format=LAST).requires_grad_()
    out = winograd(x, weight, *both(weight), adjoint=False)
    asked: list[list[bool]] = []
    original = module._asked

    def noted(ctx: object) -> list[bool]:
        asked.append(original(ctx))
        return asked[-1]

    monkeypatch.setattr(module, "_asked", noted)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    torch.autograd.grad(out.sum(), weight, retain_graph=True)
    out.sum().backward()
    assert asked == [[True, False], [False, True], [True, True]]


def test_where_it_is_used() -> None:
    weight = randn(64, 64, 3, 3)
    x = randn(2, 64, 16, 16).to(memory_format=LAST)
    assert can_use_winograd(x, weight)
    for other in (x.contiguous(), x.double(), x[:, :, :14], x[:1, :, :4, :4]):
        assert not can_use_winograd(other, weight.to(other.dtype))
    for other in (weight[:, :, :1, :1], weight[:8]):
        assert not can_use_winograd(x, other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not can_use_winograd(x, weight)
