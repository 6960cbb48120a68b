"""Norm bounds against dense SVDs of matrices built entry by entry."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from equilibria.problems import gaussian, norms
from equilibria.problems.norms import (
    _largest,
    convolution_norm_upper,
    dense_norm,
    metric_root,
    patched_kernel,
    top_ritz,
)
from equilibria.problems.operators import ConvOperator, SeparableConvOperator
from equilibria.problems.patches import Patches
from tests.problems.test_operators import conv_matrix, randn


def spectral(matrix: np.ndarray) -> float:
    return float(np.linalg.svd(matrix, compute_uv=False)[0])


def symbol_supremum(weight: Tensor, stride: int = 1, points: int = 96) -> float:
    """sup_θ of the infinite convolution's norm, by a fine grid and the folding of frequencies.

    Downsampling by s folds the s² frequencies that differ by 2π/s: the symbol of the strided map
    at φ is the row [K̂(θ)] over those θ, divided by s.
    """
    out, cin = weight.shape[:2]
    whole = np.fft.fft2(weight.double().numpy(), s=(stride * points, stride * points))
    folded = whole.reshape(out, cin, stride, points, stride, points).transpose(3, 5, 0, 1, 2, 4)
    rows = folded.reshape(points, points, out, -1) / stride
    return float(np.linalg.norm(rows[:, : points // 2 + 1], 2, axis=(2, 3)).max())


@given(
    m=st.integers(1, 8), n=st.integers(1, 8), seed=st.integers(0, 10**6), scale=st.floats(1e-6, 1e6)
)
@settings(max_examples=50, deadline=None)
def test_dense_upper_is_above_and_tight(m: int, n: int, seed: int, scale: float) -> None:
    a = scale * randn(m, n, seed=seed)
    bound, sigma = dense_norm(a), spectral(a.numpy())
    assert sigma <= bound.upper <= sigma * (1 + 1e-12)
    assert bound.estimate <= bound.upper
    assert bound.estimate == pytest.approx(sigma, rel=1e-13)


def test_degenerate_matrices() -> None:
    assert dense_norm(torch.zeros(3, 2)).upper == 0.0
    assert dense_norm(torch.zeros(0, 2)).upper == 0.0
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or infinite"):
            dense_norm(torch.full((2, 2), bad))
        with pytest.raises(ValueError, match="NaN or infinite"):
            convolution_norm_upper(torch.full((1, 1, 3, 3), bad))


UNSTRIDED = [(2, 3, 3, 1), (3, 2, 5, 1), (2, 2, 7, 1), (2, 2, 4, 1)]
STRIDED = [(3, 2, 3, 2), (2, 2, 2, 2), (2, 2, 5, 3), (3, 3, 1, 2)]


@pytest.mark.parametrize(("out", "cin", "k", "stride"), [*UNSTRIDED, *STRIDED])
@pytest.mark.parametrize("seed", range(3))
def test_convolution_upper_against_the_infinite_supremum(
    out: int, cin: int, k: int, stride: int, seed: int
) -> None:
    weight = randn(out, cin, k, k, seed=seed)
    upper = convolution_norm_upper(weight, stride=(stride, stride))
    reference = symbol_supremum(weight, stride)  # from below, by 0.2% at most on this grid
    assert reference <= upper <= 1.03 * reference


def test_supremum_off_the_grid_is_still_covered() -> None:
    """The peak of a kernel is placed between grid points, where sampling alone falls short."""
    taps = torch.arange(3.0, dtype=torch.float64)
    step = 2 * math.pi / 32
    for shift in np.linspace(0.0, 1.0, 9):
        peak = torch.cos(taps * step * (5 + float(shift)))
        weight = torch.outer(peak, peak)[None, None]
        fine = np.linspace(-np.pi, np.pi, 200_001)
        line = sum(float(peak[i]) * np.exp(1j * fine * i) for i in range(3))
        assert float(np.abs(line).max()) ** 2 <= convolution_norm_upper(weight)


@given(
    out=st.integers(1, 3),
    cin=st.integers(1, 3),
    k=st.sampled_from([1, 3, 5]),
    stride=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2]),
    height=st.integers(2, 6),
    width=st.integers(2, 6),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_convolution_upper_is_above_every_finite_matrix(
    out: int, cin: int, k: int, stride: int, groups: int, height: int, width: int, seed: int
) -> None:
    weight = randn(out * groups, cin, k, k, seed=seed)
    op = ConvOperator(weight, stride, groups=groups)
    sigma = spectral(
        conv_matrix(weight, height, width, stride=stride, padding=k // 2, groups=groups)
    )
    bound = op.norm((cin * groups, height, width))
    assert sigma <= bound.upper
    assert bound.estimate <= sigma * (1 + 1e-12)
    assert bound.estimate >= 0.98 * sigma
    assert bound.estimate <= bound.upper


@given(
    k=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    groups=st.sampled_from([1, 2]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_the_bound_for_one_size_of_maps_is_above_its_matrix(
    k: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    size: tuple[int, int],
    groups: int,
    seed: int,
) -> None:
    """Columns of the matrix from torch's own convolution of unit vectors, in float64."""
    assume(all(n + 2 * p >= side for n, p, side in zip(size, padding, k, strict=True)))
    weight = randn(2 * groups, 2, *k, seed=seed)
    units = torch.eye(2 * groups * math.prod(size), dtype=torch.float64)
    units = units.reshape(-1, 2 * groups, *size)
    image = torch.nn.functional.conv2d(units, weight, None, stride, padding, 1, groups)
    sigma = spectral(image.flatten(1).numpy())
    op = ConvOperator(weight, stride, padding, groups)
    upper = op.norm_upper_on(image.shape[1:])
    assert sigma <= upper <= op.norm_upper() * (1 + 1e-12)
    unpadded = {"stride": stride, "groups": groups, "out_size": image.shape[2:]}
    assert sigma <= convolution_norm_upper(weight, **unpadded)  # type: ignore[arg-type]


