"""What is known of the data sets."""

from __future__ import annotations

import json

import pytest

from equilibria import data
from equilibria.data.catalog import IMAGENETTE_WNIDS


@pytest.mark.parametrize("name", data.names())
def test_a_card_is_consistent_and_plain(name: str) -> None:
    card = data.describe(name)
    assert card.classes == () or len(card.classes) == len(set(card.classes)) == card.num_classes
    assert len(card.mean) == len(card.std) == card.channels
    assert card.splits[0] == "train"
    assert set(card.splits) <= {"train", "val", "test"}
    assert bool(card.hub) != bool(card.hub_note) or name == "digits"
    assert json.loads(json.dumps(vars(card)))["name"] == name


def test_orders_of_classes() -> None:
    names = data.describe("cifar100").classes
    assert sorted(names) == list(names)  # the published order is the alphabet's
    assert sorted(IMAGENETTE_WNIDS) == list(IMAGENETTE_WNIDS)
    assert len(data.describe("cifar100").superclasses) == 20


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(data.DataError, match=r"Did you mean 'cifar10'\? Known: digits"):
        data.describe("cifar_10")
