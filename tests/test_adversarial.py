"""The adversarial search of tests/adversarial.py: a short one always, ten minutes in test-full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversarial import search


def test_a_short_search_finds_nothing_wrong() -> None:
    count, failures = search(seed=0, cases=160)
    assert count == 160
    assert not failures, "\n".join(failures)


def test_a_search_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    state = tmp_path / "search.json"
    assert search(seed=1, cases=8, state=state)[0] == 8
    assert search(seed=1, cases=12, state=state)[0] == 12
    assert search(seed=1, cases=12, state=state)[0] == 12  # nothing is left to do


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_ten_minutes_find_nothing_wrong(seed: int) -> None:
    """Five minutes for each of two seeds."""
    count, failures = search(seed=seed, seconds=300.0)
    assert count > 1500
    assert not failures, "\n".join(failures)
