"""Gradient flow and descent against independent integrators, conserved quantities and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from equilibria_papers.theory.monotone_ntk import (
    SCENARIOS,
    Outcome,
    ThesisModel,
    gradient_descent,
    gradient_flow,
    run_scenario,
)

from . import oracles


def small(seed: int = 0) -> tuple[ThesisModel, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    model = ThesisModel.usual(4, 3, m=0.6, generator=g)
    X = torch.randn(3, 2, dtype=torch.float64, generator=g)
    return model, X, torch.randn(2, dtype=torch.float64, generator=g)


def slope(model: ThesisModel, X: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """L and −∇L by autograd."""
    p = {k: v.requires_grad_() for k, v in oracles.parameters(model).items()}
    loss = 0.5 * (oracles.outputs(p, X, model.m) - y).square().sum()
    parts = torch.autograd.grad(loss, list(p.values()))
    return float(loss.detach()), -torch.cat([g.reshape(-1) for g in parts])


@pytest.mark.parametrize("method", ["DOP853", "fixed"])
def test_flow_is_an_independent_runge_kutta(method: str) -> None:
    model, X, y = small()
    horizon, steps = 0.05, 4  # short: no unit switches on the way
    run = gradient_flow(model, X, y, horizon=horizon, points=3, method=method, steps=40)
    theta, h = model.vector(), horizon / steps
    for _ in range(steps):
        k1 = slope(model.at(theta), X, y)[1]
        k2 = slope(model.at(theta + h / 2 * k1), X, y)[1]
        k3 = slope(model.at(theta + h / 2 * k2), X, y)[1]
        k4 = slope(model.at(theta + h * k3), X, y)[1]
        theta = theta + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    torch.testing.assert_close(run.final.vector(), theta, rtol=1e-7, atol=1e-8)
    assert run.loss[-1] == pytest.approx(slope(model.at(theta), X, y)[0], rel=1e-7)
    assert run.times == pytest.approx((0.0, horizon / 2, horizon))


def test_flow_of_one_neuron_keeps_its_invariant() -> None:
    """n = d = N = 1, A = B = 0, m = 1, x = 1: f = uU, so U² − u² stays and the loss falls."""
    one = torch.ones(1, 1, dtype=torch.float64)
    model = ThesisModel(A=0 * one, B=0 * one, U=2 * one, u=0.5 * one[0], m=1.0)
    run = gradient_flow(model, one, torch.tensor([3.0]), horizon=0.7, points=8)
    end = run.final
    assert float(end.U) ** 2 - float(end.u) ** 2 == pytest.approx(4 - 0.25, rel=1e-8)
    # PL ratio and kernel in closed form: K = u² + U² (A and B do not act).
    assert run.kernel[-1] == pytest.approx(float(end.U) ** 2 + float(end.u) ** 2, rel=1e-9)
    assert run.pl[-1] == pytest.approx(run.kernel[-1], rel=1e-6)
    assert run.guaranteed[-1] == pytest.approx(2.0 * math.exp(-4 * 0.7 / 2))
    assert run.moved["U"][-1] == pytest.approx(abs(float(end.U) - 2.0))


def test_descent_is_autograds() -> None:
    model, X, y = small(1)
    run = gradient_descent(model, X, y, step=0.01, steps=5)
    theta = model.vector()
    losses = []
    for _ in range(6):
        loss, move = slope(model.at(theta), X, y)
        losses.append(loss)
        theta = theta + 0.01 * move
    assert run.loss == pytest.approx(losses, rel=1e-9)
    assert run.guaranteed[3] == pytest.approx((1 - 0.01 * run.lambda0**2 / 4) ** 3 * losses[0])
    every = gradient_descent(model, X, y, step=0.01, steps=5, every=2)
    assert every.times == (0.0, 2.0, 4.0, 5.0)
    assert every.loss[-1] == run.loss[-1]


def test_uniform_conditioning_gives_pl() -> None:
    """Theorem 2.6.4 along a run: ‖∇L‖²/(2L) ≥ λ_min(K) ≥ σ_min(Z)²."""
    run = gradient_descent(*small(2), step=0.02, steps=30)
    for pl, kernel, features in zip(run.pl, run.kernel, run.features, strict=True):
        assert pl >= kernel * (1 - 1e-9)
        assert kernel >= features**2 * (1 - 1e-9)


def test_a_flow_that_slides_says_so() -> None:
    model, X, y = SCENARIOS["usual-flow"].build(0)
    with pytest.raises(ArithmeticError, match=r"slides along a kink.*method='fixed'"):
        gradient_flow(model, X, y, horizon=1.0, points=3, max_evaluations=800)


def test_fixed_steps_converge_through_kinks() -> None:
    model, X, y = SCENARIOS["usual-flow"].build(0)
    ends = [
        gradient_flow(model, X, y, horizon=0.5, points=2, method="fixed", steps=k).loss[-1]
        for k in (30, 60, 180)
    ]
    assert abs(ends[1] - ends[2]) < 0.01 * ends[2]
    assert abs(ends[1] - ends[2]) < abs(ends[0] - ends[2]) * 1.5 + 1e-4


# ---------------------------------------------------------------------- scenarios


@pytest.fixture(scope="module")
def broken() -> Outcome:
    return run_scenario("counterexample")


def test_the_printed_theorem_3_3_5_breaks(broken: Outcome) -> None:
    assert broken.report.holds
    assert not broken.kept
    assert broken.run.step == pytest.approx(1e-4)
    assert broken.run.loss[:4] == pytest.approx([0.5, 4.5, 40.5, 364.5], rel=1e-3)
    assert "theorem is false" in broken.verdict


def test_the_guaranteed_flow_keeps_its_rate() -> None:
    calls: list[float] = []
    outcome = run_scenario("guaranteed-flow", progress=calls.append)
    assert outcome.report.holds
    assert outcome.kept
    assert outcome.run.worst < 1
    assert outcome.run.loss[-1] < 1e-15
    assert max(calls) == pytest.approx(1.0)
    assert min(calls) >= 0.0
    for name, values in outcome.run.moved.items():
        assert max(values) < getattr(outcome.report.radii, name)
    assert min(outcome.run.features) >= outcome.run.lambda0 / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guaranteed-descent", "guaranteed-random"])
def test_the_other_guarantees_are_kept(name: str) -> None:
    outcome = run_scenario(name)
    assert outcome.report.holds
    assert outcome.kept
    assert outcome.run.worst < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["usual-flow", "usual-descent"])
def test_usual_runs_are_guaranteed_nothing(name: str) -> None:
    outcome = run_scenario(name)
    assert not outcome.report.holds
    assert "nothing is guaranteed" in outcome.verdict
    assert outcome.run.loss[-1] < 1e-6 * outcome.run.loss[0]


def test_wrong_arguments() -> None:
    model, X, y = small()
    with pytest.raises(ValueError, match="step=0"):
        gradient_descent(model, X, y, step=0, steps=1)
    with pytest.raises(ValueError, match="horizon=-1"):
        gradient_flow(model, X, y, horizon=-1)
    with pytest.raises(ValueError, match="y must be"):
        gradient_flow(model, X, y[:1])
    with pytest.raises(ValueError, match="no scenario 'x'"):
        run_scenario("x")
    wide = ThesisModel.usual(1, 3)
    with pytest.raises(ValueError, match="λ₀"):
        gradient_flow(wide, X, y)
