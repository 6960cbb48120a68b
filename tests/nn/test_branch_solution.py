"""One Solution out of several: each sample as badly off as its worst branch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from equilibria.engine.result import BackwardStats, Result, Solution, Stats
from equilibria.nn.multi_branch import BranchSolution, combine


def part(
    codes: list[int], steps: list[int], residual: list[float], choice: str = ""
) -> Solution[Tensor]:
    r = torch.tensor(residual)
    stats = Stats(torch.tensor(steps, dtype=torch.int32), r, r / 10, 7, 2)
    value = torch.ones(len(codes), 2, requires_grad=True) * 2
    return Solution(value, torch.tensor(codes, dtype=torch.int8), stats, choice)


def test_numbers() -> None:
    a = part([0, 0, 2, 4, 0], [3, 4, 5, 6, 7], [3.0, 0.0, 1.0, 1.0, 1.0], "Picard")
    b = part([0, 1, 3, 2, 4], [9, 1, 1, 1, 1], [4.0, 0.5, math.nan, 1.0, 1.0])
    found = combine([a, b])
    assert found.result.tolist() == [0, 1, 3, 2, 4]
    assert found.result.dtype == torch.int8
    assert found.stats.steps.tolist() == [9, 4, 5, 6, 7]
    torch.testing.assert_close(found.stats.residual[:2], torch.tensor([5.0, 0.5]))
    assert math.isnan(float(found.stats.residual[2]))
    assert float(found.stats.relative[0]) == pytest.approx(0.4)
    assert (found.stats.evaluations, found.stats.syncs) == (14, 4)
    assert found.choice == "0: Picard"
    assert found.counts()[Result.converged] == 1
    assert "1 converged" in found.summary()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_worst_code_of_every_pair(order: tuple[int, int]) -> None:
    ranks = [0, 1, 4, 2, 3]  # converged, max_steps, stagnated, diverged, nonfinite
    for i, good in enumerate(ranks):
        for bad in ranks[i:]:
            pair = [part([good], [1], [1.0]), part([bad], [1], [1.0])]
            assert combine([pair[k] for k in order]).result.tolist() == [bad]


def test_backward_numbers_are_read_when_asked() -> None:
    parts = [part([0], [1], [1.0]), part([0], [1], [1.0])]
    found = combine(parts).stats.backward
    assert isinstance(found, BackwardStats)
    assert (found.solves, found.unconverged, found.masked) == (0, 0, 0)
    assert found.steps is None
    for i, one in enumerate(parts):
        one.stats.backward.solves = 1
        one.stats.backward.unconverged = i
        one.stats.backward.steps = torch.tensor([3 + i])
        one.stats.backward.residual = torch.tensor([0.5 - i / 4])
    assert (found.solves, found.unconverged) == (2, 1)
    assert found.steps.tolist() == [4]
    assert found.residual.tolist() == [0.5]
    parts[0].stats.backward.masked = 2
    assert found.masked == 2
    parts[1].stats.backward.masked = -1
    assert found.masked == -1
    assert copy.deepcopy(found).solves == 2


def test_detach() -> None:
    found = combine([part([0], [1], [1.0]), part([0], [1], [1.0])])
    assert all(z.requires_grad for z in found.value)
    cut = found.detach()
    assert isinstance(cut, BranchSolution)
    assert not any(z.requires_grad for z in (*cut.value, *(p.value for p in cut.parts)))
