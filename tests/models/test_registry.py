"""Names, cards and overrides."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import equilibria as eq
from equilibria import models
from tests.models.small import make


def test_names_by_pattern_and_task() -> None:
    segmenters = ["deep_opteq_seg", "fcn_resnet18", "fcn_seg", "mdeq_seg"]
    assert models.names(task="segmentation") == segmenters
    assert models.names("*_seg", "segmentation") == ["deep_opteq_seg", "fcn_seg", "mdeq_seg"]
    assert models.names("geq_?????s") == ["geq_digits"]
    assert models.names("geq_*", "segmentation") == models.names("GEQ_DIGITS") == []
    with pytest.raises(ValueError, match="task='regression'"):
        models.names(task="regression")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("geq_digit", {}, ValueError, r"no model 'geq_digit'\. Did you mean geq_digits"),
        ("resnet18", {}, ValueError, r"no model 'resnet18'\. Did you mean .*resnet18_cifar"),
        ("zzzz", {}, ValueError, r"no model 'zzzz'\. models\.names\(\) .* list all"),
        (3, {}, TypeError, "named by a string"),
        (
            "geq_digits",
            {"widht": 3},
            TypeError,
            r"'widht' \(got 3\)\. Did you mean 'widths'\? .*: wi",
        ),
        ("resnet18_cifar", {"depth": 3}, TypeError, r"'depth' \(got 3\)\. Its options: none"),
    ],
)
def test_names_and_options_that_are_unknown(
    name: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        models.create(name, **options)


def test_options_land_in_the_configuration() -> None:
    model = make("geq_digits", 7, in_channels=5, hidden=6, solver=eq.Anderson(memory=2))
    config = model.config
    assert (config.name, config.num_classes, config.in_channels) == ("geq_digits", 7, 5)
    assert config.image_size == 8
    assert config.options["hidden"] == 6
    assert config.options["solver"]["kind"] == "Anderson"
    assert config.options["solver"]["memory"] == 2
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("key", ["num_classes", "in_channels", "image_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", 10**9])
def test_bad_shapes(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"geq_digits: {key}={value!r}, expected an integer in"):
        models.create("geq_digits", **{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "size", "multiple"),
    [
        ("geq_digits", 6, 4),
        ("geq_stack_cifar_3m", 36, 8),
        ("opteq_stack_digits", 9, 2),
        ("geq_cifar_5m", 24, 16),
        ("mdeq_cifar", 28, 8),
        ("mondeq_multi", 30, 4),
    ],
)
def test_sizes_that_do_not_divide(name: str, size: int, multiple: int) -> None:
    wrong = rf"^{name}: image_size={size} is no multiple of {multiple}: "
    with pytest.raises(ValueError, match=wrong):
        models.create(name, image_size=size)


def test_a_card_says_what_a_network_is_and_takes() -> None:
    card = models.describe("geq_cifar_5m")
    assert card.name == "geq_cifar_5m"
    assert set(card.options) == set(make("geq_cifar_5m").config.options)
    for line in (card.name, card.text, card.paper, "3 × 32 × 32", "5,000,000", *card.options):
        assert line in str(card)
