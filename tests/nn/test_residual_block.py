"""ResidualBlock: Eq 4.1 of Nguyen 2022, operation by operation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

import equilibria as eq
from equilibria.nn import NormBounded, ResidualBlock, WeightNormalized
from tests.problems.test_operators import randn

Array = NDArray[np.float64]


def convolve(kernel: Array, image: Array) -> Array:
    """Cross-correlation with zero padding, one output pixel after the other."""
    k = kernel.shape[2] // 2
    padded = np.pad(image, ((0, 0), (k, k), (k, k)))
    out = np.zeros((kernel.shape[0], *image.shape[1:]))
    for i in range(image.shape[1]):
        for j in range(image.shape[2]):
            window = padded[:, i : i + kernel.shape[2], j : j + kernel.shape[3]]
            out[:, i, j] = (kernel * window).sum((1, 2, 3))
    return out


def group_norm(image: Array, groups: int, weight: Array, bias: Array) -> Array:
    cut = image.reshape(groups, -1)
    scaled = (cut - cut.mean(1, keepdims=True)) / np.sqrt(cut.var(1, keepdims=True) + 1e-5)
    return scaled.reshape(image.shape) * weight[:, None, None] + bias[:, None, None]


@pytest.mark.parametrize("size", [3, 5])
def test_the_formula(size: int) -> None:
    torch.manual_seed(0)
    block = ResidualBlock(4, 6, groups=2, kernel_size=size, std=0.3).double()
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    z, x = randn(2, 4, 5, 6), randn(2, 4, 5, 6)
    w = {name: p.detach().numpy() for name, p in block.named_parameters()}
    for i in range(2):
        a, b = z[i].numpy(), x[i].numpy()
        inner = np.maximum(convolve(w["conv1.weight"], a), 0)
        inner = group_norm(inner, 2, w["norm1.weight"], w["norm1.bias"])
        inner = b + convolve(w["conv2.weight"], inner)
        inner = group_norm(inner, 2, w["norm2.weight"], w["norm2.bias"])
        out = group_norm(np.maximum(a + inner, 0), 2, w["norm3.weight"], w["norm3.bias"])
        np.testing.assert_allclose(block(z, x)[i].detach().numpy(), out, rtol=1e-9, atol=1e-10)


def test_the_start_of_the_weights() -> None:
    """§4.1.1: the standard deviation 0.01 settles at once, 1 does not."""
    torch.manual_seed(0)
    x = torch.randn(4, 16, 8, 8)
    residuals = {}
    for std in (0.01, 1.0):
        block = ResidualBlock(16, 32, std=std)
        for conv in (block.conv1, block.conv2):
            weight: Tensor = conv.weight  # type: ignore[assignment]
            assert 0.9 * std < float(weight.detach().std()) < 1.1 * std
        layer = eq.nn.DEQ(block)
        solution = layer.solve(x, solver=eq.Picard(rtol=0.0, max_steps=12))
        residuals[std] = float(solution.stats.relative.max())
    assert residuals[0.01] < 0.1 * residuals[1.0]


def test_sizes_and_constraints() -> None:
    block = ResidualBlock(8)
    assert block.inner == 8
    assert sum(p.numel() for p in block.parameters()) == 2 * 9 * 64 + 6 * 8
    plain = ResidualBlock(8, 16, affine=False, constraint=WeightNormalized())
    assert is_parametrized(plain.conv1)
    assert is_parametrized(plain.conv2)
    assert sum(p.numel() for p in plain.parameters()) == 2 * 9 * 128 + 16 + 8
    bounded = ResidualBlock(8, constraint=NormBounded(bound=0.01))
    assert float(bounded.conv1.weight.detach().norm()) < 1.0


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"groups=8 .* must divide channels=12, and 12 % 8 = 4"):
        ResidualBlock(12)
    with pytest.raises(ValueError, match=r"must divide inner=12"):
        ResidualBlock(16, 12)
    with pytest.raises(ValueError, match="odd kernel size"):
        ResidualBlock(8, kernel_size=4)
    with pytest.raises(ValueError, match=r"channels=0\): expected an integer of at least 1"):
        ResidualBlock(0)
    with pytest.raises(ValueError, match=r"std=0.*out of range"):
        ResidualBlock(8, std=0.0)
    block = ResidualBlock(8)
    with pytest.raises(ValueError, match=r"takes z \[B, 8, H, W\], got shape \(2, 4, 3, 3\)"):
        block(torch.zeros(2, 4, 3, 3), torch.zeros(2, 8, 3, 3))
    with pytest.raises(ValueError, match=r"takes x \[B, 8, H, W\]"):
        block(torch.zeros(2, 8, 3, 3), torch.zeros(2, 8, 3))
