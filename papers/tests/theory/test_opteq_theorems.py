"""OptEq's theorems on deep OptEqs against numpy, scipy and quadratic programs."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria.nn import DeepOptEq
from equilibria.problems import NonNegative, SquaredNorm, Tanh
from equilibria_papers.theory import (
    Block,
    MultiBlock,
    approach_wide_limit,
    as_blocks,
    deep_equilibrium,
    inclusion_residual,
    moreau_envelope,
    multi_block,
    to_wide_opteq,
    two_layer_objective,
    wide_limit,
)
from papers.tests.theory.oracles import (
    Plain,
    envelope,
    equilibrium,
    random_layers,
    two_layers,
    wide,
)
from tests.oracles import PROXES
from tests.problems.test_operators import conv_matrix

SEEDS = st.integers(0, 2**32 - 1)


def as_torch(layers: list[Plain]) -> list[Block]:
    return [
        Block(torch.tensor(p.W), torch.tensor(p.c)[None], NonNegative(), p.alpha) for p in layers
    ]


def drawn(count: int, alpha: float = 0.5, norm: float = 0.9, seed: int = 0) -> list[Plain]:
    """Layers of states of 4 with 3, 6, 5 and 2 units."""
    return random_layers(np.random.default_rng(seed), count, 4, [3, 6, 5, 2], alpha, norm)


def layer_and_input(
    kernel_size: int | None, alpha: tuple[float, ...]
) -> tuple[DeepOptEq, torch.Tensor]:
    torch.manual_seed(0)
    layer = DeepOptEq(
        3, (4, 5, 6), in_channels=2, kernel_size=kernel_size, alpha=alpha, prior=Tanh()
    ).double()
    x = torch.randn(2, 2, 5, 5) if kernel_size else torch.randn(2, 2)
    return layer.eval(), x.double()


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
    assert block.expansion() == pytest.approx(np.linalg.norm(w, 2) ** 2, rel=1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("name", ["relu", "tanh", "leaky"])
def test_inverse_against_scipy(alpha: float, name: str) -> None:
    rng = np.random.default_rng(1)
    w, c, y = rng.standard_normal((6, 4)), rng.standard_normal((3, 6)), rng.standard_normal((3, 4))
    w /= np.linalg.norm(w, 2)
    prior, prox = PROXES[name]
    found = Block(torch.tensor(w), torch.tensor(c), prior, alpha).inverse(torch.tensor(y)).numpy()
    for i in range(3):

        def gap(v: np.ndarray, i: int = i) -> np.ndarray:
            return alpha * w.T @ prox(w @ v + c[i], 1.0) + (1 - alpha) * v - y[i]

        assert np.abs(gap(found[i])).max() < 1e-11
        expected = scipy.optimize.root(gap, y[i], tol=1e-14)
        if expected.success:
            np.testing.assert_allclose(found[i], expected.x, atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, count=st.integers(1, 4), alpha=st.floats(0.02, 1.0), norm=st.floats(0.1, 0.98))
def test_deep_equilibrium_is_that_of_plain_iteration(
    seed: int, count: int, alpha: float, norm: float
) -> None:
    layers = drawn(count, alpha, norm, seed)
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
    alphas = (0.6, 0.9, 1.0)
    layer, x = layer_and_input(kernel_size, alphas)
    z = torch.randn(2, 3, *x.shape[2:]).double()
    for number, (block, c) in enumerate(zip(as_blocks(layer, x), layer.inject(x), strict=True)):
        matrix = layer.blocks[number].W.weight.detach()
        if kernel_size is not None:
            matrix = torch.as_tensor(conv_matrix(matrix, 5, 5, padding=1))
        before = z.flatten(1) @ matrix.T + c.flatten(1)
        inner = (torch.tanh(before) @ matrix).reshape(z.shape)
        alpha = alphas[number]
        torch.testing.assert_close(block(z), (alpha * inner + (1 - alpha) * z).detach())


def test_a_layer_in_training_is_left_alone() -> None:
    torch.manual_seed(0)
    layer = DeepOptEq(3, (4, 5), in_channels=2, alpha=(0.3, 0.7), learn_alpha=True)
    before = copy.deepcopy(layer.state_dict())
    blocks = as_blocks(layer, torch.randn(2, 2))
    assert [b.alpha for b in blocks] == pytest.approx([0.3, 0.7])
    assert layer.training
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_bad_blocks() -> None:
    for alpha in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"alpha=.*\(0, 1\]"):
            Block(torch.eye(2), torch.zeros(1, 2), NonNegative(), alpha)
    two, three = (Block(torch.eye(n), torch.zeros(1, n)) for n in (2, 3))
    with pytest.raises(ValueError, match="α < 1"):
        two.inverse(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="different shapes"):
        as_blocks([two, three])
    with pytest.raises(ValueError, match="at least one"):
        as_blocks([])
    with pytest.raises(TypeError, match="block 1 is a str"):
        as_blocks(["W"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="give x"):
        as_blocks(DeepOptEq(2, (2,)))
    with pytest.raises(TypeError, match="bound to their input"):
        as_blocks([two], torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"\[B, L, \*state\] = \(1, 2, 4\), got \(1, 4\)"):
        MultiBlock(as_torch(drawn(2))).step(torch.zeros(1, 4).double())
    with pytest.raises(ValueError, match="regularizer=None"):
        as_blocks(DeepOptEq(2, (2,), regularizer=SquaredNorm(0.1)), torch.zeros(1, 2))


# Lemma 3: the multi-block form, with its matrices, and what is wrong with it as printed.


def test_steps_are_the_matrix_formulas() -> None:
    """P = [[0, 0, I], [I, 0, 0], [0, I, 0]] for L = 3."""
    rng = np.random.default_rng(1)
    layers = random_layers(rng, 3, 4, [3, 5, 6], 0.6, 0.9)
    multi = MultiBlock(as_torch(layers))
    eye, zero = np.eye(4), np.zeros((4, 4))
    p = np.block([[zero, zero, eye], [eye, zero, zero], [zero, eye, zero]])
    c = np.concatenate([layer.c for layer in layers])
    w = scipy.linalg.block_diag(*(layer.W for layer in layers))
    z = rng.standard_normal(12)
    right = 0.6 * w.T @ np.maximum(w @ p @ z + c, 0) + 0.4 * p @ z
    printed = 0.6 * w.T @ np.maximum(w @ z + c, 0) + 0.4 * p @ z
    stacked = torch.tensor(z.reshape(1, 3, 4))
    np.testing.assert_array_equal(multi.permute(stacked).flatten(), p @ z)
    np.testing.assert_allclose(multi.step(stacked).flatten(), right, atol=1e-14)
    np.testing.assert_allclose(multi.step(stacked, as_printed=True).flatten(), printed, atol=1e-14)


# Theorem 2: the inclusion residual.


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(1, 4), alpha=st.floats(0.05, 0.95) | st.just(1.0))
def test_zero_at_the_equilibrium(seed: int, count: int, alpha: float) -> None:
    layers = drawn(count, alpha, 0.95, seed)
    z = torch.tensor(equilibrium(layers, 4))[None]
    multi = MultiBlock(as_torch(layers))
    assert float(multi.residual(multi.expand(z))) < 1e-12
    if count == 1:  # one block has no misprint
        assert float(multi.residual(multi.expand(z), as_printed=True)) < 1e-12
    assert float(inclusion_residual(multi.blocks, None, z, form="proximal")) < 1e-12
    if alpha < 1.0:
        assert float(inclusion_residual(multi.blocks, None, z)) < 1e-10


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, alpha=st.floats(0.1, 0.95))
def test_elsewhere_it_is_the_distance_of_the_gradient(seed: int, alpha: float) -> None:
    """∇(αM_φ^{1−α})(z) = α(z − u)/(1 − α), u the minimizer of the envelope's program."""
    layers = drawn(3, alpha, 1.0, seed)
    stacked = np.random.default_rng(seed).standard_normal((3, 4))
    before = np.roll(stacked, 1, axis=0)
    gaps = [
        alpha * (z - envelope(layer, z)[1]) / (1 - alpha) + z - left
        for layer, z, left in zip(layers, stacked, before, strict=True)
    ]
    found = float(inclusion_residual(as_torch(layers), None, torch.tensor(stacked)[None]))
    assert found == pytest.approx(np.linalg.norm(gaps), rel=1e-6)


