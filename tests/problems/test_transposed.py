"""Wᵀ as an operator: against the transposed matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equilibria.problems import (
    ConvOperator,
    DenseOperator,
    LinearOperator,
    ModuleOperator,
    SeparableConvOperator,
)
from equilibria.problems.operators import TransposedOperator
from tests.problems.test_operators import assert_is_matrix, conv_matrix, randn


def module_operator() -> ModuleOperator:
    return ModuleOperator(lambda z: z.flatten(1), lambda y: y.reshape(-1, 2, 3), (2, 3))


CASES: dict[str, tuple[LinearOperator, np.ndarray, tuple[int, ...]]] = {
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
    "module": (module_operator(), np.eye(6), (6,)),
}


@pytest.mark.parametrize("kind", list(CASES))
def test_it_is_the_transposed_matrix(kind: str) -> None:
    base, matrix, in_shape = CASES[kind]
    op = TransposedOperator(base)
    assert_is_matrix(op, matrix.T, in_shape)
    top = np.linalg.norm(matrix, 2)
    found = op.norm(in_shape)
    assert found.upper >= top * (1 - 1e-12)
    assert found.estimate == pytest.approx(top, rel=1e-3)
    assert op.norm_upper() == base.norm_upper()
    op.check_output(op.output_shape(in_shape))


def test_shapes_and_casting() -> None:
    op = TransposedOperator(DenseOperator(randn(3, 5)))
    assert op.in_shape == (3,)
    assert op.dtype == torch.float64
    assert op.device.type == "cpu"
    assert op.cast(torch.float32).dtype == torch.float32
    assert TransposedOperator(ConvOperator(randn(4, 2, 3, 3))).in_shape is None
    with pytest.raises(ValueError, match="does not fit"):
        op.output_shape((4,))
    with pytest.raises(ValueError, match="takes states"):
        op.check_output((4,))
    with pytest.raises(TypeError, match="takes a LinearOperator, got Tensor"):
        TransposedOperator(randn(2, 2))  # type: ignore[arg-type]
    even = TransposedOperator(ConvOperator(randn(1, 1, 2, 2), padding=0))
    with pytest.raises(ValueError, match="No input of"):
        even.output_shape((1, 3, 3))


def test_gradients_reach_the_weight() -> None:
    weight = randn(3, 5).requires_grad_()
    y = randn(2, 3, seed=1)
    TransposedOperator(DenseOperator(weight))(y).sum().backward()
    torch.testing.assert_close(weight.grad, y.sum(0)[:, None].expand(3, 5))
