"""The ends and the errors of the measures of unseen classes; test_measures.py has the numbers."""

from __future__ import annotations

import math

import pytest
import torch

from equilibria_papers.tables.unseen_classes import known_unknown_kl, superclass_split
from tests.evaluation.standins import FromTable, dataset, random_data

# Image i holds the number i, so that FromTable finds its row.
IMAGES = torch.arange(12, dtype=torch.uint8).repeat_interleave(16).view(12, 1, 4, 4)
DATA, CPU = dataset(IMAGES, torch.arange(12) % 6, 6), torch.device("cpu")


def test_a_network_that_is_always_certain_has_ln_k() -> None:
    """p·log p is 0 at p = 0."""
    certain = torch.tensor([1e4, 0.0, 0.0]).expand(12, 3)
    assert known_unknown_kl(FromTable(certain), DATA, [4, 0, 2], 5, CPU)[2] == math.log(3)


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="known and of unknown"):
        known_unknown_kl(FromTable(torch.zeros(12, 6)), DATA, range(6), 7, CPU)
    with pytest.raises(ValueError, match="not finite"):
        known_unknown_kl(FromTable(torch.full((12, 2), math.nan)), DATA, [0, 1], 7, CPU)
    with pytest.raises(ValueError, match="a superclass and a sample of every class"):
        superclass_split(random_data())