def test_a_small_map_takes_few_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty channels on 4 × 4 pixels: 13 of 544 frequencies, and closer to the matrix."""
    weight, seen, real = randn(20, 20, 3, 3), list[int](), norms._largest

    def counted(gram: Tensor, best: float) -> float:
        seen.append(len(gram))
        return real(gram, best)

    monkeypatch.setattr(norms, "_largest", counted)
    upper = ConvOperator(weight).norm_upper_on((20, 4, 4))
    assert sum(seen) == 13
    sigma = spectral(conv_matrix(weight, 4, 4, padding=1))
    assert sigma <= upper < convolution_norm_upper(weight)
    assert sum(seen) == 13 + 32 * 15 + 2 * 17


@pytest.mark.parametrize(("out", "cin", "groups"), [(1, 1, 1), (3, 1, 3), (3, 2, 1)])
def test_work_in_small_blocks_skips_no_maximum(
    out: int, cin: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frequencies are left out only where they cannot raise the maximum of those before."""
    for seed in range(8):
        weight = randn(out, cin, 3, 3, seed=seed)
        whole = convolution_norm_upper(weight, groups=groups)
        with monkeypatch.context() as patch:
            patch.setattr("equilibria.problems.norms._CHUNK", 1)
            assert convolution_norm_upper(weight, groups=groups) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_1x1_convolution_and_group_blocks_are_exact(seed: int) -> None:
    weight = randn(4, 3, 1, 1, seed=seed)
    assert convolution_norm_upper(weight) == pytest.approx(
        spectral(weight[:, :, 0, 0].numpy()), rel=1e-12
    )
    grouped = convolution_norm_upper(weight, groups=2)
    blocks = [spectral(b.numpy()) for b in weight[:, :, 0, 0].chunk(2)]
    assert grouped == pytest.approx(max(blocks), rel=1e-12)


