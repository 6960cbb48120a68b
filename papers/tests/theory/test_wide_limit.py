"""Theorem 3: the wide OptEq at the end of α → 0, against quadratic programs and scipy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria.nn.deep_opteq import DeepOptEq
from equilibria.problems import NonNegative, SquaredNorm, Tanh
from equilibria_papers.theory import (
    Block,
    approach_wide_limit,
    to_wide_opteq,
    wide_limit,
    wide_objective,
)
from papers.tests.theory.oracles import equilibrium, random_layers, wide
from papers.tests.theory.test_blocks import as_torch


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 4), norm=st.floats(0.2, 0.97))
def test_limit_and_objective_are_the_programs(seed: int, count: int, norm: float) -> None:
    layers = random_layers(np.random.default_rng(seed), count, 4, [3, 6, 5, 2], 0.5, norm)
    y, minimum = wide(layers)
    blocks = as_torch(layers)
    found = wide_limit(blocks)
    assert bool(found.converged.all())
    np.testing.assert_allclose(found.value[0], y, atol=1e-7)
    value = float(wide_objective(blocks, None, found.value))
    assert value == pytest.approx(minimum, rel=1e-8, abs=1e-9)
    higher = wide_objective(blocks, None, found.value + 0.1)
    assert float(higher) > value


def test_equation_with_a_smooth_activation() -> None:
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((5, 3)) for _ in range(3)]
    weights = [w / np.linalg.norm(w, 2) * s for w, s in zip(weights, (0.7, 1.0, 0.9), strict=True)]
    cs = [rng.standard_normal(5) for _ in range(3)]

    def gap(z: np.ndarray) -> np.ndarray:
        parts = [w.T @ np.tanh(w @ z + c) for w, c in zip(weights, cs, strict=True)]
        return np.sum(parts, axis=0) - 3 * z

    expected = scipy.optimize.root(gap, np.zeros(3), tol=1e-14).x
    blocks = [
        Block(torch.tensor(w), torch.tensor(c)[None], Tanh(), 0.4)
        for w, c in zip(weights, cs, strict=True)
    ]
    np.testing.assert_allclose(wide_limit(blocks).value[0], expected, atol=1e-10)


def test_layers_with_their_own_alpha_count_by_it() -> None:
    layers = random_layers(np.random.default_rng(2), 3, 4, [3, 6, 5], 0.5, 0.9)
    shares = [0.9, 0.3, 0.6]
    for layer, share in zip(layers, shares, strict=True):
        layer.alpha = share
    y, minimum = wide(layers, [s / 0.6 for s in shares])
    blocks = as_torch(layers)
    limit = wide_limit(blocks).value
    np.testing.assert_allclose(limit[0], y, atol=1e-7)
    assert float(wide_objective(blocks, None, limit)) == pytest.approx(minimum, rel=1e-8)
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
    limit = wide(layers)[0]
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
    torch.manual_seed(0)
    layer = DeepOptEq(3, (4, 5, 6), in_channels=2, kernel_size=kernel_size, alpha=0.7).double()
    x = torch.randn(2, 2, 4, 4).double() if kernel_size else torch.randn(2, 2).double()
    made = to_wide_opteq(layer).eval()
    expected = wide_limit(layer, x).value
    torch.testing.assert_close(made(x).detach(), expected, atol=1e-6, rtol=0)
    assert eq.certify(made, x).unique
    assert made.nu == 3.0


class TestBadInput:
    def test_no_contraction_anywhere(self) -> None:
        blocks = [Block(torch.eye(3), torch.zeros(1, 3), NonNegative(), 0.5)] * 2
        with pytest.raises(ValueError, match="one layer with"):
            wide_limit(blocks)

    def test_norms_above_one(self) -> None:
        blocks = [Block(2.0 * torch.eye(3), torch.zeros(1, 3), NonNegative(), 0.5)]
        with pytest.raises(ValueError, match="Theorem 3 rests on Assumption 2"):
            wide_limit(blocks)

    @pytest.mark.parametrize("alphas", [(), (0.0,), (1.5, 0.1), (0.1, 0.5), (0.1, 0.1)])
    def test_alphas(self, alphas: tuple[float, ...]) -> None:
        blocks = as_torch(random_layers(np.random.default_rng(0), 2, 4, [3, 6], 0.5, 0.9))
        with pytest.raises(ValueError, match="alphas="):
            approach_wide_limit(blocks, None, alphas)

    def test_layers_with_no_wide_twin(self) -> None:
        with pytest.raises(ValueError, match="different α"):
            to_wide_opteq(DeepOptEq(2, (2, 2), alpha=(0.5, 0.6)))
        with pytest.raises(TypeError, match="separable"):
            to_wide_opteq(DeepOptEq(2, (2, 2), kernel_size=3, separable=True))
        with pytest.raises(ValueError, match="without a regularizer"):
            to_wide_opteq(DeepOptEq(2, (2, 2), regularizer=SquaredNorm(0.1)))


def test_a_study_is_frozen() -> None:
    blocks = as_torch(random_layers(np.random.default_rng(0), 2, 4, [3, 6], 0.5, 0.9))
    study = approach_wide_limit(blocks, None, (0.5, 0.1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        study.alphas = ()  # type: ignore[misc]
