"""The layer contract for maps, and what layers are checked for whose state is a tuple."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import equilibria as eq
from tests.contracts.layer_contract import (
    LayerContract,
    check_autocast,
    check_compiles,
    check_copies,
    check_gradients,
    leaves,
)
from tests.problems.test_operators import conv_matrix

__all__ = ["check_autocast", "check_compiles", "check_copies", "check_gradients"]


class MapContract(LayerContract):
    """The layer contract for maps: what asks for a hidden problem asks the map instead."""

    def test_the_answer_is_a_stationary_point_of_the_problem(self) -> None:
        layer: Any = self.precise()
        x = self.drawn().double()
        with torch.no_grad():
            z = layer(x)
            assert float((layer.step(z, *layer.inject(x)) - z).abs().max()) < 1e-10

    test_the_objective_is_finite_and_no_lower_anywhere_near = None  # a map minimizes nothing

    def test_the_map_compiles(self) -> None:
        torch._dynamo.reset()
        layer: Any = self.made().eval()
        x = self.drawn(2)
        with torch.no_grad():
            z, c, plain = layer(x), layer.inject(x), layer.bound_step()
        step = torch.compile(lambda z: plain(z, *c), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(step(z), plain(z, *c), rtol=1e-5, atol=1e-6)


class SlowCompile(MapContract):
    """Compiled with the slow tests only: one form of a layer is enough for every day."""

    compiles_daily = False  # read by tests/conftest.py


def matrices(layer: Any, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """W as a matrix, and c = Ux + b with one row a sample; W and U dense, or 3 × 3."""
    bias = layer.U.bias.detach().numpy()
    if layer.convolutional:
        size = x.shape[2:]
        w, u = (conv_matrix(m.weight, *size, padding=1) for m in (layer.W, layer.U))
        return w, x.flatten(1).numpy() @ u.T + np.repeat(bias, size.numel())
    w, u = (m.weight.detach().numpy() for m in (layer.W, layer.U))
    return w, x.numpy() @ u.T + bias


def check_bad_sample(layer: Any, x: Tensor) -> None:
    """A batch of three: each answer is its own, and a NaN in one sample harms no other."""
    together = [z.detach() for z in leaves(layer(x))]
    for a, b in zip(leaves(layer(x[1:2])), together, strict=True):
        torch.testing.assert_close(a[0], b[1], rtol=1e-8, atol=1e-9)
    x[1, 0, 0, 0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning):
        assert layer.solve(x).converged.tolist() == [True, False, True]
    with pytest.warns(eq.ConvergenceWarning):
        found = [z[[0, 2]] for z in leaves(layer(x))]
    for a, b in zip(found, together, strict=True):
        torch.testing.assert_close(a, b[[0, 2]], rtol=1e-8, atol=1e-9)
    weights = list(layer.parameters())
    grads = torch.autograd.grad(sum(z.sum() for z in found), weights)
    wanted = torch.autograd.grad(sum(z.sum() for z in leaves(layer(x[[0, 2]]))), weights)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