def test_one_state_is_expanded() -> None:
    """All gaps but the last vanish: ‖f_L⁻¹(z) − z_{L−1}‖ remains."""
    layers = drawn(2, 0.7)
    z = np.random.default_rng(2).standard_normal(4)
    between = layers[0].f(z)
    u = envelope(layers[1], z)[1]
    expected = np.linalg.norm(0.7 * (z - u) / 0.3 + z - between)
    blocks = as_torch(layers)
    assert float(inclusion_residual(blocks, None, torch.tensor(z)[None])) == pytest.approx(expected)
    prox = float(inclusion_residual(blocks, None, torch.tensor(z)[None], form="proximal"))
    assert prox == pytest.approx(np.linalg.norm(z - layers[1].f(between)))


@pytest.mark.parametrize("kernel_size", [None, 3])
def test_equation_and_inclusion_of_a_layer(kernel_size: int | None) -> None:
    layer, x = layer_and_input(kernel_size, (0.6, 0.8, 0.9))
    multi, z = multi_block(layer, x), layer(x).detach()
    assert float(multi.residual(multi.expand(z)).max()) < 1e-6
    torch.testing.assert_close(deep_equilibrium(multi.blocks).value, z, atol=1e-7, rtol=0)
    assert float(inclusion_residual(layer, x, z).max()) < 1e-5
    assert float(inclusion_residual(layer, x, z + 0.1).min()) > 0.01


