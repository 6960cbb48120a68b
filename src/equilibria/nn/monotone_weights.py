"""The weights of monotone layers, from which W = (1 − m)I − AᵀA + B − Bᵀ is made once a solve."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equilibria.problems.monotone_operator import DenseMonotone, MonotoneOperator
from equilibria.problems.monotone_tiers import TieredMonotone, make_geometry

__all__ = ["DenseWeights", "TieredWeights"]


def product_dtype(weight: Tensor) -> torch.dtype:
    """The precision of products with W: autocast's where it is on, else the weight's own."""
    kind = weight.device.type
    if weight.dtype == torch.float32 and not weight.is_meta and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


class DenseWeights(nn.Module):
    """A, B [n, n], drawn as ``nn.Linear`` draws (monDEQ's MONSingleFc)."""

    def __init__(self, channels: int, m: float) -> None:
        super().__init__()
        self.m = m
        self.A = nn.Parameter(torch.empty(channels, channels))
        self.B = nn.Parameter(torch.empty(channels, channels))
        for weight in (self.A, self.B):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    def operator(self, sizes: Sequence[tuple[int, int]]) -> MonotoneOperator:
        """W as a matrix; ``sizes`` is empty."""
        dtype = product_dtype(self.A)
        with torch.autocast(self.A.device.type, enabled=False):
            return DenseMonotone(self.A, self.B, self.m, dtype)

    def extra_repr(self) -> str:
        return f"{self.A.shape[0]}, m={self.m:g}"


class TieredWeights(nn.Module):
    """Kernels in direction and length: Aᵢ = gᵢA/‖A‖_F, Bᵢ = hᵢB/‖B‖_F, Nᵢ = gᵢ′N/‖N‖_F.

    g, g′ and h are learned and start at 1, as in monotone_op_net, which scales AᵀA by g itself:
    there a g below zero ends monotonicity (one tier) or is NaN (several). Here its square stands,
    so W is monotone wherever training goes.
    """

    def __init__(self, channels: Sequence[int], kernel_size: int, m: float, padding: str) -> None:
        super().__init__()
        self.m = m
        self.kernel_size, self.padding = kernel_size, padding
        self.A = nn.ParameterList([self._kernel(c, c) for c in channels])
        self.B = nn.ParameterList([self._kernel(c, c) for c in channels])
        steps = zip(channels[1:], channels[:-1], strict=True)
        self.N = nn.ParameterList([self._kernel(o, i) for o, i in steps])
        self.g = nn.Parameter(torch.ones(len(channels)))
        self.h = nn.Parameter(torch.ones(len(channels)))
        self.g_down = nn.Parameter(torch.ones(len(channels) - 1)) if len(channels) > 1 else None

    def _kernel(self, outputs: int, inputs: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(outputs, inputs, self.kernel_size, self.kernel_size))
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        return weight

    def operator(self, sizes: Sequence[tuple[int, int]]) -> MonotoneOperator:
        """W on maps of these sizes, one a tier."""
        first = self.A[0]
        geometry = make_geometry(self.padding, self.kernel_size)
        dtype = product_dtype(first)
        with torch.autocast(first.device.type, enabled=False):
            a = [_scaled(w, self.g[i]) for i, w in enumerate(self.A)]
            b = [_scaled(w, self.h[i]) for i, w in enumerate(self.B)]
            n = []
            if self.g_down is not None:
                n = [_scaled(w, self.g_down[i]) for i, w in enumerate(self.N)]
            return TieredMonotone(a, b, n, self.m, sizes, geometry, dtype)

    def extra_repr(self) -> str:
        channels = tuple(w.shape[0] for w in self.A)
        return f"{channels}, kernel_size={self.kernel_size}, m={self.m:g}, padding={self.padding!r}"


def _scaled(weight: Tensor, length: Tensor) -> Tensor:
    """length·weight/‖weight‖_F; zero stays zero."""
    norm: Tensor = torch.linalg.vector_norm(weight)
    return weight * (length / norm.clamp_min(torch.finfo(norm.dtype).tiny))
