"""Sums over an epoch do not depend on when they are read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.training.tally import Tally

steps = st.lists(
    st.tuples(st.floats(0, 10, width=32), st.integers(0, 32), st.just(32)), min_size=1, max_size=30
)


@given(steps, st.sets(st.integers(0, 29)))
def test_means_are_weighted_means_whenever_they_are_read(
    rows: list[tuple[float, int, int]], reads: set[int]
) -> None:
    tally, other = Tally(), Tally()
    for k, (loss, right, count) in enumerate(rows):
        for t in (tally, other):
            t.add(torch.tensor(loss), torch.tensor(right), count)
        if k in reads:
            tally.read()
    tally.read()
    other.read()
    assert tally.means() == other.means()
    total = sum(count for _, _, count in rows)
    assert tally.means()["loss"] == pytest.approx(
        math.fsum(loss * count for loss, _, count in rows) / total
    )
    assert tally.means()["accuracy"] == pytest.approx(sum(r for _, r, _ in rows) / total)


def test_a_window_counts_from_its_beginning() -> None:
    tally = Tally()
    tally.add(torch.tensor(4.0), torch.tensor(1), 2)
    tally.read()
    before = dict(tally.total)
    assert math.isnan(tally.means(before)["loss"])
    tally.add(torch.tensor(1.0), torch.tensor(2), torch.tensor(2))
    tally.read()
    assert tally.means(before) == {"loss": 1.0, "accuracy": 1.0}
    assert tally.means() == {"loss": 2.5, "accuracy": 0.75}


def test_solver_numbers_skip_what_is_not_there() -> None:
    tally = Tally()
    for converged in (float("nan"), 0.5):
        tally.add(torch.tensor(1.0), torch.tensor(1), 1)
        tally.add_solver(torch.tensor([4.0, 0.1, converged, 0.0]))
        tally.add_norm(torch.tensor(3.0))
    tally.add_solver(None)
    tally.read()
    found = tally.solver_means()
    assert found == pytest.approx(
        {"solver_steps": 4.0, "residual": 0.1, "converged": 0.5, "failed": 0.0}
    )
    assert tally.grad_norm == 3.0


def test_a_tally_comes_back_from_its_state() -> None:
    tally, again = Tally(), Tally()
    tally.add(torch.tensor(0.1), torch.tensor(1), 3, torch.tensor(0.5))
    tally.add_solver(torch.tensor([4.0, 0.1, 1.0, 0.0]))
    again.load_state_dict(tally.state_dict())
    assert again.means() == tally.means()
    assert again.solver_means() == tally.solver_means()