def test_bad_inclusions() -> None:
    layers = drawn(2, 1.0)
    blocks, z = as_torch(layers), torch.tensor(equilibrium(layers, 4))[None]
    with pytest.raises(ValueError, match="form='proximal'"):
        inclusion_residual(blocks, None, z)
    assert float(inclusion_residual(blocks, None, z, form="proximal")) < 1e-12
    with pytest.raises(ValueError, match="'subgradient' or 'proximal'"):
        inclusion_residual(blocks, None, z, form="both")  # type: ignore[arg-type]
    wild = [Block(2.0 * torch.eye(3), torch.zeros(1, 3), NonNegative(), 0.5)]
    with pytest.raises(ValueError, match=r"Theorem 2 rests on Assumption 2.*block 1.*up to 4"):
        inclusion_residual(wild, None, torch.ones(1, 3))
    assert bool(inclusion_residual(wild, None, torch.ones(1, 3), check=False).isfinite())


# Corollary 1: the objective of two layers, against one quadratic program over all unknowns.


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, alpha=st.floats(0.1, 0.95), norm=st.floats(0.2, 1.0))
def test_envelope_is_the_programs_value(seed: int, alpha: float, norm: float) -> None:
    rng = np.random.default_rng(seed)
    (layer,) = random_layers(rng, 1, 4, [6], alpha, norm)
    z = rng.standard_normal(4)
    (block,) = as_torch([layer])
    found = float(moreau_envelope(block, torch.tensor(z)[None]))
    assert found == pytest.approx(envelope(layer, z)[0], rel=1e-8, abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(
    seed=SEEDS,
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


def test_bad_objectives() -> None:
    z = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="L = 2 layers, got 3"):
        two_layer_objective(as_torch(drawn(3)), None, z)
    wild = [Block(2.0 * torch.eye(3), torch.zeros(1, 3), NonNegative(), 0.5)] * 2
    with pytest.raises(ValueError, match="Corollary 1 rests on Assumption 2"):
        two_layer_objective(wild, None, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="α < 1"):
        two_layer_objective(as_torch(drawn(2, 1.0)), None, z)
    with pytest.raises(ValueError, match="one shape"):
        two_layer_objective(as_torch(drawn(2)), None, z, torch.zeros(1, 3))


# Theorem 3: the wide OptEq at the end of α → 0.


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(1, 4), norm=st.floats(0.2, 0.97))
def test_the_limit_is_the_program_s(seed: int, count: int, norm: float) -> None:
    layers = drawn(count, 0.5, norm, seed)
    found = wide_limit(as_torch(layers))
    assert bool(found.converged.all())
    np.testing.assert_allclose(found.value[0], wide(layers), atol=1e-7)


