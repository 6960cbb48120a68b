"""Separable convolutions under one bound: against the matrix of the composed map."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equilibria.nn import NormBounded, WeightNormalized
from equilibria.nn.deep_opteq import OptEqBlock, SeparableConv
from tests.problems.test_operators import conv_matrix, randn


def made(inputs: int = 3, outputs: int = 4, scale: float = 3.0, **options: Any) -> SeparableConv:
    torch.manual_seed(0)
    conv = SeparableConv(inputs, outputs, 3, **options).double()
    with torch.no_grad():
        for p in conv.parameters():
            p.mul_(scale)
    conv.settle()
    return conv.eval()


def composed(conv: SeparableConv, size: int, divisor: float = 1.0) -> np.ndarray:
    """The matrix P·D of both maps, each by its own definition."""
    depth = conv_matrix(
        conv.depthwise.weight, size, size, padding=1, groups=conv.depthwise.in_channels
    )
    point = conv_matrix(conv.pointwise.weight, size, size)
    return point @ depth / divisor


@pytest.mark.parametrize("bound", [0.3, 0.95, 50.0])
def test_the_composed_map_is_bounded_and_not_more(bound: float) -> None:
    """‖P∘D‖ = min(‖·‖, bound) on the map that was asked for: no slack of a product of norms."""
    conv = made(constraint=NormBounded(bound=bound, size=6))
    free = np.linalg.norm(composed(conv, 6), 2)
    expected = composed(conv, 6, max(1.0, free / bound))
    z = randn(2, 3, 6, 6, seed=1)
    got = conv(z).flatten(1).detach().numpy()
    # σ comes from Lanczos to 1e-6 in float64, and its error is the square of that.
    np.testing.assert_allclose(got, z.flatten(1).numpy() @ expected.T, rtol=0, atol=1e-10)
    back = conv.operator().adjoint(randn(2, 4, 6, 6, seed=2)).flatten(1).detach().numpy()
    np.testing.assert_allclose(
        back, randn(2, 4, 6, 6, seed=2).flatten(1).numpy() @ expected, rtol=0, atol=1e-10
    )


def test_bounding_the_factors_apart_would_be_looser() -> None:
    """A channel with a large D and a small P counts in ‖P‖‖D‖ and not in ‖P∘D‖."""
    conv = made(constraint=NormBounded(bound=0.9, size=6))
    with torch.no_grad():
        conv.depthwise.weight[0] *= 5.0
        conv.pointwise.weight[:, 0] /= 5.0
    conv.settle()
    depth = conv_matrix(conv.depthwise.weight, 6, 6, padding=1, groups=3)
    point = conv_matrix(conv.operator().pointwise.weight, 6, 6)
    assert np.linalg.norm(point @ depth, 2) == pytest.approx(0.9, rel=1e-9)
    assert np.linalg.norm(point, 2) * np.linalg.norm(depth, 2) > 2.0


def test_the_bound_holds_on_every_map_size_by_the_proven_norm() -> None:
    conv = made(constraint=NormBounded(bound=0.9, size=16))
    upper = conv.operator().norm_upper()
    for size in (3, 8, 12):
        free = np.linalg.norm(composed(conv, 16), 2)
        assert np.linalg.norm(composed(conv, size, free / 0.9), 2) <= upper
    assert upper < 0.9 * 1.03


def test_power_iteration_follows_training() -> None:
    """A kernel that is fitted to one beyond the bound ends on the bound, not above it."""
    target = made(scale=2.0)
    conv = made(constraint=NormBounded(bound=0.9, size=6)).train()
    z = randn(8, 3, 6, 6, seed=1)
    wanted = target(z).detach()
    optimizer = torch.optim.Adam(conv.parameters(), lr=0.01)
    start = conv.pointwise.weight.detach().clone()
    for _ in range(40):
        optimizer.zero_grad()
        (conv(z) - wanted).square().mean().backward()
        optimizer.step()
    assert float((conv.pointwise.weight - start).detach().norm()) > 0.2
    for still, slack in ((0, 1.08), (60, 1.005)):  # it lags a little, and catches up
        for _ in range(still):
            conv(z)
        matrix = conv_matrix(conv.operator().kernel.detach(), 6, 6, padding=1)
        assert 0.85 < np.linalg.norm(matrix, 2) <= 0.9 * slack


def test_the_gradient_goes_through_the_norm() -> None:
    conv = made(2, 2, constraint=NormBounded(bound=0.9, size=4))
    z = randn(1, 2, 4, 4, seed=1)
    names = [n for n, _ in conv.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in conv.parameters()]

    def run(*weights: Tensor) -> Tensor:
        twin = copy.deepcopy(conv)
        with torch.no_grad():
            for p, w in zip(twin.parameters(), weights, strict=True):
                p.copy_(w)
        twin.settle()  # a finite difference sees σ itself, converged
        moved = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(twin, moved, (z,))

    assert torch.autograd.gradcheck(run, values, eps=1e-6, atol=1e-5, rtol=1e-4)


def test_without_a_bound_it_is_two_convolutions() -> None:
    for constraint in (None, WeightNormalized()):
        conv = made(constraint=constraint, bias=True)
        z = randn(2, 3, 5, 5, seed=1)
        torch.testing.assert_close(conv(z), conv.pointwise(conv.depthwise(z)))
    assert conv.bias is conv.pointwise.bias
    assert conv.norm is None
    conv.settle()  # nothing to do, and no error


def test_copies_and_state() -> None:
    conv = made(constraint=NormBounded(bound=0.9, size=6))
    z = randn(2, 3, 6, 6, seed=1)
    for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(twin(z), conv(z))
    fresh = SeparableConv(3, 4, 3, constraint=NormBounded(bound=0.9, size=6)).double().eval()
    assert not torch.equal(fresh(z), conv(z))
    fresh.load_state_dict(conv.state_dict())
    assert torch.equal(fresh(z), conv(z))


def test_meta_device_and_autocast() -> None:
    with torch.device("meta"):
        conv = SeparableConv(3, 4, 3, constraint=NormBounded())
    assert conv.norm is not None
    assert conv.norm.v is not None
    assert conv.norm.v.is_meta
    conv = made(constraint=NormBounded(size=6)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert conv.operator().dtype == torch.bfloat16
        assert conv(torch.randn(1, 3, 6, 6)).dtype == torch.bfloat16


def test_a_block_has_operators_of_its_weights() -> None:
    block = OptEqBlock(
        3, 4, 2, kernel_size=3, separable=True, constraint=NormBounded(), bias=True
    ).double()
    shown = block.input_operator()
    x = randn(2, 2, 5, 5, seed=1)
    bias = block.U.bias.view(-1, 1, 1)
    torch.testing.assert_close(shown(x) + bias, block.U(x))
    assert block.operator().output_shape((3, 5, 5)) == (4, 5, 5)
