"""Operators against the matrices that loops write out; transposes, shapes, the dot test."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from equilibria.problems.operators import (
    ConvOperator,
    DenseOperator,
    LinearOperator,
    ModuleOperator,
    SeparableConvOperator,
    TransposedOperator,
    as_operator,
)


def conv_matrix(
    weight: Tensor, height: int, width: int, *, stride: int = 1, padding: int = 0, groups: int = 1
) -> np.ndarray:
    """The matrix of a zero-padded convolution, entry by entry from its definition."""
    w = weight.detach().double().numpy()
    out, per_group, kh, kw = w.shape
    out_h = (height + 2 * padding - kh) // stride + 1
    out_w = (width + 2 * padding - kw) // stride + 1
    matrix = np.zeros((out, out_h, out_w, per_group * groups, height, width))
    for o in range(out):
        first = (o // (out // groups)) * per_group
        for y, x, i, a, b in np.ndindex(out_h, out_w, per_group, kh, kw):
            row, col = y * stride + a - padding, x * stride + b - padding
            if 0 <= row < height and 0 <= col < width:
                matrix[o, y, x, first + i, row, col] += w[o, i, a, b]
    return matrix.reshape(out * out_h * out_w, -1)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_is_matrix(op: LinearOperator, matrix: np.ndarray, in_shape: tuple[int, ...]) -> None:
    """op and its adjoint are the matrix and its transpose."""
    out_shape = op.output_shape(in_shape)
    z, y = randn(3, *in_shape, seed=7), randn(3, *out_shape, seed=8)
    np.testing.assert_allclose(
        op(z).flatten(1).numpy(), z.flatten(1).numpy() @ matrix.T, atol=1e-12
    )
    back = op.adjoint(y, in_shape)
    assert tuple(back.shape[1:]) == in_shape
    np.testing.assert_allclose(back.flatten(1).numpy(), y.flatten(1).numpy() @ matrix, atol=1e-12)


@pytest.mark.parametrize(
    ("out", "cin", "k", "stride", "padding", "groups", "size"),
    [
        (3, 2, 3, 1, "same", 1, (5, 4)),
        (3, 2, 1, 1, "same", 1, (3, 4)),
        (2, 2, 5, 1, "same", 1, (4, 6)),
        (3, 2, 3, 2, "same", 1, (6, 6)),
        (3, 2, 3, 2, "same", 1, (5, 7)),
        (3, 2, 3, 2, "same", 1, (5, 6)),
        (2, 1, 3, 3, "same", 1, (8, 7)),
        (4, 2, 2, 2, 0, 1, (6, 7)),
        (2, 2, 3, 1, 0, 1, (5, 5)),
        (4, 2, 3, 1, "same", 2, (4, 4)),
        (6, 1, 3, 2, "same", 3, (5, 4)),
    ],
)
def test_convolution_is_its_matrix(
    out: int, cin: int, k: int, stride: int, padding: int | str, groups: int, size: tuple[int, int]
) -> None:
    weight = randn(out, cin, k, k)
    op = ConvOperator(weight, stride, padding, groups)
    pad = k // 2 if padding == "same" else int(padding)
    matrix = conv_matrix(weight, *size, stride=stride, padding=pad, groups=groups)
    assert_is_matrix(op, matrix, (cin * groups, *size))
    whole = ConvOperator(op.kernel, stride, padding)  # the kernel written without groups
    assert_is_matrix(whole, matrix, (cin * groups, *size))


def test_strided_adjoint_without_in_shape_takes_the_divisible_size() -> None:
    op = ConvOperator(randn(3, 2, 3, 3), stride=2)
    assert op.adjoint(randn(1, 3, 4, 4)).shape == (1, 2, 8, 8)
    with pytest.raises(ValueError, match="in_shape"):
        op.adjoint(randn(1, 3, 4, 4), (2, 9, 8))


def test_separable_is_the_composition_of_two_matrices() -> None:
    depthwise, pointwise = randn(3, 1, 3, 3), randn(4, 3, 1, 1, seed=1)
    op = SeparableConvOperator(depthwise, pointwise)
    first = conv_matrix(depthwise, 4, 5, padding=1, groups=3)
    second = conv_matrix(pointwise, 4, 5)
    assert_is_matrix(op, second @ first, (3, 4, 5))
    z = randn(2, 3, 4, 5, seed=2)
    torch.testing.assert_close(ConvOperator(op.kernel)(z), op(z), rtol=0, atol=1e-13)


# ModuleOperator


class _Blur(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, z: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(z, self.weight, padding=1)


class _BlurAdjoint(_Blur):
    def forward(self, y: Tensor) -> Tensor:
        return torch.nn.functional.conv_transpose2d(y, self.weight, padding=1)


def test_module_operator_is_its_matrix_and_has_its_norm() -> None:
    weight = randn(3, 2, 3, 3)
    op = ModuleOperator(_Blur(weight), _BlurAdjoint(weight), (2, 4, 3))
    matrix = conv_matrix(weight, 4, 3, padding=1)
    with torch.no_grad():
        assert_is_matrix(op, matrix, (2, 4, 3))
    sigma = np.linalg.svd(matrix, compute_uv=False)[0]
    bound = op.norm()
    assert sigma <= bound.upper <= sigma * (1 + 1e-10)
    assert bound.estimate == pytest.approx(sigma, rel=1e-4)
    assert bound.estimate <= bound.upper


def test_a_module_that_is_used_twice_keeps_its_weights() -> None:
    """functional_call leaves its own tensors in it (PyTorch issue 164759)."""
    once = nn.Linear(4, 4, bias=False)
    weight = once.weight
    with torch.no_grad():
        weight.copy_((weight + weight.T) / 2)  # so that it is its own adjoint
    twice = nn.Sequential(once, once)
    found = ModuleOperator(twice, twice, (4,)).in_double().norm_upper()
    assert once.weight is weight
    assert found == pytest.approx(np.linalg.norm(weight.detach().double(), 2) ** 2, rel=1e-6)


def test_module_norm_uses_a_given_bound_and_says_inf_when_too_large() -> None:
    scale = lambda z: 2.0 * z
    assert ModuleOperator(scale, scale, (5,), norm_bound=2.5).norm().upper == 2.5
    large = ModuleOperator(scale, scale, (3000,))
    assert large.norm_upper() == float("inf")
    assert large.norm().estimate == pytest.approx(2.0, rel=1e-5)


def test_dot_test_sees_a_wrong_adjoint_of_a_wide_bfloat16_map() -> None:
    """Against random y alone the gap is 1/√4096, below what bfloat16 may round."""
    twice = lambda t: (2 * t).bfloat16()
    ModuleOperator(twice, twice, (4096,), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="relative gap"):
        ModuleOperator(twice, lambda y: twice(y.roll(1, -1)), (4096,), dtype=torch.bfloat16)


_M = randn(6, 5)


@pytest.mark.parametrize(
    ("forward", "adjoint"),
    [
        pytest.param(lambda z: z @ _M.T, lambda y: y @ (_M + 1e-6), id="perturbed"),
        pytest.param(lambda z: z @ _M.T, lambda y: -(y @ _M), id="sign"),
        pytest.param(lambda z: z @ _M.T + 0.1, lambda y: y @ _M, id="bias"),
        pytest.param(lambda z: torch.relu(z @ _M.T), lambda y: y @ _M, id="nonlinear"),
        pytest.param(lambda z: (z - z.mean(0)) @ _M.T, lambda y: y @ _M, id="mixes-the-batch"),
        pytest.param(lambda z: z @ _M.T * float("nan"), lambda y: y @ _M, id="nan"),
    ],
)
def test_dot_test_catches(forward, adjoint) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"relative gap .* allowed"):
        ModuleOperator(forward, adjoint, (5,))


def test_dot_test_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    ModuleOperator(lambda z: z, lambda y: y, (4,))
    assert torch.equal(before, torch.get_rng_state())


# as_operator


def test_as_operator_takes_tensors_layers_and_operators() -> None:
    linear, conv = nn.Linear(5, 3, bias=False), nn.Conv2d(4, 6, 3, 2, 1, groups=2, bias=False)
    z, x = randn(2, 5, dtype=torch.float32), randn(2, 4, 5, 5, dtype=torch.float32)
    torch.testing.assert_close(as_operator(linear)(z), linear(z))
    torch.testing.assert_close(as_operator(conv)(x), conv(x))
    valid = nn.Conv2d(4, 6, 3, padding="valid", bias=False)
    torch.testing.assert_close(as_operator(valid)(x), valid(x))
    op = as_operator(randn(3, 5))
    assert isinstance(op, DenseOperator)
    assert as_operator(op) is op
    assert isinstance(as_operator(randn(3, 2, 3, 3)), ConvOperator)


def test_as_operator_follows_parametrized_weights() -> None:
    layer = weight_norm(nn.Linear(5, 3, bias=False))
    as_operator(layer)(torch.ones(1, 5)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize(
    ("w", "error", "words"),
    [
        (torch.zeros(3), ValueError, r"\(3,\)"),
        (torch.zeros(3, 3, dtype=torch.long), TypeError, "int64"),
        (nn.Linear(2, 2), ValueError, "bias"),
        (nn.Conv2d(2, 2, 3), ValueError, "bias"),
        (nn.Conv2d(2, 2, 3, dilation=2, bias=False), ValueError, "dilation"),
        (nn.Conv2d(2, 2, 3, padding_mode="circular", bias=False), ValueError, "circular"),
        (nn.ReLU(), TypeError, "ReLU"),
        ("W", TypeError, "str"),
        (torch.zeros(2, 2, 2, 2), ValueError, "odd kernel"),
    ],
)
def test_as_operator_says_what_is_wrong(w: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        as_operator(w)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ConvOperator(torch.zeros(2, 2, 3, 3), stride=0), "stride=0"),
        (lambda: ConvOperator(torch.zeros(2, 2, 3, 3), padding=-1), "padding=-1"),
        (lambda: ConvOperator(torch.zeros(2, 2, 3, 3), padding="full"), "'full'"),
        (lambda: ConvOperator(torch.zeros(2, 2, 3, 3), groups=3), "groups=3"),
        (lambda: ConvOperator(torch.zeros(2, 2)), r"\(2, 2\)"),
        (lambda: DenseOperator(torch.zeros(2)), r"\(2,\)"),
        (lambda: SeparableConvOperator(randn(3, 1, 3, 3), randn(4, 2, 1, 1)), r"\[out, 3, 1, 1\]"),
        (lambda: SeparableConvOperator(randn(3, 2, 3, 3), randn(4, 3, 1, 1)), r"\[C, 1, k, k\]"),
        (lambda: ConvOperator(torch.zeros(2, 3, 3, 3)).output_shape((4, 5, 5)), "B, 3, H, W"),
        (lambda: ConvOperator(torch.zeros(2, 3, 5, 5), padding=0).output_shape((3, 2, 9)), "small"),
        (lambda: DenseOperator(torch.zeros(2, 3)).output_shape((4,)), r"\[B, 3\]"),
        (lambda: ConvOperator(torch.zeros(2, 3, 3, 3)).norm(), "in_shape"),
        (lambda: ModuleOperator(lambda z: z, lambda z: z, (2,), norm_bound=-1.0), "norm_bound"),
        (lambda: ModuleOperator(lambda z: z @ _M.T, lambda y: y, (5,)), "come back"),
    ],
)
def test_bad_options_are_named(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()


def test_channels_last_maps_on_a_cpu_take_another_path_to_the_same_numbers() -> None:
    last = torch.channels_last
    weight = randn(72, 64, 3, 3, dtype=torch.float32)
    z = randn(2, 64, 16, 16, seed=1, dtype=torch.float32).to(memory_format=last)
    y = randn(2, 72, 16, 16, seed=2, dtype=torch.float32).to(memory_format=last)
    fast, plain = ConvOperator(weight), ConvOperator(weight.double())
    assert fast._winograd_serves(z)
    for found, exact in (
        (fast(z), plain(z.double())),
        (fast.adjoint(y), plain.adjoint(y.double())),
    ):
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert float((found - exact).norm() / exact.norm()) < 1e-5
    weight.mul_(2.0)  # the transformed weight must not outlive the weight
    assert float((fast(z) - 2 * plain(z.double())).norm() / plain(z.double()).norm()) < 1e-5


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_zero_is_mapped_to_zero_and_the_weight_keeps_its_gradient(
    stride: int, layout: torch.memory_format
) -> None:
    weight = randn(5, 4, 3, 3).requires_grad_()
    op = ConvOperator(weight, stride)
    zero = torch.zeros(2, 4, 6, 8, dtype=torch.float64).to(memory_format=layout)
    with torch.no_grad():
        image = op(zero)
    assert image.shape == (2, *op.output_shape((4, 6, 8)))
    assert image.is_contiguous(memory_format=layout)
    assert not image.any()
    almost = zero.clone()
    almost[1, 3, 5, 7] = 1.0
    with torch.no_grad():
        assert op(almost).any()
    assert torch.autograd.grad(op(zero).sum(), weight)[0].shape == weight.shape


TRANSPOSED: dict[str, tuple[LinearOperator, np.ndarray, tuple[int, ...]]] = {
    "dense": (DenseOperator(randn(3, 5)), randn(3, 5).numpy(), (3,)),
    "conv": (
        ConvOperator(randn(4, 2, 3, 3)),
        conv_matrix(randn(4, 2, 3, 3), 4, 5, padding=1),
        (4, 4, 5),
    ),
    "strided": (
        ConvOperator(randn(4, 2, 3, 3), stride=2),
        conv_matrix(randn(4, 2, 3, 3), 6, 4, stride=2, padding=1),
        (4, 3, 2),
    ),
    "separable": (
        SeparableConvOperator(randn(2, 1, 3, 3), randn(3, 2, 1, 1, seed=1)),
        conv_matrix(randn(3, 2, 1, 1, seed=1) * randn(2, 1, 3, 3)[:, 0], 4, 5, padding=1),
        (3, 4, 5),
    ),
    "module": (
        ModuleOperator(lambda z: z.flatten(1), lambda y: y.reshape(-1, 2, 3), (2, 3)),
        np.eye(6),
        (6,),
    ),
}


@pytest.mark.parametrize("kind", list(TRANSPOSED))
def test_it_is_the_transposed_matrix(kind: str) -> None:
    base, matrix, in_shape = TRANSPOSED[kind]
    op = TransposedOperator(base)
    assert_is_matrix(op, matrix.T, in_shape)
    top = np.linalg.norm(matrix, 2)
    found = op.norm(in_shape)
    assert found.upper >= top * (1 - 1e-12)
    assert found.estimate == pytest.approx(top, rel=1e-3)
    assert op.norm_upper() == base.norm_upper()
    op.check_output(op.output_shape(in_shape))


def test_shapes_of_the_transpose_are_checked() -> None:
    op = TransposedOperator(DenseOperator(randn(3, 5)))
    assert op.cast(torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match="does not fit"):
        op.output_shape((4,))
    with pytest.raises(ValueError, match="takes states"):
        op.check_output((4,))
    even = TransposedOperator(ConvOperator(randn(1, 1, 2, 2), padding=0))
    with pytest.raises(ValueError, match="No input of"):
        even.output_shape((1, 3, 3))