def test_layers_with_their_own_alpha_count_by_it() -> None:
    layers = drawn(3, seed=2)
    shares = [0.9, 0.3, 0.6]
    for layer, share in zip(layers, shares, strict=True):
        layer.alpha = share
    y = wide(layers, [s / 0.6 for s in shares])
    blocks = as_torch(layers)
    np.testing.assert_allclose(wide_limit(blocks).value[0], y, atol=1e-7)
    # And so does the deep one, by plain iteration at small α.
    for layer, share in zip(layers, shares, strict=True):
        layer.alpha = 1e-3 * share
    assert np.linalg.norm(equilibrium(layers, 4) - y) < 3e-3
    study = approach_wide_limit(blocks, None, (0.01, 0.001))
    assert float(study.distance[-1]) < 3e-3


def test_blocks_agree_at_the_rate_alpha() -> None:
    """The audit's trend .366, .061, .0059, .00058 at α = .5, .1, .01, .001: order 1."""
    layers = random_layers(np.random.default_rng(3), 3, 6, [8, 8, 8], 0.5, 0.9)
    study = approach_wide_limit(as_torch(layers), None, (0.5, 0.1, 0.01, 0.001))
    limit = wide(layers)
    np.testing.assert_allclose(study.limit[0], limit, atol=1e-7)
    for alpha, blocks, far, gap in zip(
        study.alphas, study.blocks[:, 0], study.distance[:, 0], study.gap[:, 0], strict=True
    ):
        for layer in layers:
            layer.alpha = alpha
        z = equilibrium(layers, 6)
        states = [layers[0].f(z), layers[1].f(layers[0].f(z)), z]
        np.testing.assert_allclose(blocks, states, atol=1e-8)
        distances = [np.linalg.norm(s - limit) for s in states]
        assert float(far) == pytest.approx(max(distances), rel=1e-3)
        gaps = [np.linalg.norm(a - b) for a, b in zip(states, states[-1:] + states, strict=False)]
        assert float(gap) == pytest.approx(max(gaps), rel=1e-3)
    assert torch.all((study.orders[1:] - 1).abs() < 0.05)
    pulls = [np.linalg.norm(layer.prox(limit) - limit) for layer in layers]
    assert float(study.slope) == pytest.approx(max(pulls), rel=1e-6)
    assert float(study.gap[-1] / 0.001) == pytest.approx(max(pulls), rel=0.01)
    assert str(study).count("\n") == 4


@pytest.mark.parametrize("kernel_size", [None, 3])
def test_the_limit_as_a_layer(kernel_size: int | None) -> None:
    layer, x = layer_and_input(kernel_size, (0.7, 0.7, 0.7))
    made = to_wide_opteq(layer).eval()
    expected = wide_limit(layer, x).value
    torch.testing.assert_close(made(x).detach(), expected, atol=1e-6, rtol=0)
    assert eq.certify(made, x).unique
    assert made.nu == 3.0


def test_bad_limits() -> None:
    eye = torch.eye(3)
    with pytest.raises(ValueError, match="one layer with"):
        wide_limit([Block(eye, torch.zeros(1, 3), NonNegative(), 0.5)] * 2)
    with pytest.raises(ValueError, match="Theorem 3 rests on Assumption 2"):
        wide_limit([Block(2.0 * eye, torch.zeros(1, 3), NonNegative(), 0.5)])
    for alphas in [(), (0.0,), (1.5, 0.1), (0.1, 0.5), (0.1, 0.1)]:
        with pytest.raises(ValueError, match="alphas="):
            approach_wide_limit(as_torch(drawn(2)), None, alphas)
    with pytest.raises(ValueError, match="different α"):
        to_wide_opteq(DeepOptEq(2, (2, 2), alpha=(0.5, 0.6)))
    with pytest.raises(TypeError, match="separable"):
        to_wide_opteq(DeepOptEq(2, (2, 2), kernel_size=3, separable=True))
    with pytest.raises(ValueError, match="without a regularizer"):
        to_wide_opteq(DeepOptEq(2, (2, 2), regularizer=SquaredNorm(0.1)))
