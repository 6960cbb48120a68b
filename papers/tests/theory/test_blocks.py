"""The blocks of a deep OptEq: their maps, inverses and equilibria against numpy and scipy."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.nn import NormBounded, WeightNormalized
from equilibria.nn.deep_opteq import DeepOptEq
from equilibria.problems import LeakyNonNegative, NonNegative, Prior, SquaredNorm, Tanh
from equilibria_papers.theory import Block, as_blocks, deep_equilibrium
from papers.tests.theory.oracles import Plain, equilibrium, random_layers
from tests.problems.test_operators import conv_matrix


def as_torch(layers: list[Plain]) -> list[Block]:
    return [
        Block(torch.tensor(p.W), torch.tensor(p.c)[None], NonNegative(), p.alpha) for p in layers
    ]


def test_map_and_proximal_are_the_formulas() -> None:
    rng = np.random.default_rng(0)
    w, c, z = rng.standard_normal((5, 3)), rng.standard_normal((2, 5)), rng.standard_normal((2, 3))
    block = Block(torch.tensor(w), torch.tensor(c), Tanh(), 0.3)
    inner = np.tanh(z @ w.T + c) @ w
    np.testing.assert_allclose(block.proximal(torch.tensor(z)), inner, atol=1e-14)
    np.testing.assert_allclose(block(torch.tensor(z)), 0.3 * inner + 0.7 * z, atol=1e-14)
    psi = np.log(np.cosh(z @ w.T + c)).sum(1)
    constant = block.psi(torch.tensor(z)).numpy() - psi
    np.testing.assert_allclose(constant, constant[0], atol=1e-12)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("prior", [NonNegative(), Tanh(), LeakyNonNegative(0.1)])
def test_inverse_against_scipy(alpha: float, prior: Prior) -> None:
    rng = np.random.default_rng(1)
    w, c, y = rng.standard_normal((6, 4)), rng.standard_normal((3, 6)), rng.standard_normal((3, 4))
    w /= np.linalg.norm(w, 2)
    sigma = {
        NonNegative: lambda v: np.maximum(v, 0),
        Tanh: np.tanh,
        LeakyNonNegative: lambda v: np.where(v > 0, v, 0.1 * v),
    }[type(prior)]
    found = Block(torch.tensor(w), torch.tensor(c), prior, alpha).inverse(torch.tensor(y)).numpy()
    for i in range(3):

        def gap(v: np.ndarray, i: int = i) -> np.ndarray:
            return alpha * w.T @ sigma(w @ v + c[i]) + (1 - alpha) * v - y[i]

        assert np.abs(gap(found[i])).max() < 1e-11
        expected = scipy.optimize.root(gap, y[i], tol=1e-14)
        if expected.success:
            np.testing.assert_allclose(found[i], expected.x, atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 4),
    alpha=st.floats(0.02, 1.0),
    norm=st.floats(0.1, 0.98),
)
def test_deep_equilibrium_is_that_of_plain_iteration(
    seed: int, count: int, alpha: float, norm: float
) -> None:
    layers = random_layers(np.random.default_rng(seed), count, 4, [3, 6, 4, 5], alpha, norm)
    found = deep_equilibrium(as_torch(layers))
    assert bool(found.converged.all())
    np.testing.assert_allclose(found.value[0], equilibrium(layers, 4), atol=1e-9)


def test_few_steps_even_for_a_tiny_alpha() -> None:
    """Plain iteration would need tens of thousands at α = 1e-4, or stop far from the answer."""
    layers = random_layers(np.random.default_rng(5), 3, 40, [60, 60, 60], 1e-4, 0.99)
    found = deep_equilibrium(as_torch(layers))
    assert found.stats.evaluations < 60
    z = found.value[0].numpy()
    after = layers[2].f(layers[1].f(layers[0].f(z)))
    assert np.linalg.norm(after - z) / 1e-4 < 1e-10


@pytest.mark.parametrize("kernel_size", [None, 3])
def test_blocks_of_a_layer_are_its_maps(kernel_size: int | None) -> None:
    torch.manual_seed(0)
    layer = DeepOptEq(
        3, (4, 5), in_channels=2, kernel_size=kernel_size, alpha=(0.6, 0.9), prior=Tanh()
    ).double()
    x = torch.randn(2, 2, 5, 5).double() if kernel_size else torch.randn(2, 2).double()
    z = torch.randn(2, 3, *x.shape[2:]).double()
    blocks = as_blocks(layer, x)
    layer.eval()
    for number, (block, c) in enumerate(zip(blocks, layer.inject(x), strict=True)):
        module = layer.blocks[number].W
        weight = module.weight.detach()
        if kernel_size is None:
            before = z @ weight.T + c
            inner = torch.tanh(before) @ weight
        else:
            matrix = torch.as_tensor(conv_matrix(weight, 5, 5, padding=1))
            before = z.flatten(1) @ matrix.T + c.flatten(1)
            inner = (torch.tanh(before) @ matrix).reshape(z.shape)
        alpha = (0.6, 0.9)[number]
        torch.testing.assert_close(block(z), (alpha * inner + (1 - alpha) * z).detach())


def test_a_layer_in_training_is_left_alone() -> None:
    torch.manual_seed(0)
    layer = DeepOptEq(3, (4, 5), in_channels=2)
    before = copy.deepcopy(layer.state_dict())
    as_blocks(layer, torch.randn(2, 2))
    assert layer.training
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_learned_alphas_are_read() -> None:
    layer = DeepOptEq(3, (4, 5), in_channels=2, alpha=(0.3, 0.7), learn_alpha=True)
    assert [b.alpha for b in as_blocks(layer, torch.zeros(1, 2))] == pytest.approx([0.3, 0.7])


def test_expansion_is_the_norm_squared() -> None:
    w = np.random.default_rng(2).standard_normal((5, 3))
    block = Block(torch.tensor(w), torch.zeros(1, 5), NonNegative(), 0.5)
    assert block.expansion() == pytest.approx(np.linalg.norm(w, 2) ** 2, rel=1e-9)


class TestBadInput:
    def test_alpha(self) -> None:
        for alpha in (0.0, 1.1, math.nan):
            with pytest.raises(ValueError, match=r"alpha=.*\(0, 1\]"):
                Block(torch.eye(2), torch.zeros(1, 2), NonNegative(), alpha)

    def test_inverse_at_one(self) -> None:
        block = Block(torch.eye(2), torch.zeros(1, 2), NonNegative(), 1.0)
        with pytest.raises(ValueError, match="α < 1"):
            block.inverse(torch.zeros(1, 2))

    def test_blocks_that_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match="different shapes"):
            as_blocks(
                [Block(torch.eye(2), torch.zeros(1, 2)), Block(torch.eye(3), torch.zeros(1, 3))]
            )
        with pytest.raises(ValueError, match="at least one"):
            as_blocks([])
        with pytest.raises(TypeError, match="block 1 is a str"):
            as_blocks(["W"])  # type: ignore[list-item]

    def test_input_given_or_not(self) -> None:
        with pytest.raises(TypeError, match="give x"):
            as_blocks(DeepOptEq(2, (2,)))
        with pytest.raises(TypeError, match="bound to their input"):
            as_blocks([Block(torch.eye(2), torch.zeros(1, 2))], torch.zeros(1, 2))

    def test_regularized_layer(self) -> None:
        layer = DeepOptEq(2, (2,), regularizer=SquaredNorm(0.1))
        with pytest.raises(ValueError, match="regularizer=None"):
            as_blocks(layer, torch.zeros(1, 2))


def test_constraints_keep_the_assumption() -> None:
    torch.manual_seed(0)
    layer = DeepOptEq(6, (8, 8), constraint=NormBounded(bound=0.9))
    assert all(b.expansion() < 0.9 for b in as_blocks(layer, torch.zeros(1, 6)))
    free = DeepOptEq(6, (8, 8), constraint=WeightNormalized())
    assert len(as_blocks(free, torch.zeros(1, 6))) == 2
