"""Kernels by other means: dense Jacobians by central differences, and the infinite-width limit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn


def dense_jacobian(model: nn.Module, x: Tensor, step: float = 1e-6) -> Tensor:
    """∂f/∂θ by central differences, one parameter's entry after the other, [N·K, P]."""
    columns = []
    with torch.no_grad():
        for p in model.parameters():
            flat = p.view(-1)
            for i in range(flat.numel()):
                old = float(flat[i])
                flat[i] = old + step
                above = model(x).flatten()
                flat[i] = old - step
                below = model(x).flatten()
                flat[i] = old
                columns.append((above - below) / (2 * step))
    return torch.stack(columns, dim=1)


def relu_limit(x: np.ndarray, hidden: int) -> np.ndarray:
    """The infinite-width kernel of a ReLU MLP in NTK parametrization (Jacot et al. 2018).

    f = vᵀφ/√n, φ = √2·relu(h), h = Wφ/√n, first h = Wx/√d. Σ¹ = xxᵀ/d and, layer by layer,
    Σ′ = √(qq′)(sin θ + (π − θ)cos θ)/π,  Σ̇ = (π − θ)/π,  Θ′ = Σ′ + Θ·Σ̇.
    """
    sigma = x @ x.T / x.shape[1]
    theta = sigma.copy()
    for _ in range(hidden):
        norm = np.sqrt(np.outer(sigma.diagonal(), sigma.diagonal()))
        cosine = np.clip(sigma / norm, -1.0, 1.0)
        angle = np.arccos(cosine)
        sigma = norm * (np.sin(angle) + (np.pi - angle) * cosine) / np.pi
        theta = sigma + theta * (np.pi - angle) / np.pi
    return theta


class NTKLinear(nn.Module):
    """x ↦ Wx/√fan_in with W ~ N(0, 1)."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT / self.weight.shape[1] ** 0.5


class ScaledReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2**0.5 * torch.relu(x)


def wide_network(inputs: int, width: int, hidden: int) -> nn.Sequential:
    """A ReLU MLP in NTK parametrization with one output."""
    sizes = [inputs, *[width] * hidden]
    parts: list[nn.Module] = []
    for a, b in pairwise(sizes):
        parts += [NTKLinear(a, b), ScaledReLU()]
    return nn.Sequential(*parts, NTKLinear(width, 1))
