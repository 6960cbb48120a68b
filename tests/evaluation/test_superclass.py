"""The split of GEQ §4.3: which classes are unseen, and the accuracies."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from equilibria.data import ImageData
from equilibria.evaluation import classification_metrics, superclass_accuracy, superclass_split
from tests.evaluation.standins import FromTable, random_data, table_data

# Six classes, interleaved: superclass 0 has 0, 2, 5; superclass 1 has 1, 3, 4.
ABOVE = torch.tensor([0, 1, 0, 1, 1, 0])


def leveled(targets: torch.Tensor) -> ImageData:
    return dataclasses.replace(
        table_data(targets, 6),
        superclasses=ABOVE[targets],
        superclass_names=("left", "right"),
    )


DATA = leveled(torch.arange(60) % 6)


def test_the_papers_split_keeps_the_first_classes() -> None:
    known, unknown = superclass_split(DATA)
    assert known.classes == unknown.classes == ("left", "right")
    seen = DATA.targets[known.images[:, 0, 0, 0].long()]
    unseen = DATA.targets[unknown.images[:, 0, 0, 0].long()]
    assert set(seen.tolist()) == {0, 2, 1, 3}
    assert set(unseen.tolist()) == {5, 4}
    assert torch.equal(known.targets, ABOVE[seen])
    assert torch.equal(unknown.targets, ABOVE[unseen])
    assert len(known) + len(unknown) == 60


def test_two_may_be_held_out() -> None:
    _, unknown = superclass_split(DATA, held_out=2)
    assert set(DATA.targets[unknown.images[:, 0, 0, 0].long()].tolist()) == {2, 5, 3, 4}


def test_a_seed_draws_and_splits_train_and_test_alike() -> None:
    other = leveled(torch.arange(59, -1, -1) % 6)
    drawn = set()
    for seed in range(12):
        held = []
        for data in (DATA, other):
            _, unknown = superclass_split(data, seed)
            classes = set(data.targets[unknown.images[:, 0, 0, 0].long()].tolist())
            assert len(classes & {0, 2, 5}) == len(classes & {1, 3, 4}) == 1
            held.append(frozenset(classes))
        assert held[0] == held[1]
        drawn.add(held[0])
    assert len(drawn) > 2


def test_accuracies() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 2, generator=draw)
    found = superclass_accuracy(FromTable(logits), DATA, batch_size=7, progress=False)
    unseen = torch.isin(DATA.targets, torch.tensor([4, 5]))
    truth = ABOVE[DATA.targets]
    for mask, part in ((~unseen, found.known), (unseen, found.unknown)):
        expected = classification_metrics(logits[mask], truth[mask])
        assert part.accuracy == expected.accuracy
        assert part.nll == pytest.approx(expected.nll)
    assert found.known_accuracy == found.known.accuracy
    assert found.unknown_accuracy == found.unknown.accuracy
    assert found.to_dict()["unknown"]["samples"] == 20
    assert list(found.table().columns[0].cells) == ["known classes", "unseen classes"]


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="has no superclasses; CIFAR-100"):
        superclass_split(random_data())
    with pytest.raises(ValueError, match="no sample of class 4, class 5"):
        superclass_split(DATA.subset(range(4)))
    with pytest.raises(ValueError, match="'left' has 3 classes: 3 cannot be held out"):
        superclass_split(DATA, held_out=3)
    with pytest.raises(ValueError, match="held_out=0"):
        superclass_split(DATA, held_out=0)
    with pytest.raises(ValueError, match=r"tells 6 classes apart .* asks for 2"):
        superclass_accuracy(FromTable(torch.zeros(60, 6)), DATA, progress=False)
