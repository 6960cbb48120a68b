"""The remarks: their printed numbers, and where they are right."""

from __future__ import annotations

import math

import pytest

from equilibria_papers.theory.bounds import (
    AssumptionError,
    kerdeq_remark1,
    remark1,
    remark1_ratios,
    remark3,
)


def test_remark_1_at_its_corner() -> None:
    first, second = remark1_ratios(0.8, 1.0, 0.9)
    assert first == pytest.approx(0.2857, abs=5e-5)
    assert second == pytest.approx(0.9286, abs=5e-5)
    met, text = remark1(0.79, 0.95, 0.91)
    assert met
    assert "is met" in text
    assert not remark1(0.9, 0.95, 0.91)[0]
    assert "says nothing" in remark1(0.5, 1.0, 1.2)[1]
    with pytest.raises(AssumptionError, match="m < 1"):
        remark1_ratios(0.5, 1.0, 1.0)


def test_kerdeqs_limit_and_its_premise() -> None:
    assert kerdeq_remark1(0.9, 0.9) == pytest.approx(0.8333, abs=5e-5)
    assert kerdeq_remark1(0.9) == pytest.approx(0.8259, abs=5e-5)
    # At the limit the second ratio is exactly 1.
    assert max(remark1_ratios(kerdeq_remark1(0.9), math.sqrt(0.9), 0.9)) == pytest.approx(1.0)
    with pytest.raises(AssumptionError, match="m < 1"):
        kerdeq_remark1(1.0)


def test_remark_3_lacks_gamma() -> None:
    gamma, bound, mu = 0.2, 20.0, 0.95
    log_d = gamma * bound * mu**2

    def ratio(distance: float) -> float:
        """κ̄_geq/κ̄_opteq for β_max = 1."""
        return mu**2 * math.exp(log_d - gamma / 4 * distance**2)

    assert ratio(remark3(log_d, gamma, 1.0, printed=True)) == pytest.approx(16, abs=0.5)
    assert ratio(remark3(log_d, gamma, 1.0)) == pytest.approx(mu**2)
    assert remark3(log_d, gamma, 0.0) == math.inf
    with pytest.raises(ValueError, match="log_d"):
        remark3(-1.0, gamma, 1.0)
