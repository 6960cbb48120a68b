"""Sums over an epoch do not depend on when they are read; what is said of the solvers."""

from __future__ import annotations

import io
import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback
from torch import nn

import equilibria as eq
from equilibria.engine.result import ConvergenceWarning
from equilibria.training.epoch_metrics import (
    SOLVER_FIELDS,
    EpochMetrics,
    solver_numbers,
    warn_unsettled,
)

from .small import config, run

steps = st.lists(st.tuples(st.floats(0, 10, width=32), st.integers(0, 32)), min_size=1, max_size=30)


def stored(metrics: EpochMetrics) -> EpochMetrics:
    """The same, from a file that needs no unpickling."""
    file, found = io.BytesIO(), EpochMetrics()
    torch.save(metrics.state_dict(), file)
    file.seek(0)
    found.load_state_dict(torch.load(file, weights_only=True))
    return found


@given(steps, st.sets(st.integers(0, 29)))
@settings(deadline=None, max_examples=50)
def test_means_do_not_depend_on_when_they_are_read_or_stored(
    rows: list[tuple[float, int]], reads: set[int]
) -> None:
    metrics, other = EpochMetrics(), EpochMetrics()
    for k, (loss, right) in enumerate(rows):
        for one in (metrics, other):
            one.add(torch.tensor(loss), torch.tensor(right), torch.tensor(32), 32)
        if k in reads:
            metrics.latest()
            metrics = stored(metrics)
    assert metrics.row() == other.row()
    mean = math.fsum(loss for loss, _ in rows) / len(rows)
    assert metrics.row()["loss"] == pytest.approx(mean)
    assert metrics.row()["accuracy"] == pytest.approx(sum(r for _, r in rows) / 32 / len(rows))


def test_the_latest_numbers_count_from_the_last_reading() -> None:
    metrics = EpochMetrics()
    metrics.add(torch.tensor(4.0), torch.tensor(1), torch.tensor(2), 2)
    assert metrics.latest()["loss"] == 4.0
    assert math.isnan(metrics.latest()["loss"])
    metrics.add(torch.tensor(1.0), torch.tensor(2), torch.tensor(2), 2)
    found = metrics.latest()
    assert (found["loss"], found["accuracy"]) == (1.0, 1.0)
    assert found["samples_per_second"] > 0
    assert metrics.row() == {"loss": 2.5, "accuracy": 0.75}


def test_the_speed_counts_images_and_not_their_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 2.0)  # seconds at each look
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    metrics = EpochMetrics()
    metrics.add(torch.tensor(1.0), torch.tensor(50), torch.tensor(100), 4)
    assert metrics.latest()["samples_per_second"] == 2.0
    metrics = stored(metrics)  # stopped at 6 s; a resumed epoch, from 4 s on, has its own rate
    metrics.add(torch.tensor(1.0), torch.tensor(50), torch.tensor(100), 6)
    assert metrics.speed() == {"seconds": 6.0 + 4.0, "images_per_second": 1.5}
    assert stored(metrics).speed() == {"seconds": 18.0}  # resumed for its validation alone


def test_the_speed_of_an_epoch_is_that_of_its_steps(tmp_path: Path) -> None:
    class SlowValidation(Callback):
        def on_validation_batch_start(self, *_: Any) -> None:
            time.sleep(0.5)

    row = run(config(tmp_path, epochs=1), callbacks=[SlowValidation()]).history[-1]
    assert row["seconds"] - 192 / row["images_per_second"] > 0.45


def test_a_process_whose_labels_do_not_count_takes_part_in_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others would wait for it."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", seen.append)
    metrics = EpochMetrics()
    metrics.state_dict()
    assert not seen  # before the first step nobody adds, whatever was loaded
    metrics.add(torch.tensor(0.0), torch.tensor(0), torch.tensor(0), 2)
    metrics.state_dict()
    assert len(seen) == 1


def test_solver_numbers_that_are_not_there_do_not_count() -> None:
    metrics = EpochMetrics()
    for converged in (math.nan, 0.5):
        metrics.add_solver(torch.tensor([4.0, 0.25, converged, 0.0]))
    metrics.add_solver(None)
    found = stored(metrics).row()
    assert [found[name] for name in SOLVER_FIELDS] == [4.0, 0.25, 0.5, 0.0]


def layer(solver: eq.Picard) -> eq.nn.GEQ:
    torch.manual_seed(0)
    return eq.nn.GEQ(4, 4, in_channels=3, hidden=None, solver=solver)


def numbers(model: nn.Module, x: torch.Tensor) -> list[float]:
    with eq.nn.observe(model) as seen:
        model(x)
    found = solver_numbers(seen)
    return [float(v) for v in found]


def test_a_tolerance_is_counted_and_fixed_steps_do_not_dilute_it() -> None:
    tight = layer(eq.Picard(rtol=1e-6, max_steps=200))
    x = torch.randn(5, 3)
    steps, residual, converged, failed = numbers(nn.Sequential(tight), x)
    sol = tight.solve(x)
    assert steps == pytest.approx(float(sol.stats.steps.float().mean()))
    assert residual == pytest.approx(float(sol.stats.relative.mean()))
    assert (converged, failed) == (1.0, 0.0)
    fixed = layer(eq.Picard(rtol=0.0, atol=0.0, max_steps=3))
    count, residual, converged, failed = numbers(fixed, x)
    assert (count, failed) == (3.0, 0.0)
    assert 0 < residual < 1
    assert math.isnan(converged)
    both, _, converged, _ = numbers(nn.Sequential(tight, nn.Linear(4, 3), fixed), x)
    assert converged == 1.0
    assert both == pytest.approx((steps + 3.0) / 2)


def test_branches_of_fixed_steps_have_no_tolerance_to_reach() -> None:
    """None of them tests anything: neither all nor none have converged."""

    def converged(*solvers: eq.Picard) -> float:
        torch.manual_seed(0)
        patch = eq.Patches(channels=2, size=1)
        branches = [eq.nn.GEQ(2, 2, patch=patch, hidden=None, solver=one) for one in solvers]
        return numbers(eq.nn.MultiBranch(branches, (4, 2)), torch.randn(3, 2, 4, 4))[2]

    fixed, tight = eq.Picard(rtol=0.0, atol=0.0, max_steps=3), eq.Picard(rtol=1e-4, max_steps=200)
    assert math.isnan(converged(fixed, fixed))
    assert converged(fixed, tight) == 1.0
    with pytest.warns(ConvergenceWarning):
        assert converged(tight, eq.Picard(rtol=1e-9, max_steps=1)) == 0.5


def test_a_failed_sample_is_counted_and_spares_the_residual() -> None:
    x = torch.randn(4, 3)
    x[1, 0] = float("inf")
    _, residual, _, failed = numbers(layer(eq.Picard(rtol=0.0, atol=0.0, max_steps=3)), x)
    assert failed == 0.25
    assert math.isfinite(residual)
    with eq.nn.observe(nn.Linear(3, 2)) as seen:
        pass
    assert solver_numbers(seen) is None


def test_only_a_large_residual_is_worth_a_warning() -> None:
    """Networks without a solve have no such row; warnings are errors here."""
    tested = {"residual": 0.5, "solver_steps": 4.0, "converged": 1.0}  # a loose tolerance, passed
    for row in ({}, {"residual": math.nan, "solver_steps": 4.0}, {"residual": 0.1}, tested):
        warn_unsettled(row)
    with pytest.warns(ConvergenceWarning, match=r"the last of 4 steps still moved the .* 0\.46"):
        warn_unsettled({"residual": 0.456, "solver_steps": 4.0})
