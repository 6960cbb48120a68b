"""Classes that were never seen, against scipy's divergences and by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from equilibria_papers.tables.unseen_classes import (
    known_unknown_kl,
    select_classes,
    superclass_accuracy,
    superclass_split,
)
from tests.evaluation.standins import FromTable, random_data, table_data


def test_divergences_against_scipy() -> None:
    draw = np.random.default_rng(0)
    targets = torch.from_numpy(draw.integers(0, 6, 40))
    logits = torch.from_numpy(draw.normal(size=(40, 3)) * 3)
    known = [4, 0, 2]
    accuracy, near, far = known_unknown_kl(FromTable(logits), table_data(targets, 6), known, 7)
    p = np.exp(logits.numpy())
    p /= p.sum(1, keepdims=True)
    own = [i for i in range(40) if int(targets[i]) in known]
    rest = [i for i in range(40) if int(targets[i]) not in known]
    hot = np.eye(3)[[known.index(int(targets[i])) for i in own]]
    assert near == pytest.approx(entropy(hot, p[own], axis=1).mean(), rel=1e-6)
    uniform = np.full((len(rest), 3), 1 / 3)
    assert far == pytest.approx(entropy(p[rest], uniform, axis=1).mean(), rel=1e-6)
    assert accuracy == pytest.approx((p[own].argmax(1) == hot.argmax(1)).mean())
    # A network that is always certain: p·log p is 0 at p = 0.
    certain = torch.zeros(40, 3)
    certain[:, 0] = 1e4
    found = known_unknown_kl(FromTable(certain), table_data(targets, 6), known, 40)
    assert found[2] == pytest.approx(math.log(3))


def test_select_classes_relabels_in_the_order_given() -> None:
    data = random_data(12, 4)
    part = select_classes(data, [3, 1])
    assert part.classes == ("class 3", "class 1")
    chosen = [i for i in range(12) if int(data.targets[i]) in (3, 1)]
    assert part.targets.tolist() == [{3: 0, 1: 1}[int(data.targets[i])] for i in chosen]
    assert torch.equal(part.images, data.images[chosen])


def test_superclasses_by_hand() -> None:
    """Six classes, interleaved: superclass 0 has 0, 2, 5; superclass 1 has 1, 3, 4."""
    above, targets = torch.tensor([0, 1, 0, 1, 1, 0]), torch.arange(60) % 6
    data = dataclasses.replace(
        table_data(targets, 6), superclasses=above[targets], superclass_names=("left", "right")
    )
    parts = superclass_split(data)
    seen, unseen = (targets[part.images[:, 0, 0, 0].long()] for part in parts)
    assert (set(seen.tolist()), set(unseen.tolist())) == ({0, 1, 2, 3}, {4, 5})
    assert torch.equal(parts[0].targets, above[seen])
    assert parts[1].classes == ("left", "right")
    logits = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    right = logits.argmax(1) == above[targets]
    expected = [float(right[mask].double().mean()) for mask in (targets < 4, targets >= 4)]
    assert superclass_accuracy(FromTable(logits), data, 7) == pytest.approx(tuple(expected))
    with pytest.raises(ValueError, match="a sample of every class"):
        superclass_split(data.subset(range(4)))
    with pytest.raises(ValueError, match="known and of unknown"):
        known_unknown_kl(FromTable(torch.zeros(60, 6)), data, range(6), 7)
    with pytest.raises(ValueError, match="not finite"):
        superclass_accuracy(FromTable(logits * math.nan), data, 7)
