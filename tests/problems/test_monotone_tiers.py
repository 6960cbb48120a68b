"""Monotone convolutions against dense matrices, their symbols against numpy's FFT."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.problems.monotone_operator import States
from equilibria.problems.monotone_tiers import (
    Plane,
    TieredMonotone,
    Torus,
    kernel_norm_bound,
    make_geometry,
)
from tests.problems.test_monotone_operator import modulus
from tests.problems.test_operators import conv_matrix as plane_matrix
from tests.problems.test_operators import randn

Array = NDArray[np.float64]
Size = tuple[int, int]


def conv_matrix(
    kernel: Array, size: Size, padding: str, *, stride: int = 1, margin: int = 0
) -> Array:
    """The convolution as a matrix, entry by entry: output pixel j reads the pixels stride·j + a.

    On the plane, outputs go from −margin to ⌈H/stride⌉ + margin; on the torus they wrap.
    """
    weight, p = torch.from_numpy(kernel), kernel.shape[-1] // 2
    if padding == "zeros":
        return plane_matrix(weight, *size, stride=stride, padding=p + stride * margin)
    pixels = np.arange(kernel.shape[1] * math.prod(size)).reshape(-1, *size)
    wrapped = np.pad(pixels, ((0, 0), (p, p), (p, p)), mode="wrap")
    flat = plane_matrix(weight, *wrapped.shape[1:], stride=stride)
    return np.asarray(flat @ np.eye(pixels.size)[wrapped.reshape(-1)])


def tier_matrix(
    a: Sequence[Array],
    b: Sequence[Array],
    n: Sequence[Array],
    m: float,
    sizes: Sequence[Size],
    padding: str,
) -> Array:
    """(1 − m)I − AᵀA + S: A has the blocks Aᵢ, Nᵢ; S is skew and clears the upper blocks of W."""
    margin = 0 if padding == "circular" else a[0].shape[-1]  # more outputs than any map reaches
    columns = []
    tiers = len(a)
    for i in range(tiers):
        blocks = []
        for j in range(tiers):
            if j == i:
                blocks.append(conv_matrix(a[i], sizes[i], padding, margin=margin))
            elif j == i + 1:
                blocks.append(conv_matrix(n[i], sizes[i], padding, stride=2, margin=margin))
            else:
                pixels = (sizes[j][0] + 2 * margin) * (sizes[j][1] + 2 * margin)
                blocks.append(
                    np.zeros((a[j].shape[0] * pixels, a[i].shape[1] * math.prod(sizes[i])))
                )
        columns.append(np.concatenate(blocks, 0))
    ends = np.cumsum([0, *(c.shape[1] for c in columns)])
    full = np.concatenate(columns, 1)
    gram = full.T @ full
    skew = np.zeros_like(gram)
    for i in range(tiers):
        own = slice(ends[i], ends[i + 1])
        turn = conv_matrix(b[i], sizes[i], padding)
        skew[own, own] = turn - turn.T
        if i + 1 < tiers:
            following = slice(ends[i + 1], ends[i + 2])
            skew[own, following] = gram[own, following]
            skew[following, own] = -gram[following, own]
    return (1.0 - m) * np.eye(len(gram)) - gram + skew


def matrix_of(function: Callable[[States], States], shapes: Sequence[tuple[int, ...]]) -> Array:
    """A linear map of states as a matrix, column by column."""
    lengths = [math.prod(shape) for shape in shapes]
    eye = torch.eye(sum(lengths), dtype=torch.float64)
    parts = torch.split(eye, lengths, 1)
    states = tuple(p.reshape(-1, *s) for p, s in zip(parts, shapes, strict=True))
    with torch.no_grad():
        return torch.cat([t.flatten(1) for t in function(states)], 1).numpy().T


class Drawn:
    """Random weights, our operator, and numpy's matrix."""

    def __init__(
        self, channels: Sequence[int], size: Size, k: int, padding: str, seed: int = 0
    ) -> None:
        source = np.random.default_rng(seed)

        def draw(out: int, cin: int) -> Array:
            # Few digits, so that products of two weights and W itself are exact in float64.
            return np.asarray(np.round(100 * source.standard_normal((out, cin, k, k))) / 256)

        a, b = ([draw(c, c) for c in channels] for _ in range(2))
        n = [draw(d, c) for c, d in itertools.pairwise(channels)]
        sizes = [(size[0] >> i, size[1] >> i) for i in range(len(channels))]
        self.m = 0.25
        self.weights: list[list[Tensor]] = [list(map(torch.from_numpy, t)) for t in (a, b, n)]
        self.operator = TieredMonotone(*self.weights, self.m, sizes, make_geometry(padding, k))
        self.w = tier_matrix(a, b, n, self.m, sizes, padding)
        self.shapes = [(c, *s) for c, s in zip(channels, sizes, strict=True)]
        lifted = self.operator.lifted()
        self.lifted_shapes = [(c, *s) for c, s in zip(channels, lifted.sizes, strict=True)]

    def state(self, batch: int = 2) -> States:
        source = torch.Generator().manual_seed(1)
        return tuple(
            torch.randn(batch, *s, dtype=torch.float64, generator=source) for s in self.shapes
        )


