"""Classes that were never seen, against scipy's divergences and by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from equilibria.data import ImageData
from equilibria.evaluation import (
    NonFiniteError,
    classification_metrics,
    known_unknown_kl,
    select_classes,
    superclass_accuracy,
    superclass_split,
)
from tests.evaluation.standins import FromTable, random_data, table_data


def test_against_scipy() -> None:
    draw = np.random.default_rng(0)
    targets = torch.from_numpy(draw.integers(0, 6, 40))
    logits = torch.from_numpy(draw.normal(size=(40, 3)) * 3)
    known, names = [4, 0, 2], ["class 4", 0, "class 2"]
    found = known_unknown_kl(
        FromTable(logits), table_data(targets, 6), names, batch_size=7, progress=False
    )
    p = np.exp(logits.numpy())
    p /= p.sum(1, keepdims=True)
    own = [i for i in range(40) if int(targets[i]) in known]
    rest = [i for i in range(40) if int(targets[i]) not in known]
    hot = np.eye(3)[[known.index(int(targets[i])) for i in own]]
    assert found.known_samples == len(own)
    assert found.unknown_samples == len(rest)
    assert found.known_kl == pytest.approx(entropy(hot, p[own], axis=1).mean(), rel=1e-6)
    uniform = np.full((len(rest), 3), 1 / 3)
    assert found.unknown_kl == pytest.approx(entropy(p[rest], uniform, axis=1).mean(), rel=1e-6)
    assert found.accuracy == pytest.approx((p[own].argmax(1) == hot.argmax(1)).mean())
    assert found.classes == ("class 4", "class 0", "class 2")
    assert found.unknown_limit == math.log(3)


def test_the_two_ends() -> None:
    """A network that is always certain has ln K; one that knows nothing has 0 and ln K for NLL."""
    targets = torch.tensor([0, 1, 2, 3, 4, 5])
    certain = torch.zeros(6, 5)
    certain[:, 0] = 1e4
    flat = torch.zeros(6, 5)
    data = table_data(targets, 6)
    ends = [known_unknown_kl(FromTable(t), data, range(5), progress=False) for t in (certain, flat)]
    assert ends[0].unknown_kl == pytest.approx(math.log(5))
    assert ends[1].unknown_kl == pytest.approx(0.0, abs=1e-12)
    assert ends[1].known_kl == pytest.approx(math.log(5))


def test_select_classes_relabels_in_the_order_given() -> None:
    data = random_data(12, 4)
    part = select_classes(data, ["class 3", 1])
    assert part.classes == ("class 3", "class 1")
    chosen = [i for i in range(12) if int(data.targets[i]) in (3, 1)]
    assert part.targets.tolist() == [{3: 0, 1: 1}[int(data.targets[i])] for i in chosen]
    assert torch.equal(part.images, data.images[chosen])


def test_wrong_input() -> None:
    data = table_data(torch.tensor([0, 1, 2]), 3)
    model = FromTable(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="no class 'cat'; it has: class 0, class 1"):
        known_unknown_kl(model, data, ["cat"])
    with pytest.raises(ValueError, match="class 3 is out of range"):
        known_unknown_kl(model, data, [3])
    with pytest.raises(ValueError, match="none of them twice"):
        known_unknown_kl(model, data, [0, 0])
    with pytest.raises(TypeError, match="a list of class numbers"):
        known_unknown_kl(model, data, "class 0")
    with pytest.raises(TypeError, match=r"class=1\.5"):
        known_unknown_kl(model, data, [1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no sample of unknown classes"):
        known_unknown_kl(FromTable(torch.zeros(3, 3)), data, range(3))
    with pytest.raises(ValueError, match=r"tells 2 classes apart and made up .* asks for 1"):
        known_unknown_kl(model, data, [0], progress=False)
    spoiled = torch.tensor([[0.0, 0.0], [math.nan, 0.0], [0.0, 0.0]])
    with pytest.raises(NonFiniteError, match="numbers 1"):
        known_unknown_kl(FromTable(spoiled), data, [0, 1], progress=False)
    with pytest.raises(ValueError, match="no sample of the classes"):
        select_classes(data.subset([0]), [2])


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
    assert found.unknown.samples == 20


def test_wrong_superclasses() -> None:
    with pytest.raises(ValueError, match="has no superclasses; CIFAR-100"):
        superclass_split(random_data())
    with pytest.raises(ValueError, match="no sample of class 4, class 5"):
        superclass_split(DATA.subset(range(4)))
    alone = dataclasses.replace(DATA, superclasses=DATA.targets.clamp_max(1))
    with pytest.raises(ValueError, match="'left' has 1 classes"):
        superclass_split(alone)
    with pytest.raises(ValueError, match=r"tells 6 classes apart .* asks for 2"):
        superclass_accuracy(FromTable(torch.zeros(60, 6)), DATA, progress=False)
