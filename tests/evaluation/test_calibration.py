"""Bins of confidence."""

from __future__ import annotations

import math

import pytest
import torch

from equilibria.evaluation.calibration import ReliabilityMeter


def test_edges_belong_to_the_bin_below() -> None:
    meter = ReliabilityMeter(4)
    confidence = torch.tensor([0.25, 0.250001, 0.5, 0.75, 1.0])
    meter.update(confidence, torch.ones(5, dtype=torch.bool), torch.ones(5, dtype=torch.bool))
    assert meter.compute().count.tolist() == [1, 2, 1, 1]


def test_bins_hold_means() -> None:
    meter = ReliabilityMeter(2)
    yes = torch.ones(3, dtype=torch.bool)
    meter.update(torch.tensor([0.6, 0.8, 0.4]), torch.tensor([True, False, True]), yes)
    found = meter.compute()
    assert found.edges.tolist() == [0.0, 0.5, 1.0]
    assert found.confidence.tolist() == pytest.approx([0.4, 0.7])
    assert found.accuracy.tolist() == pytest.approx([1.0, 0.5])
    assert found.ece == pytest.approx(0.6 / 3 + 0.2 * 2 / 3)
    assert found.mce == pytest.approx(0.6)


def test_empty_bins_are_nan_and_do_not_count() -> None:
    meter = ReliabilityMeter(10)
    meter.update(torch.tensor([0.95]), torch.tensor([True]), torch.tensor([True]))
    found = meter.compute()
    assert math.isnan(found.accuracy[0])
    assert found.ece == pytest.approx(0.05)
    assert math.isnan(ReliabilityMeter(3).compute().ece)
    assert math.isnan(ReliabilityMeter(3).compute().mce)


def test_what_is_not_counted_leaves_no_trace() -> None:
    meter = ReliabilityMeter(5)
    counted = torch.tensor([True, False])
    meter.update(torch.tensor([0.9, math.nan]), torch.tensor([True, True]), counted)
    assert int(meter.compute().count.sum()) == 1
    assert meter.compute().ece == pytest.approx(0.1)