CASES = [
    ((3,), (4, 5), 3, "zeros"),
    ((2,), (1, 3), 5, "zeros"),
    ((3,), (4, 5), 3, "circular"),
    ((2,), (2, 3), 3, "circular"),
    ((2, 3), (4, 6), 3, "zeros"),
    ((2, 3), (4, 6), 3, "circular"),
    ((2, 1), (6, 4), 5, "zeros"),
    ((1, 2, 2), (8, 4), 3, "zeros"),
    ((1, 1, 2), (8, 8), 3, "circular"),
    ((2, 2), (2, 4), 1, "zeros"),
]
each = pytest.mark.parametrize(("channels", "size", "k", "padding"), CASES)


@each
def test_products_with_w_and_its_transpose(
    channels: tuple[int, ...], size: Size, k: int, padding: str
) -> None:
    case = Drawn(channels, size, k, padding)
    np.testing.assert_allclose(matrix_of(case.operator, case.shapes), case.w, atol=1e-12)
    np.testing.assert_allclose(matrix_of(case.operator.adjoint, case.shapes), case.w.T, atol=1e-12)


@each
def test_the_torus_around_the_maps_computes_the_same(
    channels: tuple[int, ...], size: Size, k: int, padding: str
) -> None:
    """W is the part of the lifted W that leads from the maps to the maps."""
    case = Drawn(channels, size, k, padding)
    lifted = case.operator.lifted()
    border = lifted.border
    assert border == (k // 2 if padding == "zeros" else 0)
    inside = []
    for shape in case.lifted_shapes:
        mask = np.zeros(shape, dtype=bool)
        mask[:, border : shape[1] - border, border : shape[2] - border] = True
        inside.append(mask.reshape(-1))
    keep = np.concatenate(inside)
    whole = matrix_of(lifted, case.lifted_shapes)
    np.testing.assert_allclose(whole[np.ix_(keep, keep)], case.w, atol=1e-12)
    assert modulus(whole) >= case.m - 1e-12


@each
@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_the_resolvent(
    channels: tuple[int, ...], size: Size, k: int, padding: str, alpha: float
) -> None:
    case = Drawn(channels, size, k, padding)
    lifted = case.operator.lifted()
    whole = matrix_of(lifted, case.lifted_shapes)
    inverse = np.linalg.inv(np.eye(len(whole)) + alpha * (np.eye(len(whole)) - whole))
    resolvent = lifted.resolvent(alpha)
    np.testing.assert_allclose(matrix_of(resolvent, case.lifted_shapes), inverse, atol=1e-12)


@each
def test_norms_and_modulus(channels: tuple[int, ...], size: Size, k: int, padding: str) -> None:
    case = Drawn(channels, size, k, padding)
    difference = float(np.linalg.norm(np.eye(len(case.w)) - case.w, 2))
    upper, norm = case.operator.norm_uppers()
    assert difference <= upper
    assert np.linalg.norm(case.w, 2) <= norm
    # The cheap bound lies at most 10% (grid) and c^{1/64} (powers) above the close one's.
    assert upper * 0.98 <= float(case.operator.norm_bound()) <= 1.25 * upper
    found = case.operator.modulus_lower()
    assert case.m - 1e-10 <= found <= modulus(case.w) + 1e-12
    assert found <= case.m


def test_scale_is_the_root_mean_square_of_the_singular_values() -> None:
    case = Drawn((3,), (5, 6), 3, "circular")
    singular = np.linalg.svd(np.eye(len(case.w)) - case.w, compute_uv=False)
    assert float(case.operator.scale()) == pytest.approx(np.sqrt(np.mean(singular**2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_modulus_counts_the_rounding_of_the_composed_kernel(dtype: torch.dtype) -> None:
    case = Drawn((2, 2), (4, 4), 3, "zeros")
    weights = [[t.to(dtype) for t in part] for part in case.weights]
    operator = TieredMonotone(*weights, case.m, case.operator.sizes, Plane(1))
    true = modulus(matrix_of(operator.double(), case.shapes))
    found = operator.modulus_lower()
    assert found <= true + 1e-12
    # Rounding of 25 taps of size about 5 with 4 channel pairs, bounded in the Frobenius norm.
    assert found >= case.m - 500 * torch.finfo(dtype).eps


def test_the_modulus_falls_below_m_where_rounding_takes_it() -> None:
    """Pointwise kernels with AᵀA of rank one: nothing beside m, and bfloat16 takes some of it."""
    source = torch.Generator().manual_seed(0)
    a, b = (torch.randn(12, 12, 1, 1, generator=source).to(torch.bfloat16) for _ in range(2))
    a[1:] = 0.0
    operator = TieredMonotone([a], [b], [], 0.1, [(1, 1)], Plane(0))
    true = modulus(matrix_of(operator.double(), [(12, 1, 1)]))
    assert true < 0.1 - 1e-4
    assert operator.modulus_lower() <= true + 1e-12


@each
def test_the_bound_on_rounding_covers_the_rounding(
    channels: tuple[int, ...], size: Size, k: int, padding: str
) -> None:
    case = Drawn(channels, size, k, padding)
    z = case.state()
    flat = torch.cat([t.flatten(1) for t in z], 1).numpy().astype(np.longdouble)
    extended = case.w.astype(np.longdouble)  # W is exact
    for transposed, matrix in ((False, extended.T), (True, extended)):
        product = case.operator.adjoint(z) if transposed else case.operator(z)
        found = torch.cat([t.flatten(1) for t in product], 1).numpy()
        error = np.abs(found - flat @ matrix).astype(np.float64)
        parts = case.operator.rounding(z, transposed=transposed)
        bound = torch.cat([t.flatten(1) for t in parts], 1).numpy()
        assert (error <= bound).all()
        assert bound.max() < 1e-11


def test_gradients_reach_every_weight() -> None:
    case = Drawn((1, 2), (4, 4), 3, "zeros")
    z = case.state()
    flat = [t.clone().requires_grad_() for part in case.weights for t in part]

    def run(*weights: Tensor) -> tuple[Tensor, ...]:
        a, b, n = weights[:2], weights[2:4], weights[4:]
        operator = TieredMonotone(a, b, n, 0.3, case.operator.sizes, Plane(1))
        lifted = operator.lifted()
        u = tuple(torch.nn.functional.pad(t, (1, 1, 1, 1)) for t in z)
        return (*operator(z), *lifted.resolvent(0.7)(u))

    assert torch.autograd.gradcheck(run, flat, fast_mode=True)


def test_the_resolvent_of_a_plane_is_refused() -> None:
    with pytest.raises(ValueError, match=r"resolvent of lifted\(\)"):
        Drawn((1,), (3, 3), 3, "zeros").operator.resolvent(1.0)


def test_wrong_numbers_of_tiers() -> None:
    a = [torch.zeros(1, 1, 3, 3)]
    with pytest.raises(ValueError, match="one N fewer, got 1, 1, 2 and 0"):
        TieredMonotone(a, a, [], 1.0, [(4, 4), (2, 2)], Torus(1))


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_the_bound_lies_above_the_supremum_and_close(taps: int) -> None:
    kernel = randn(3, 4, taps, taps)
    fine = np.fft.fft2(kernel.numpy(), s=(128, 128)).transpose(2, 3, 0, 1)
    supremum = float(np.linalg.norm(fine, 2, axis=(-2, -1)).max())
    found = kernel_norm_bound(kernel.requires_grad_())
    assert not found.requires_grad
    assert supremum * (1 - 1e-12) <= found <= 1.15 * supremum
