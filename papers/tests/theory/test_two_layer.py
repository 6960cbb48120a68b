"""Corollary 1: the objective of two layers, against one quadratic program over all unknowns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.nn.deep_opteq import DeepOptEq
from equilibria.problems import NonNegative, Tanh
from equilibria_papers.theory import Block, moreau_envelope, two_layer_objective
from papers.tests.theory.oracles import envelope, equilibrium, random_layers, two_layers
from papers.tests.theory.test_blocks import as_torch


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), alpha=st.floats(0.1, 0.95), norm=st.floats(0.2, 1.0))
def test_envelope_is_the_programs_value(seed: int, alpha: float, norm: float) -> None:
    rng = np.random.default_rng(seed)
    (layer,) = random_layers(rng, 1, 4, [6], alpha, norm)
    z = rng.standard_normal(4)
    (block,) = as_torch([layer])
    found = float(moreau_envelope(block, torch.tensor(z)[None]))
    assert found == pytest.approx(envelope(layer, z)[0], rel=1e-8, abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    first=st.floats(0.1, 0.9),
    second=st.floats(0.1, 0.9),
    norm=st.floats(0.3, 0.95),
)
def test_the_equilibrium_is_the_minimizer(
    seed: int, first: float, second: float, norm: float
) -> None:
    layers = random_layers(np.random.default_rng(seed), 2, 4, [6, 3], 0.5, norm)
    layers[0].alpha, layers[1].alpha = first, second
    one, zero, minimum = two_layers(*layers)
    z0 = equilibrium(layers, 4)
    np.testing.assert_allclose(z0, zero, atol=1e-7)
    np.testing.assert_allclose(layers[0].f(z0), one, atol=1e-7)
    blocks = as_torch(layers)
    value = float(two_layer_objective(blocks, None, torch.tensor(z0)[None]))
    assert value == pytest.approx(minimum, rel=1e-8, abs=1e-9)
    given = two_layer_objective(blocks, None, torch.tensor(zero)[None], torch.tensor(one)[None])
    assert float(given) == pytest.approx(minimum, rel=1e-8, abs=1e-9)


def test_gradient_against_differences() -> None:
    torch.manual_seed(0)
    w = torch.randn(2, 6, 4).double()
    w /= torch.linalg.matrix_norm(w, 2)[:, None, None]
    blocks = [Block(w[i], torch.randn(1, 6).double(), Tanh(), 0.6) for i in range(2)]

    def objective(z0: torch.Tensor, z1: torch.Tensor) -> torch.Tensor:
        return two_layer_objective(blocks, None, z0, z1)

    states = [torch.randn(1, 4).double().requires_grad_() for _ in range(2)]
    torch.autograd.gradcheck(objective, states, atol=1e-6)


def test_descent_on_it_finds_the_layers_answer() -> None:
    torch.manual_seed(0)
    layer = DeepOptEq(4, (6, 5), in_channels=3, alpha=0.7).double().eval()
    x = torch.randn(1, 3).double()
    states = torch.zeros(2, 1, 4).double().requires_grad_()
    optimizer = torch.optim.LBFGS([states], max_iter=200, tolerance_change=1e-16, lr=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = two_layer_objective(layer, x, states[0], states[1]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(states.detach()[0], layer(x).detach(), atol=1e-6, rtol=0)


class TestBadInput:
    def test_number_of_layers(self) -> None:
        blocks = as_torch(random_layers(np.random.default_rng(0), 3, 4, [3, 6, 5], 0.5, 0.9))
        with pytest.raises(ValueError, match="L = 2 layers, got 3"):
            two_layer_objective(blocks, None, torch.zeros(1, 4))

    def test_norms_above_one(self) -> None:
        blocks = [Block(2.0 * torch.eye(3), torch.zeros(1, 3), NonNegative(), 0.5)] * 2
        with pytest.raises(ValueError, match="Corollary 1 rests on Assumption 2"):
            two_layer_objective(blocks, None, torch.zeros(1, 3))

    def test_full_step(self) -> None:
        blocks = as_torch(random_layers(np.random.default_rng(0), 2, 4, [3, 6], 1.0, 0.9))
        with pytest.raises(ValueError, match="α < 1"):
            two_layer_objective(blocks, None, torch.zeros(1, 4))

    def test_shapes(self) -> None:
        blocks = as_torch(random_layers(np.random.default_rng(0), 2, 4, [3, 6], 0.5, 0.9))
        with pytest.raises(ValueError, match="one shape"):
            two_layer_objective(blocks, None, torch.zeros(1, 4), torch.zeros(1, 3))
