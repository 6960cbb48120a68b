"""Convolutions of monotone layers on a plane (zero padding) or a torus (circular padding).

On the plane every map is part of an infinite one that is zero elsewhere: A and the down-sampling N
keep all of their outputs that a map can reach, p = k//2 more pixels on each side than the map, so
that AᵀA is a compression of the infinite one and its kernel can be composed.

The torus that stands for a plane has a border of p pixels around each map. Where the border holds
zeros nothing that leaves one side reaches the other, so circular convolutions compute the
zero-padded ones; the prior holds it at zero (monDEQ's border ReLU). On a torus FFT inverts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Geometry", "Plane", "Torus", "composed_kernel", "delta", "transposed_kernel"]


def transposed_kernel(kernel: Tensor) -> Tensor:
    """The kernel of Kᵀ: channels exchanged, taps mirrored. [o, i, k, k] → [i, o, k, k]."""
    return kernel.transpose(0, 1).flip(2, 3)


def delta(channels: int, like: Tensor, reach: int) -> Tensor:
    """The kernel of I with 2·reach + 1 taps, [channels, channels, ., .]."""
    eye = torch.eye(channels, dtype=like.dtype, device=like.device)
    return F.pad(eye[:, :, None, None], (reach,) * 4)


def composed_kernel(a: Tensor, b: Tensor, m: float) -> Tensor:
    """The one kernel of (1 − m)I − AᵀA + B − Bᵀ; a, b [c, c, k, k] → [c, c, 2k − 1, 2k − 1].

    (AᵀA)[c, c', s] = Σ_o Σ_a A[o, c', a + s]A[o, c, a], the correlation of A with itself.
    """
    k = a.shape[-1]
    maps = a.transpose(0, 1)
    gram = F.conv2d(maps, maps, padding=k - 1).transpose(0, 1)
    skew = F.pad(b - transposed_kernel(b), (k // 2,) * 4)
    return (1.0 - m) * delta(b.shape[0], b, k - 1) - gram + skew


class Geometry(ABC):
    """How maps continue beyond their edges. p is half the taps of A, B and N, rounded down."""

    p: int

    @abstractmethod
    def same(self, z: Tensor, kernel: Tensor) -> Tensor:
        """A convolution with the taps of the composed kernel; [B, c, H, W] → the same."""

    @abstractmethod
    def out(self, z: Tensor, a: Tensor) -> Tensor:
        """Az with every output that it reaches."""

    @abstractmethod
    def out_adjoint(self, y: Tensor, a: Tensor) -> Tensor:
        """Aᵀy."""

    @abstractmethod
    def down(self, z: Tensor, n: Tensor) -> Tensor:
        """Nz with stride 2, on the grid of ``out`` of the next tier."""

    @abstractmethod
    def down_adjoint(self, y: Tensor, n: Tensor) -> Tensor:
        """Nᵀy."""


@dataclass(frozen=True)
class Plane(Geometry):
    """Zero padding. ``out`` has p more pixels on each side; N's output j reads 2j − p … 2j + p."""

    p: int

    def same(self, z: Tensor, kernel: Tensor) -> Tensor:
        return F.conv2d(z, kernel, padding=2 * self.p)

    def out(self, z: Tensor, a: Tensor) -> Tensor:
        return F.conv2d(z, a, padding=2 * self.p)

    def out_adjoint(self, y: Tensor, a: Tensor) -> Tensor:
        return F.conv_transpose2d(y, a, padding=2 * self.p)

    def down(self, z: Tensor, n: Tensor) -> Tensor:
        return F.conv2d(z, n, stride=2, padding=3 * self.p)

    def down_adjoint(self, y: Tensor, n: Tensor) -> Tensor:
        return F.conv_transpose2d(y, n, stride=2, padding=3 * self.p, output_padding=1)


@dataclass(frozen=True)
class Torus(Geometry):
    """Circular padding; with ``border`` p the torus around a plane's maps, without it a map itself.

    With a border a map of H pixels sits in a torus of H + 2p. N leads to a torus of half its size,
    (H + 2p)/2 = H/2 + p pixels, which lie inside the next tier's H/2 + 2p where the plane has
    them; the others are zero.
    """

    p: int
    border: int = 0

    @property
    def shift(self) -> int:
        """N's first output reads from the pixel −shift on."""
        return 2 * (self.p // 2) if self.border else self.p

    def same(self, z: Tensor, kernel: Tensor) -> Tensor:
        return F.conv2d(_wrap(z, 2 * self.p, 2 * self.p), kernel)

    def out(self, z: Tensor, a: Tensor) -> Tensor:
        return F.conv2d(_wrap(z, self.p, self.p), a)

    def out_adjoint(self, y: Tensor, a: Tensor) -> Tensor:
        return F.conv2d(_wrap(y, self.p, self.p), transposed_kernel(a))

    def _sides(self) -> tuple[int, int]:
        return self.shift, max(0, 2 * self.p - 1 - self.shift)

    def _room(self) -> tuple[int, int]:
        """The zeros around N's output in the next tier's torus, on the left and on the right."""
        return (self.border - self.border // 2, self.border // 2)

    def down(self, z: Tensor, n: Tensor) -> Tensor:
        y = F.conv2d(_wrap(z, *self._sides()), n, stride=2)
        return F.pad(y, self._room() * 2) if self.border else y

    def down_adjoint(self, y: Tensor, n: Tensor) -> Tensor:
        left, right = self._room()
        if self.border:
            y = y[..., left : y.shape[-2] - right, left : y.shape[-1] - right]
        spread = F.conv_transpose2d(y, n, stride=2, output_padding=0 if self.p else 1)
        return _unwrap(spread, *self._sides())


def _wrap(z: Tensor, left: int, right: int) -> Tensor:
    if left == 0 and right == 0:
        return z
    return F.pad(z, (left, right, left, right), mode="circular")


def _unwrap(y: Tensor, left: int, right: int) -> Tensor:
    """The adjoint of :func:`_wrap`: what was copied to the sides is added where it came from."""
    for dim in (-1, -2):
        size = y.shape[dim] - left - right
        core = y.narrow(dim, left, size)
        before = (0, 0) if dim == -2 else ()
        if left:
            core = core + F.pad(y.narrow(dim, 0, left), (*before, size - left, 0))
        if right:
            core = core + F.pad(y.narrow(dim, left + size, right), (*before, 0, size - right))
        y = core
    return y
