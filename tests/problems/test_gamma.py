"""γ policies: formulas, positivity, independence of the batch, Lipschitz factors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

import equilibria as eq
from equilibria.problems import GammaPolicy, as_gamma

ENERGIES = torch.tensor([[1.0, 2.0, 6.0], [0.5, 0.25, 4.0]], dtype=torch.float64)


def test_formulas() -> None:
    np.testing.assert_array_equal(eq.FixedGamma(0.7)(ENERGIES).numpy(), [0.7, 0.7])
    np.testing.assert_allclose(eq.MinPatchEnergy(0.2)(ENERGIES).numpy(), [0.2, 0.8], rtol=1e-15)
    np.testing.assert_allclose(
        eq.MeanPatchEnergy(0.3)(ENERGIES).numpy(), [0.3 / 3.0, 0.9 / 4.75], rtol=1e-15
    )


@pytest.mark.parametrize(
    ("policy", "moves"),
    [
        (eq.FixedGamma(), False),
        (eq.MinPatchEnergy(), True),
        (eq.MeanPatchEnergy(), True),
        (eq.MinPatchEnergy(detach=True), False),
        (eq.MeanPatchEnergy(detach=True), False),
    ],
)
def test_per_sample_with_a_gradient_unless_detached(policy: GammaPolicy, moves: bool) -> None:
    energies = ENERGIES.clone().requires_grad_()
    both = policy(energies)
    assert both.requires_grad is moves
    if moves:
        assert torch.autograd.gradcheck(policy, (energies,))
        assert torch.autograd.gradgradcheck(policy, (energies,))
    for i in range(2):
        torch.testing.assert_close(policy(energies[i : i + 1]), both[i : i + 1], rtol=0, atol=0)


@pytest.mark.parametrize("policy", [eq.MinPatchEnergy(), eq.MeanPatchEnergy()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zero_energy_gives_a_finite_gamma(policy: GammaPolicy, dtype: torch.dtype) -> None:
    gamma = policy(torch.zeros(2, 3, dtype=dtype))
    assert gamma.dtype in (torch.float32, torch.float64)
    np.testing.assert_allclose(gamma.double().numpy(), 0.2 / 1e-12, rtol=1e-6)


@pytest.mark.parametrize("policy", [eq.MinPatchEnergy(), eq.MeanPatchEnergy()])
def test_energies_that_overflow_fail_their_sample(policy: GammaPolicy) -> None:
    """They say nothing of γ: a solve with any other number would be called converged."""
    top = torch.finfo(torch.float32).max
    gamma = policy(torch.tensor([[1.0, top], [1.0, math.inf], [1.0, 3.0]]))
    assert gamma.isnan().tolist() == [True, True, False]
    layer, x = eq.nn.GEQ(4, 5, gamma=policy), torch.randn(2, 4)
    with pytest.warns(eq.ConvergenceWarning, match="1 of 2"):
        found = layer.solve(torch.stack([1e25 * x[0], x[1]]))
    assert found.result.tolist() == [eq.Result.nonfinite, eq.Result.converged]


@pytest.mark.parametrize("policy", [eq.MinPatchEnergy(), eq.MeanPatchEnergy()])
def test_gradients_are_finite_at_the_floor_and_above(policy: GammaPolicy) -> None:
    """Below the floor γ is constant; just above it its slope −0.2/E² is large and finite."""
    energies = torch.tensor([[0.0, 0.0], [9e-13, 9e-13], [2e-12, 2e-12], [math.nan, 1.0]])
    energies.requires_grad_()
    gamma = policy(energies)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0])
    (slope,) = torch.autograd.grad((gamma * weight).sum(), energies)
    np.testing.assert_array_equal(slope[[0, 1, 3]].numpy(), 0.0)
    np.testing.assert_allclose(float(slope[2].sum()), -0.2 / 4e-24, rtol=1e-6)


def test_lipschitz_factors() -> None:
    assert eq.FixedGamma().lipschitz_factor == 1.0
    assert eq.LearnedGamma().lipschitz_factor == 1.0
    assert eq.MinPatchEnergy().lipschitz_factor is None
    assert eq.MinPatchEnergy().input_dependent
    assert eq.MeanPatchEnergy().input_dependent
    assert not eq.FixedGamma().input_dependent
    assert eq.MeanPatchEnergy(0.2).lipschitz_factor == pytest.approx(2.833, abs=5e-4)


@pytest.mark.parametrize("scale", [0.05, 0.2, 1.0])
def test_mean_factor_from_its_own_derivation(scale: float) -> None:
    """1 + 2·max_h|d(e^{−γh²}h)/dγ|·γ^{3/2}/√scale, the maximum found numerically at γ = 1."""
    found = minimize_scalar(lambda h: -(h**3) * math.exp(-h * h), bounds=(0.1, 4), method="bounded")
    expected = 1 - 2 * found.fun / math.sqrt(scale)
    assert eq.MeanPatchEnergy(scale).lipschitz_factor == pytest.approx(expected, rel=1e-8)


def test_learned_gamma_is_positive_and_has_a_gradient() -> None:
    policy = eq.LearnedGamma(0.5)
    rho = policy.initial_parameter().double().requires_grad_()
    gamma = policy.bind(rho)(ENERGIES)
    torch.testing.assert_close(gamma, torch.full((2,), 0.5, dtype=torch.float64), rtol=1e-7, atol=0)
    (grad,) = torch.autograd.grad(gamma.sum(), rho)
    assert float(grad) == pytest.approx(2 * 0.5, rel=1e-7)  # dγ/dρ = γ, two samples
    assert policy.gamma_from(torch.tensor(-50.0)) > 0
    per_sample = policy.bind(torch.tensor([0.0, 1.0]))(ENERGIES)
    np.testing.assert_allclose(per_sample.numpy(), [1.0, math.e], rtol=1e-6)
    with pytest.raises(ValueError, match="bind"):
        policy(ENERGIES)
    with pytest.raises(ValueError, match="batch of 2"):
        policy.bind(torch.zeros(3))(ENERGIES)
    assert not policy.bind(rho).input_dependent


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: eq.FixedGamma(0.0), ValueError, "value=0.0"),
        (lambda: eq.MinPatchEnergy(0.0), ValueError, "scale=0.0"),
        (lambda: eq.MeanPatchEnergy(0.2, floor=0.0), ValueError, "floor=0.0"),
        (lambda: eq.MeanPatchEnergy(0.2, detach=1), TypeError, "detach=1.*True or False"),  # type: ignore[arg-type]
        (lambda: eq.LearnedGamma(0.0), ValueError, "init=0.0"),
        (lambda: as_gamma(0.0), ValueError, "gamma=0.0"),
        (lambda: as_gamma(math.inf), ValueError, "gamma=inf"),
        (lambda: as_gamma("mean"), TypeError, "'mean'"),  # type: ignore[arg-type]
        (lambda: as_gamma(True), TypeError, "bool"),
        (lambda: eq.FixedGamma()(torch.ones(3)), ValueError, r"\[B, P\]"),
        (lambda: eq.MeanPatchEnergy()(torch.ones(3, 0)), ValueError, "P ≥ 1"),
    ],
)
def test_bad_values_are_named(make, error: type[Exception], words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=words):
        make()
