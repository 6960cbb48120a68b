"""Known and unknown classes against scipy's divergences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from equilibria.evaluation import NonFiniteError, known_unknown_kl, select_classes
from tests.evaluation.standins import FromTable, random_data, table_data


def test_against_scipy() -> None:
    draw = np.random.default_rng(0)
    targets = torch.from_numpy(draw.integers(0, 6, 40))
    logits = torch.from_numpy(draw.normal(size=(40, 3)) * 3)
    known = [4, 0, 2]
    found = known_unknown_kl(
        FromTable(logits), table_data(targets, 6), known, batch_size=7, progress=False
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


def test_names_will_do_and_the_table_shows() -> None:
    targets = torch.tensor([0, 1, 2, 0])
    found = known_unknown_kl(
        FromTable(torch.zeros(4, 2)), table_data(targets, 3), ["class 2", "class 0"], progress=False
    )
    assert found.classes == ("class 2", "class 0")
    assert found.to_dict()["unknown_limit"] == pytest.approx(math.log(2))
    columns = found.table().columns
    assert list(columns[0].cells) == ["known", "unknown"]


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