def test_separable_bound_is_that_of_the_composed_symbol() -> None:
    depthwise, pointwise = randn(3, 1, 3, 3), randn(4, 3, 1, 1, seed=1)
    op = SeparableConvOperator(depthwise, pointwise)
    matrix = conv_matrix(pointwise, 6, 6) @ conv_matrix(depthwise, 6, 6, padding=1, groups=3)
    sigma = spectral(matrix)
    upper = op.norm_upper()
    product = convolution_norm_upper(depthwise, groups=3) * convolution_norm_upper(pointwise)
    assert sigma <= upper < product
    composed = pointwise * depthwise[:, 0]
    assert upper <= 1.03 * symbol_supremum(composed)
    estimate = op.norm((3, 6, 6)).estimate
    assert 0.98 * sigma <= estimate <= sigma * (1 + 1e-12)


def test_metric_root_squares_to_the_metric() -> None:
    hidden = randn(6, 3)
    root, upper = metric_root(hidden @ hidden.T)
    torch.testing.assert_close(root @ root.T, hidden @ hidden.T, rtol=0, atol=1e-12)
    sigma = spectral(hidden.numpy())
    assert sigma <= upper <= sigma * (1 + 1e-12)
    with pytest.raises(ValueError, match="semidefinite"):
        metric_root(torch.diag(torch.tensor([1.0, -0.1])))


