"""The adversarial search of tests/adversarial.py: a short one always, ten minutes in test-full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import equilibria as eq
from tests.adversarial import draw, run_case, search


def test_a_short_search_finds_nothing_wrong() -> None:
    count, failures = search(seed=0, cases=100)
    assert count == 100
    assert not failures, "\n".join(failures)


def test_a_search_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    state = tmp_path / "search.json"
    assert search(seed=1, cases=8, state=state)[0] == 8
    assert search(seed=1, cases=12, state=state)[0] == 12
    assert search(seed=1, cases=12, state=state)[0] == 12  # nothing is left to do


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
@pytest.mark.parametrize(("seed", "number"), [(3, 980), (2, 4276)])
def test_fixed_steps_that_meet_nan_late_harm_no_weight(seed: int, number: int) -> None:
    """OneStep at a z with T(z) not finite; Unrolled where BestIterate returns an earlier z."""
    case = draw(seed, number)
    w = case.w.clone().requires_grad_()
    sol = eq.fixed_point(
        lambda z, x, mask: case.apply(z, x, mask, w),
        case.z0,
        (case.x, case.mask),
        solver=case.solver,
        adjoint=case.adjoint,
    )
    good = [b for b in range(case.batch) if b != case.bad]
    (sol.value[good] * case.g[good]).sum().backward()
    assert w.grad is not None
    assert torch.isfinite(w.grad).all()


def test_a_large_unrolled_problem_has_a_gradient_after_a_restart() -> None:
    """Anderson's emptied slots counted as residuals of length 1 beside others of 1e109: NaN."""
    text, wrong = run_case(2801, 58176)
    assert "scale 1.7e+109" in text
    assert "Unrolled" in text
    assert not wrong


def test_steps_taken_again_without_a_bad_sample_have_numbers_of_their_own() -> None:
    """Rounding made the second path of Anderson another one; its residual was that of the first."""
    text, wrong = run_case(4100, 2676)
    assert "Unrolled" in text
    assert "bad=0" in text
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_ten_minutes_find_nothing_wrong(seed: int) -> None:
    """Five minutes for each of two seeds."""
    count, failures = search(seed=seed, seconds=300.0)
    assert count > 1500
    assert not failures, "\n".join(failures)
