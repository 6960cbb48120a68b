"""The certificate of a deep OptEq: bounds against numpy in extended precision, and what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria import L1, Decorrelation, FeatureIncay, SquaredNorm, Tanh
from equilibria.certify import Guarantee
from equilibria.certify.block_chain import regularizer_factor
from equilibria.nn import NormBounded
from equilibria.nn.deep_opteq import DeepOptEq
from equilibria.nn.opteq import OptEq
from equilibria.problems import CustomPrior, WithL1
from tests.nn.test_deep_opteq import FORMS, drawn, made
from tests.problems.test_operators import randn

Long = np.longdouble  # 64 bits of mantissa: its own rounding is 2000 times below float64's

REGULARIZED: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "none": ({}, lambda z: z),
    "squared": ({"regularizer": SquaredNorm(0.25)}, lambda z: z - Long(0.25) * z),
    "squared prox": (
        {"regularizer": SquaredNorm(0.25), "regularize": "prox"},
        lambda z: z / Long(1.25),
    ),
    "l1 prox": (
        {"regularizer": L1(0.0625), "regularize": "prox"},
        lambda z: np.sign(z) * np.maximum(np.abs(z) - Long(0.0625), 0),
    ),
    "incay": (
        {"regularizer": FeatureIncay(0.03125, 1.0)},
        lambda z: z * (1 + 4 * Long(0.03125) / ((z * z).sum() + 2) ** 2),
    ),
}


def extended_map(
    layer: DeepOptEq, x: Tensor, inside: Callable[[np.ndarray], np.ndarray], i: int
) -> Callable[[np.ndarray], np.ndarray]:
    """T of sample i in extended precision, on the numbers of the layer; c is what it computes."""
    shown = [block.operator for block in layer.bound_blocks()]
    pairs = []
    size = (layer.channels, *x.shape[2:])
    for operator, c in zip(shown, layer.inject(x), strict=True):
        basis = torch.eye(math.prod(size), dtype=torch.float64).reshape(-1, *size)
        w = operator(basis).flatten(1).T.detach().numpy().astype(Long)
        pairs.append((w, c[i].flatten().detach().numpy().astype(Long)))
    alphas = [Long(a) for a in layer.alphas().tolist()]

    def t(z: np.ndarray) -> np.ndarray:
        z = inside(z)
        for (w, c), alpha in zip(pairs, alphas, strict=True):
            z = alpha * (w.T @ np.maximum(w @ z + c, 0)) + (1 - alpha) * z
        return z

    return t


@pytest.mark.parametrize("kind", list(REGULARIZED))
@pytest.mark.parametrize("form", ["dense", "convolution"])
def test_the_error_bound_and_its_rounding(kind: str, form: str) -> None:
    """At rough, fine and exact states: ‖z − z*‖ ≤ bound, and the residual is within its rounding.

    (A separable W is one matrix for the oracle, but two rounded products for the layer, so that
    only the other two are compared to the last digit.)
    """
    options, inside = REGULARIZED[kind]
    layer, x = made(form, **options), drawn(form)
    exact_state = layer(x).detach()
    for scale in (1.0, 1e-6, 0.0):
        z = exact_state + scale * randn(*exact_state.shape, seed=3)
        found = layer.certify(x, z)
        assert found.rigorous
        assert found.kind == Guarantee.contraction
        for i in range(2):
            t = extended_map(layer, x, inside, i)
            state = z[i].flatten().numpy().astype(Long)
            answer = state
            for _ in range(300):
                answer = t(answer)
            distance = float(np.linalg.norm((state - answer).astype(float)))
            bound = float(found.error_bound[i])
            assert distance <= bound
            if scale:
                assert bound <= 60 * distance
            residual = (state - t(state)).astype(Long)
            size = np.sqrt((residual * residual).sum())
            off = abs(float(size - Long(float(found.residual[i]))))
            assert off <= float(found.rounding[i])
            assert float(found.rounding[i]) < 1e-11


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    alpha=st.floats(0.05, 1.0),
    bound=st.floats(0.1, 0.99),
    form=st.sampled_from(list(FORMS)),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_no_two_states_come_apart_faster_than_the_factor(
    seed: int, alpha: float, bound: float, form: str, scale: float
) -> None:
    layer = made(form, alpha=alpha, constraint=NormBounded(bound=bound, size=8))
    x = drawn(form, 1)
    found = layer.certify(x)
    shape = (1, 4, *x.shape[2:])
    c = layer.inject(x)
    a, b = scale * randn(*shape, seed=seed), scale * randn(*shape, seed=seed + 1)
    with torch.no_grad():
        moved = layer.step(a, *c) - layer.step(b, *c)
    assert float(moved.norm()) <= found.contraction * float((a - b).norm()) * (1 + 1e-12)


def test_the_factor_and_the_lipschitz_constant_are_reached() -> None:
    """W_l and U_l multiples of orthogonal matrices, all units on: T is linear, bounds are sharp."""
    layer = made(mids=(3, 3), channels=3, alpha=(0.5, 0.8))
    turn, other = torch.linalg.qr(randn(2, 3, 3, seed=1)).Q
    for block, norm, reach in zip(layer.blocks, (0.9, 0.6), (2.0, 0.7), strict=True):
        block.W.weight = norm * turn
        with torch.no_grad():
            block.U.weight.copy_(reach * other)
            block.U.bias.fill_(100.0)
    x = drawn(batch=1)
    found = layer.certify(x)
    first, second = 0.5 * 0.81 + 0.5, 0.8 * 0.36 + 0.2
    assert found.contraction == pytest.approx(first * second, rel=1e-12)
    c = layer.inject(x)
    a = randn(1, 3, seed=2)
    with torch.no_grad():
        moved = layer.step(a, *c) - layer.step(torch.zeros_like(a), *c)
    torch.testing.assert_close(moved.norm() / a.norm(), torch.tensor(first * second).double())
    expected = (second * 0.5 * 0.9 * 2.0 + 0.8 * 0.6 * 0.7) / (1 - first * second)
    assert found.lipschitz == pytest.approx(expected, rel=1e-12)
    jacobian = torch.autograd.functional.jacobian(layer, x).reshape(3, 3)
    assert float(torch.linalg.matrix_norm(jacobian, 2)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("prior", [Tanh(), eq.NonNegative()], ids=["tanh", "relu"])
def test_the_lipschitz_constant_bounds_the_jacobian(form: str, prior: Any) -> None:
    layer, x = made(form, prior=prior), drawn(form, 1)
    known = layer.certify(x).lipschitz
    jacobian = torch.autograd.functional.jacobian(layer, x)
    steepest = float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))
    assert steepest <= known
    if form == "dense":
        assert known < 40 * steepest


# ---------------------------------------------------------------------- regularizers


@pytest.mark.parametrize(
    ("regularizer", "form", "expected"),
    [
        (None, "gradient", 1.0),
        (SquaredNorm(0.3), "gradient", 0.7),
        (SquaredNorm(1.5), "gradient", 0.5),
        (SquaredNorm(3.0), "gradient", 2.0),
        (SquaredNorm(0.3), "prox", 1 / 1.3),
        (L1(0.3), "prox", 1.0),
        # [−w/ε², w/4ε²] = [−0.4, 0.1]
        (FeatureIncay(0.1, 0.5), "gradient", 1.4),
        (Decorrelation(), "gradient", math.inf),
    ],
)
def test_the_factor_of_the_regularizing_step(regularizer: Any, form: str, expected: float) -> None:
    found = regularizer_factor(regularizer, form)
    assert expected <= found <= expected * (1 + 1e-13)


def test_a_regularizer_across_the_batch_certifies_nothing() -> None:
    layer = made(regularizer=Decorrelation(0.01))
    found = layer.certify(drawn(), randn(2, 4, seed=1))
    assert found.kinds == (Guarantee.none,) * 2
    assert found.contraction is None
    assert found.lipschitz is None
    assert not found.rigorous
    assert torch.isinf(found.error_bound).all()
    assert "couples the samples" in str(found)


# ---------------------------------------------------------------------- no contraction


@pytest.mark.parametrize(
    ("norm", "text"),
    [(1.0, "nonexpansive, to rounding, but not proven"), (1.3, "not proven nonexpansive")],
)
def test_without_a_contraction_it_says_what_is_known(norm: float, text: str) -> None:
    layer = made(mids=(4, 4), constraint=None)
    with torch.no_grad():
        for block in layer.blocks:
            block.W.weight.copy_(norm * torch.linalg.qr(randn(4, 4, seed=1)).Q)
    found = layer.certify(drawn(), torch.zeros(2, 4, dtype=torch.float64))
    assert found.kinds == (Guarantee.none,) * 2
    assert not found.unique
    assert torch.isinf(found.error_bound).all()
    assert found.lipschitz is None
    assert found.contraction >= 1.0
    assert text in str(found)


def test_one_contracting_block_is_enough() -> None:
    """Theorem 3's premise: all ‖W_l‖ ≤ 1 and one below; even one above 1 may be made good."""
    layer = made(mids=(4, 4), constraint=None, alpha=0.5)
    with torch.no_grad():
        for block, norm in zip(layer.blocks, (1.2, 0.4), strict=True):
            block.W.weight.copy_(norm * torch.linalg.qr(randn(4, 4, seed=1)).Q)
    found = layer.certify(drawn())
    assert found.kind == Guarantee.contraction
    assert found.contraction == pytest.approx((0.72 + 0.5) * (0.08 + 0.5), rel=1e-12)


