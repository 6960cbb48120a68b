"""Symbols of convolutions against numpy's FFT of impulse responses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equilibria.problems.monotone_tiers import (
    kernel_norm_bound,
    phase_kernel,
    phase_kernel_down,
    symbol,
)
from tests.problems.test_operators import randn


def circular(z: torch.Tensor, kernel: torch.Tensor, origin: int) -> torch.Tensor:
    """Output pixel i reads i + a − origin, around the torus; by rolling, tap by tap."""
    out = z.new_zeros(z.shape[0], kernel.shape[0], *z.shape[2:])
    for a in range(kernel.shape[2]):
        for b in range(kernel.shape[3]):
            moved = torch.roll(z, (origin - a, origin - b), (2, 3))
            out = out + torch.einsum("oc,bcij->boij", kernel[:, :, a, b], moved)
    return out


@pytest.mark.parametrize(("rows", "cols"), [(6, 7), (3, 4), (2, 1)])
@pytest.mark.parametrize("origin", [0, 2])
def test_a_symbol_multiplies_the_transform(rows: int, cols: int, origin: int) -> None:
    """Also where the torus is smaller than the kernel."""
    kernel, z = randn(2, 3, 5, 5), randn(4, 3, rows, cols)
    expected = np.fft.rfft2(circular(z, kernel, origin).numpy())
    waves = np.fft.rfft2(z.numpy())
    found = np.einsum("jloc,bcjl->bojl", symbol(kernel, origin, rows, cols).numpy(), waves)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("taps", [1, 5, 9])
def test_a_kernel_on_four_phases(taps: int) -> None:
    kernel, z = randn(2, 3, taps, taps), randn(4, 3, 6, 8)
    phases, origin = phase_kernel(kernel)
    expected = F.pixel_unshuffle(circular(z, kernel, taps // 2), 2)
    found = circular(F.pixel_unshuffle(z, 2), phases, origin)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("taps", "shift"), [(1, 0), (3, 0), (3, 1), (5, 2), (5, 3), (7, 2)])
def test_a_stride_two_kernel_on_four_phases(taps: int, shift: int) -> None:
    kernel, z = randn(2, 3, taps, taps), randn(4, 3, 8, 6)
    phases, origin = phase_kernel_down(kernel, shift)
    expected = circular(z, kernel, shift)[..., ::2, ::2]
    found = circular(F.pixel_unshuffle(z, 2), phases, origin)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_the_bound_lies_above_the_supremum_and_close(taps: int) -> None:
    kernel = randn(3, 4, taps, taps)
    fine = np.fft.fft2(kernel.numpy(), s=(128, 128)).transpose(2, 3, 0, 1)
    supremum = float(np.linalg.norm(fine, 2, axis=(-2, -1)).max())
    found = float(kernel_norm_bound(kernel))
    assert supremum * (1 - 1e-12) <= found <= 1.15 * supremum


def test_the_bound_has_no_gradient() -> None:
    kernel = randn(2, 2, 3, 3).requires_grad_()
    assert not kernel_norm_bound(kernel).requires_grad
