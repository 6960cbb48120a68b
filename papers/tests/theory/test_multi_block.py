"""Lemma 3: the multi-block form, with its matrices, and what is wrong with it as printed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.nn.deep_opteq import DeepOptEq
from equilibria.problems import Tanh
from equilibria_papers.theory import MultiBlock, deep_equilibrium, multi_block
from papers.tests.theory.oracles import equilibrium, random_layers
from papers.tests.theory.test_blocks import as_torch


def test_permutation_is_the_matrix_of_the_lemma() -> None:
    """P = [[0, 0, I], [I, 0, 0], [0, I, 0]] for L = 3."""
    layers = random_layers(np.random.default_rng(0), 3, 2, [3, 4, 5], 0.5, 0.9)
    multi = MultiBlock(as_torch(layers))
    eye, zero = np.eye(2), np.zeros((2, 2))
    expected = np.block([[zero, zero, eye], [eye, zero, zero], [zero, eye, zero]])
    np.testing.assert_array_equal(multi.permutation(), expected)
    z = torch.randn(1, 3, 2).double()
    np.testing.assert_array_equal(multi.permute(z).flatten(), expected @ z.flatten().numpy())
    assert len(multi) == 3


def test_steps_are_the_matrix_formulas() -> None:
    rng = np.random.default_rng(1)
    layers = random_layers(rng, 3, 4, [3, 5, 6], 0.6, 0.9)
    multi = MultiBlock(as_torch(layers))
    w, p, c = multi.weight().numpy(), multi.permutation().numpy(), multi.bias().numpy()[0]
    assert w.shape == (14, 12)
    np.testing.assert_array_equal(w[3:8, 4:8], layers[1].W)
    assert np.count_nonzero(w) == 4 * 14
    z = rng.standard_normal(12)
    right = 0.6 * w.T @ np.maximum(w @ p @ z + c, 0) + 0.4 * p @ z
    printed = 0.6 * w.T @ np.maximum(w @ z + c, 0) + 0.4 * p @ z
    stacked = torch.tensor(z.reshape(1, 3, 4))
    np.testing.assert_allclose(multi.step(stacked).flatten(), right, atol=1e-14)
    np.testing.assert_allclose(multi.step_as_printed(stacked).flatten(), printed, atol=1e-14)
    expected = np.linalg.norm(z - right), np.linalg.norm(z - printed)
    assert float(multi.residual(stacked)) == pytest.approx(expected[0], rel=1e-12)
    assert float(multi.residual(stacked, as_printed=True)) == pytest.approx(expected[1], rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 4), alpha=st.floats(0.3, 1.0))
def test_a_deep_equilibrium_solves_it(seed: int, count: int, alpha: float) -> None:
    layers = random_layers(np.random.default_rng(seed), count, 5, [6, 7, 8, 6], alpha, 0.9)
    multi = MultiBlock(as_torch(layers))
    z = torch.tensor(equilibrium(layers, 5))[None]
    stacked = multi.expand(z)
    assert float(multi.residual(stacked)) < 1e-12
    torch.testing.assert_close(multi.collapse(stacked), z)


def test_size_of_the_misprint() -> None:
    """In the audit's example: 1e-14 with P inside against 0.43; the median here is of that size."""
    printed = []
    for seed in range(20):
        layers = random_layers(np.random.default_rng(seed), 3, 6, [8, 8, 8], 0.6, 0.9)
        multi = MultiBlock(as_torch(layers))
        stacked = multi.expand(torch.tensor(equilibrium(layers, 6))[None])
        assert float(multi.residual(stacked)) < 1e-13
        printed.append(float(multi.residual(stacked, as_printed=True)))
    assert 0.1 < np.median(printed) < 1.5


def test_one_block_has_no_misprint() -> None:
    layers = random_layers(np.random.default_rng(3), 1, 4, [5], 0.7, 0.9)
    multi = MultiBlock(as_torch(layers))
    z = torch.randn(1, 1, 4).double()
    torch.testing.assert_close(multi.step(z), multi.step_as_printed(z))


@pytest.mark.parametrize("kernel_size", [None, 3])
def test_of_a_layer(kernel_size: int | None) -> None:
    torch.manual_seed(0)
    layer = DeepOptEq(
        3, (4, 5, 6), in_channels=2, kernel_size=kernel_size, alpha=(0.6, 1.0, 0.9), prior=Tanh()
    ).double()
    x = torch.randn(2, 2, 4, 4).double() if kernel_size else torch.randn(2, 2).double()
    layer.eval()
    multi = multi_block(layer, x)
    z = torch.randn(2, 3, *x.shape[2:]).double()
    torch.testing.assert_close(multi.deep_step(z), layer.step(z, *layer.inject(x)).detach())
    found = layer(x).detach()
    assert float(multi.residual(multi.expand(found)).max()) < 1e-6
    torch.testing.assert_close(deep_equilibrium(multi.blocks).value, found, atol=1e-7, rtol=0)
    if kernel_size:
        with pytest.raises(TypeError, match="writes W̃ as a matrix"):
            multi.weight()


def test_wrong_shape() -> None:
    multi = MultiBlock(as_torch(random_layers(np.random.default_rng(0), 2, 4, [5, 5], 0.5, 0.9)))
    with pytest.raises(ValueError, match=r"\[B, L, \*state\] = \(1, 2, 4\), got \(1, 4\)"):
        multi.step(torch.zeros(1, 4).double())