@pytest.mark.parametrize(("stride", "size", "k"), [(1, 2, 3), (2, 2, 3), (1, 1, 3), (1, 3, 1)])
def test_patched_kernel_is_convolution_then_patches_then_hidden(
    stride: int, size: int, k: int
) -> None:
    weight, hidden = randn(4, 3, k, k), randn(2 * size * size, 5, seed=1)
    n = 6 * stride
    z = randn(2, 3, n, n, seed=2)
    rows = Patches(channels=2, size=size).split(ConvOperator(weight, stride)(z)) @ hidden
    kernel, step = patched_kernel(weight, hidden, stride=(stride, stride), channels=2, size=size)
    made = ConvOperator(kernel, step, padding=k // 2)(z)
    # [B, group·m, h, w] → the rows' order (group, h, w), m inside
    made = made.reshape(2, 2, 5, -1).transpose(2, 3).reshape(2, -1, 5)
    torch.testing.assert_close(made, rows, rtol=0, atol=1e-12)


def test_a_known_kernel_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    first = convolution_norm_upper(weight)

    def dear(*_: object) -> float:
        raise AssertionError("the bound of this kernel is known")

    with monkeypatch.context() as patch:
        patch.setattr(norms, "_symbol_norm_upper", dear)
        assert convolution_norm_upper(weight.clone()) == first
        for other in (2 * weight, weight.float()):  # other contents, other bits
            with pytest.raises(AssertionError, match="known"):
                convolution_norm_upper(other)
        with pytest.raises(AssertionError, match="known"):
            convolution_norm_upper(weight, stride=(2, 2))
    assert convolution_norm_upper(2 * weight) == pytest.approx(2 * first)


@pytest.mark.parametrize(
    ("shape", "stride"), [((40, 32, 3, 3), 1), ((32, 48, 2, 3), 1), ((40, 28, 4, 4), 2)]
)
def test_wide_kernels_by_cholesky_against_singular_values(
    shape: tuple[int, int, int, int], stride: int
) -> None:
    """Above 16 channels few eigenvalues are computed: the bound is still one, and no looser."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # One strong frequency that a random start of the power iteration hardly sees.
    outer = torch.outer(torch.ones(shape[0]), torch.linspace(-1, 1, shape[1])).double()
    weight += 0.5 * outer[:, :, None, None] * (-1.0) ** torch.arange(shape[2])[:, None]
    true = symbol_supremum(weight, stride, 32)
    upper = convolution_norm_upper(weight, stride=(stride, stride))
    assert true <= upper <= true * 1.0101


def test_largest_finds_what_a_few_steps_of_lanczos_miss() -> None:
    """Of a dense spectrum up to 5 they see less than 4.97, of another all: Cholesky must object."""
    dense = torch.diag(torch.linspace(0.0, 5.0, 100))
    grams = torch.stack([dense, 4.97 * torch.eye(100)]).to(torch.complex128)
    start = randn(100, 1).to(grams).expand(2, -1, -1)
    assert int(top_ritz(lambda v: grams @ v, start, steps=12).argmax()) == 1
    found = _largest(grams, 0.0)
    assert 5.0 <= found <= 5.0 * (1.0 + 2e-5)
    assert _largest(grams, 50.0) == 50.0


def test_what_cholesky_lets_pass_is_below_the_bound() -> None:
    """Two eigenvalues closer than the tolerance: the smaller is computed, the larger let pass."""
    plain = torch.eye(80, dtype=torch.complex128)
    larger = plain.clone()
    larger[0, 0] += 5e-6  # one direction that the start hardly sees
    grams = torch.stack([plain * (1.0 + 1e-9), larger])
    assert _largest(grams, 0.0) >= 1.0 + 5e-6


@pytest.mark.parametrize("scale", [1e-200, 1e-85, 1e85])
def test_the_bound_scales_with_the_kernel(scale: float) -> None:
    weight = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    plain = convolution_norm_upper(weight)
    assert convolution_norm_upper(scale * weight) == pytest.approx(scale * plain, rel=1e-9)
    assert convolution_norm_upper(torch.zeros(2, 2, 3, 3)) == 0.0


def test_the_estimate_is_the_largest_singular_value_from_below() -> None:
    """Lanczos's method on a flat spectrum, where power iteration is slow, against a dense SVD."""
    weight = randn(6, 5, 3, 3)
    sigma = spectral(conv_matrix(weight, 9, 8, padding=1))
    estimate = ConvOperator(weight).norm((5, 9, 8)).estimate
    assert sigma * (1 - 1e-5) <= estimate <= sigma * (1 + 1e-12)


def test_a_flat_hidden_matrix_needs_no_patched_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """‖A‖ = ‖W‖‖W_h‖ for W_hW_hᵀ = I, at the price of ‖W‖; any other W_h takes the long way."""
    weight, patches = randn(4, 3, 3, 3), Patches(channels=2, size=2)
    c = randn(1, 4, 6, 6, seed=1)
    flat = 0.7 * torch.linalg.qr(randn(12, 8, seed=2))[0].T
    matrix = conv_matrix(weight, 6, 6, padding=1)

    def mu(hidden: Tensor) -> float:
        return gaussian.Gaussian(weight, c, patches=patches, hidden=hidden).mu_upper(tight=True)

    with monkeypatch.context() as patch:
        patch.setattr(gaussian, "patched_kernel", None)
        assert 0.7 * spectral(matrix) <= mu(flat) <= 0.7 * 1.0101 * symbol_supremum(weight)
        for other in (flat[:, :6], flat * torch.linspace(0.99, 1.0, 8)[:, None].double()):
            with pytest.raises(TypeError):
                mu(other)


def test_ritz_values_near_underflow() -> None:
    """The Hessian of a saturated function: LAPACK does not converge on 1e-101 by itself."""
    q = torch.linalg.qr(torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0)).double()).Q
    size = torch.tensor([1e-101, 1e-21, 1.0], dtype=torch.float64)[:, None, None]
    a = size * (q * torch.tensor([3.0, 1, 0, 0, -1]).double()) @ q.mT
    found = top_ritz(lambda v: (a @ v[..., None])[..., 0], torch.ones(3, 5).double())
    torch.testing.assert_close(found / size.flatten(), torch.full_like(found, 3.0))


def test_a_block_of_frequencies_where_the_symbol_vanishes() -> None:
    """A difference along rows has K̂ = 0 at all frequencies along columns; this did not end."""
    block = torch.zeros(3, 20, 20, dtype=torch.complex128)
    assert _largest(block, 0.0) == 0.0
