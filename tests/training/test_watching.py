"""Solver statistics as the progress bar shows them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.engine.result import ConvergenceWarning
from equilibria.training.watching import solver_numbers, warn_unsettled


def layer(solver: eq.Picard) -> eq.nn.GEQ:
    torch.manual_seed(0)
    return eq.nn.GEQ(4, 4, in_channels=3, hidden=None, solver=solver)


def numbers(model: nn.Module, x: torch.Tensor) -> list[float]:
    with eq.nn.observe(model) as seen:
        model(x)
    found = solver_numbers(model, seen)
    assert found is not None
    return [float(v) for v in found]


def test_a_tolerance_is_counted() -> None:
    tight = layer(eq.Picard(rtol=1e-6, max_steps=200))
    x = torch.randn(5, 3)
    steps, residual, converged, failed = numbers(nn.Sequential(tight), x)
    sol = tight.solve(x)
    assert steps == pytest.approx(float(sol.stats.steps.float().mean()))
    assert residual == pytest.approx(float(sol.stats.relative.mean()))
    assert (converged, failed) == (1.0, 0.0)


def test_fixed_steps_have_no_share_converged() -> None:
    fixed = layer(eq.Picard(rtol=0.0, atol=0.0, max_steps=3))
    steps, residual, converged, failed = numbers(fixed, torch.randn(5, 3))
    assert steps == 3.0
    assert 0 < residual < 1
    assert math.isnan(converged)
    assert failed == 0.0


def test_layers_are_averaged_and_fixed_ones_do_not_dilute_the_share() -> None:
    two = nn.Sequential(
        layer(eq.Picard(rtol=1e-6, max_steps=200)),
        nn.Linear(4, 3),
        layer(eq.Picard(rtol=0.0, atol=0.0, max_steps=3)),
    )
    steps, _, converged, _ = numbers(two, torch.randn(5, 3))
    assert converged == 1.0
    assert 3.0 < steps < 200.0


def test_a_failed_sample_is_counted_and_spares_the_residual() -> None:
    x = torch.randn(4, 3)
    x[1, 0] = float("inf")
    _, residual, _, failed = numbers(layer(eq.Picard(rtol=0.0, atol=0.0, max_steps=3)), x)
    assert failed == 0.25
    assert math.isfinite(residual)


def test_a_model_without_solves_has_no_numbers() -> None:
    model = nn.Linear(3, 2)
    with eq.nn.observe(model) as seen:
        model(torch.randn(2, 3))
    assert solver_numbers(model, seen) is None


def test_only_a_large_residual_is_worth_a_warning() -> None:
    """Networks without a solve have no such row; warnings are errors here."""
    tested = {"residual": 0.5, "solver_steps": 4.0, "converged": 1.0}  # a loose tolerance, passed
    for row in ({}, {"residual": math.nan, "solver_steps": 4.0}, {"residual": 0.1}, tested):
        warn_unsettled(row)
    with pytest.warns(ConvergenceWarning, match=r"the last of 4 steps still moved the .* 0\.46"):
        warn_unsettled({"residual": 0.456, "solver_steps": 4.0})