# ---------------------------------------------------------------------- how it is asked for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_answer_of_a_lower_precision_is_judged_in_float64(dtype: torch.dtype) -> None:
    """The bound holds for what the layer returned, its own rounding included."""
    layer = made(learn_alpha=True, solver=None, adjoint=None).to(dtype)
    x = drawn().to(dtype)
    found = layer.certify(x)
    assert found.error_bound.dtype == torch.float64
    assert found.kind == Guarantee.contraction
    with torch.no_grad():
        z, c = layer(x), [part.double() for part in layer.inject(x)]
        alphas = layer.alphas().double().tolist()
        weights = [block.operator.weight.double() for block in layer.bound_blocks()]
    answer = z.double()
    for _ in range(2000):
        for w, part, alpha in zip(weights, c, alphas, strict=True):
            answer = alpha * torch.relu(answer @ w.mT + part) @ w + (1 - alpha) * answer
    distance = (z.double() - answer).norm(dim=1)
    assert (distance <= found.error_bound).all()
    assert (found.error_bound < 100 * (distance + 1e-7)).all()


def test_samples_of_a_custom_activation_are_an_estimate() -> None:
    """Slope 0.1 up to 20, then 1: a factor read off the samples around zero would be ten times
    too small, and the error bound with it."""

    def steep_far_out(v: Tensor) -> Tensor:
        return 0.1 * v.clamp(-20, 20) + torch.relu(v - 20) - torch.relu(-v - 20)

    for prior in (CustomPrior(steep_far_out), WithL1(CustomPrior(steep_far_out), 0.1)):
        layer = DeepOptEq(3, (3,), alpha=1.0, prior=prior, constraint=None, bias=False).double()
        block = layer.each_block()[0]
        with torch.no_grad():
            block.W.weight.copy_(0.99 * torch.eye(3, dtype=torch.float64))
            block.U.weight.copy_(30.0 * torch.eye(3))
        x = torch.ones(2, 3, dtype=torch.float64)
        # z = 0.99(0.99z + 30 − 18 − λ)
        weight = prior.weight if isinstance(prior, WithL1) else 0.0
        exact = torch.full_like(x, 0.99 * (12.0 - weight) / (1.0 - 0.99**2))
        found = eq.certify(layer, x, exact + 0.5)
        assert (found.error_bound >= 0.5 * math.sqrt(3) * (1 - 1e-12)).all()
        assert not found.rigorous
        assert any("CustomPrior" in note for note in found.notes)
        assert not eq.certify(OptEq(3, 3, prior=prior, form="state"), x.float()).rigorous
        assert not eq.certify(OptEq(3, 3, prior=prior), x.float()).rigorous
