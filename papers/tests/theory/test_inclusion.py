"""Theorem 2: the inclusion residual, against quadratic programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.nn.deep_opteq import DeepOptEq
from equilibria.problems import NonNegative, Tanh
from equilibria_papers.theory import Block, inclusion_residual
from papers.tests.theory.oracles import envelope, equilibrium, random_layers
from papers.tests.theory.test_blocks import as_torch


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 4), alpha=st.floats(0.1, 0.95))
def test_zero_at_the_equilibrium(seed: int, count: int, alpha: float) -> None:
    layers = random_layers(np.random.default_rng(seed), count, 4, [3, 6, 4, 5], alpha, 0.95)
    z = torch.tensor(equilibrium(layers, 4))[None]
    blocks = as_torch(layers)
    assert float(inclusion_residual(blocks, None, z)) < 1e-10
    assert float(inclusion_residual(blocks, None, z, form="proximal")) < 1e-12


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), alpha=st.floats(0.1, 0.95))
def test_elsewhere_it_is_the_distance_of_the_gradient(seed: int, alpha: float) -> None:
    """∇(αM_φ^{1−α})(z) = α(z − u)/(1 − α), u the minimizer of the envelope's program."""
    rng = np.random.default_rng(seed)
    layers = random_layers(rng, 3, 4, [3, 6, 5], alpha, 1.0)
    stacked = rng.standard_normal((3, 4))
    before = np.roll(stacked, 1, axis=0)
    gaps = [
        alpha * (z - envelope(layer, z)[1]) / (1 - alpha) + z - left
        for layer, z, left in zip(layers, stacked, before, strict=True)
    ]
    expected = np.linalg.norm(gaps)
    found = float(inclusion_residual(as_torch(layers), None, torch.tensor(stacked)[None]))
    assert found == pytest.approx(expected, rel=1e-6)


def test_one_state_is_expanded() -> None:
    """All gaps but the last vanish: ‖f_L⁻¹(z) − z_{L−1}‖ remains."""
    rng = np.random.default_rng(2)
    layers = random_layers(rng, 2, 4, [3, 6], 0.7, 0.9)
    z = rng.standard_normal(4)
    between = layers[0].f(z)
    u = envelope(layers[1], z)[1]
    expected = np.linalg.norm(0.7 * (z - u) / 0.3 + z - between)
    blocks = as_torch(layers)
    assert float(inclusion_residual(blocks, None, torch.tensor(z)[None])) == pytest.approx(expected)
    prox = float(inclusion_residual(blocks, None, torch.tensor(z)[None], form="proximal"))
    assert prox == pytest.approx(np.linalg.norm(z - layers[1].f(between)))


@pytest.mark.parametrize("kernel_size", [None, 3])
def test_of_a_layer(kernel_size: int | None) -> None:
    torch.manual_seed(0)
    layer = DeepOptEq(
        3, (4, 5, 6), in_channels=2, kernel_size=kernel_size, alpha=(0.6, 0.8, 0.9), prior=Tanh()
    ).double()
    x = torch.randn(2, 2, 4, 4).double() if kernel_size else torch.randn(2, 2).double()
    layer.eval()
    z = layer(x)
    residual = inclusion_residual(layer, x, z)
    assert residual.shape == (2,)
    assert not residual.requires_grad
    assert float(residual.max()) < 1e-5
    assert float(inclusion_residual(layer, x, z + 0.1).min()) > 0.01


class TestBadInput:
    def test_full_step_needs_the_proximal_form(self) -> None:
        blocks = as_torch(random_layers(np.random.default_rng(0), 2, 4, [3, 6], 1.0, 0.9))
        z = torch.tensor(equilibrium_of(blocks))
        with pytest.raises(ValueError, match="form='proximal'"):
            inclusion_residual(blocks, None, z)
        assert float(inclusion_residual(blocks, None, z, form="proximal")) < 1e-12

    def test_norms_above_one(self) -> None:
        blocks = [Block(2.0 * torch.eye(3), torch.zeros(1, 3), NonNegative(), 0.5)]
        z = torch.ones(1, 3)
        with pytest.raises(ValueError, match=r"Theorem 2 rests on Assumption 2.*block 1.*up to 4"):
            inclusion_residual(blocks, None, z)
        assert bool(inclusion_residual(blocks, None, z, check=False).isfinite())

    def test_unknown_form(self) -> None:
        blocks = as_torch(random_layers(np.random.default_rng(0), 2, 4, [3, 6], 0.5, 0.9))
        with pytest.raises(ValueError, match="'subgradient' or 'proximal'"):
            inclusion_residual(blocks, None, torch.zeros(1, 4), form="both")  # type: ignore[arg-type]


def equilibrium_of(blocks: list[Block]) -> np.ndarray:
    z = np.zeros((1, 4))
    for _ in range(2000):
        for block in blocks:
            w, c = block.W.weight.numpy(), block.c.numpy()  # type: ignore[union-attr]
            z = np.maximum(z @ w.T + c, 0) @ w
    return z
