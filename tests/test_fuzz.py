"""The fuzzing of tests/fuzz.py: a short one always, two minutes in test-full."""

from __future__ import annotations

import pytest

from tests.adversarial import search
from tests.fuzz import kinds, run_case


def test_the_files_are_good_before_they_are_damaged() -> None:
    assert all(kind.load(kind.path) for kind in kinds().values())


def test_a_short_search_finds_nothing_wrong() -> None:
    count, failures = search(seed=0, cases=100, run=run_case)
    assert count == 100
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_two_minutes_find_nothing_wrong() -> None:
    count, failures = search(seed=1, seconds=120.0, run=run_case)
    assert count > 200
    assert not failures, "\n".join(failures)
