"""Lemma 3: the multi-block form, with its matrices, and what is wrong with it as printed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.nn.deep_opteq import DeepOptEq
from equilibria.problems import NonNegative, Tanh
from equilibria_papers.theory import (
    Block,
    MultiBlock,
    deep_equilibrium,
    inclusion_residual,
    moreau_envelope,
    multi_block,
    two_layer_objective,
)
from papers.tests.theory.oracles import envelope, equilibrium, random_layers, two_layers
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


# Theorem 2: the inclusion residual, against quadratic programs.


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
def test_inclusion_of_a_layer(kernel_size: int | None) -> None:
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


# Corollary 1: the objective of two layers, against one quadratic program over all unknowns.


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


class TestBadObjectives:
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
