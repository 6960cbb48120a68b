"""Names, cards and overrides."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria import models
from equilibria.models import options as opt
from equilibria.models.network import Network, Shape
from equilibria.models.registry import ModelSpec, Registry


class _Tiny(Network):
    def __init__(self, shape: Shape, *, width: int, solver: object) -> None:
        super().__init__(shape.in_channels)
        if width == 13:
            raise ValueError("width 13 is unlucky.")
        self.shape, self.width, self.solver = shape, width, solver
        self.head = nn.Linear(shape.in_channels, shape.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def _spec(name: str, **more: object) -> ModelSpec:
    options = {"width": opt.integer(4, "how wide"), "solver": opt.solver(eq.Picard(max_steps=3))}
    given = {"text": "tiny", "in_channels": 2, "image_size": 8, "options": options, **more}
    return ModelSpec(name, _Tiny, **given)  # type: ignore[arg-type]


@pytest.fixture
def registry() -> Registry:
    return Registry((_spec("one_a"), _spec("one_b")), (_spec("seg_a", task="segmentation"),))


def test_the_names_that_were_promised() -> None:
    promised = [
        "geq_cifar_5m",
        "geq_cifar_8m",
        "geq_imagenet_6m",
        "geq_imagenet_13m",
        "kerdeq_cifar_5m",
        "kerdeq_cifar_8m",
        "kerdeq_imagenet_6m",
        "kerdeq_imagenet_13m",
        "mopteq_cifar_5m",
        "mopteq_cifar_8m",
        "mopteq_imagenet_6m",
        "mopteq_imagenet_13m",
        "mopteq_polynomial_cifar_5m",
        "mopteq_polynomial_cifar_8m",
        "mopteq_sigmoid_cifar_5m",
        "mopteq_sigmoid_cifar_8m",
        "deep_opteq_162k",
        "deep_opteq_199k",
        "deep_opteq_1m4",
        "deep_opteq_small",
        "deep_opteq_middle",
        "mondeq_single",
        "mondeq_multi",
        "mdeq_cifar",
        "resnet18_cifar",
        "resnet50_cifar",
        "resnet18_imagenet",
        "resnet50_imagenet",
        "geq_digits",
        "opteq_digits",
        "explicit_digits",
        "geq_mnist",
        "opteq_mnist",
        "explicit_mnist",
        "deep_opteq_seg",
        "mdeq_seg",
        "fcn_resnet18",
        "fcn_seg",
    ]
    stacks = [
        f"{kind}_stack_{size}"
        for kind in ("geq", "opteq", "explicit")
        for size in ("digits", "mnist", "cifar_3m", "cifar_5m", "cifar_8m")
    ]
    assert models.names() == sorted([*promised, *stacks])
    assert models.names(task="segmentation") == [
        "deep_opteq_seg",
        "fcn_resnet18",
        "fcn_seg",
        "mdeq_seg",
    ]


def test_names_by_pattern_and_task(registry: Registry) -> None:
    assert registry.names() == ["one_a", "one_b", "seg_a"]
    assert registry.names("*_a") == ["one_a", "seg_a"]
    assert registry.names("*_a", "segmentation") == ["seg_a"]
    assert registry.names("one_?", "segmentation") == []
    assert registry.names("ONE_A") == []
    with pytest.raises(ValueError, match="task='regression'"):
        registry.names(task="regression")


def test_a_name_twice_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="two models have one name: one_a"):
        Registry((_spec("one_a"), _spec("other")), (_spec("one_a"),))


def test_unknown_names_bring_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no model 'geq_digit'\. Did you mean geq_digits"):
        models.create("geq_digit")
    with pytest.raises(ValueError, match=r"no model 'resnet18'\. Did you mean .*resnet18_cifar"):
        models.describe("resnet18")
    with pytest.raises(ValueError, match=r"no model 'zzzz'\. models\.names\(\) .* list all"):
        models.create("zzzz")
    with pytest.raises(TypeError, match="named by a string"):
        models.create(3)  # type: ignore[arg-type]


def test_options_are_checked_and_land_in_the_network(registry: Registry) -> None:
    model = registry.create("one_a", 7, in_channels=5, width=6, solver=eq.Anderson(memory=2))
    assert isinstance(model, _Tiny)
    assert model.shape == Shape(7, 5, 8)
    assert model.width == 6
    assert model.solver == eq.Anderson(memory=2)
    assert model.config.name == "one_a"
    assert model.config.num_classes == 7
    assert model.config.in_channels == 5
    assert model.config.image_size == 8
    assert model.config.options["width"] == 6
    assert model.config.options["solver"]["kind"] == "Anderson"
    assert model.config.options["solver"]["memory"] == 2
    assert json.loads(json.dumps(model.config.to_dict())) == model.config.to_dict()
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.config.name = "other"  # type: ignore[misc]


def test_bad_options(registry: Registry) -> None:
    with pytest.raises(
        TypeError,
        match=r"one_a has no option 'widht' \(got 3\)\. Did you mean 'width'\? .*: width, ",
    ):
        registry.create("one_a", widht=3)
    with pytest.raises(ValueError, match=r"one_a: option width=0 \(int\): expected an integer in"):
        registry.create("one_a", width=0)
    with pytest.raises(ValueError, match=r"^one_a: width 13 is unlucky"):
        registry.create("one_a", width=13)
    with pytest.raises(TypeError, match=r"^one_a: option solver=.*has no option 'stepz'"):
        registry.create("one_a", solver={"kind": "Picard", "stepz": 3})


@pytest.mark.parametrize("key", ["num_classes", "in_channels", "image_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", 10**9])
def test_bad_shapes(registry: Registry, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"one_a: {key}={value!r}, expected an integer in"):
        registry.create("one_a", **{key: value})  # type: ignore[arg-type]


def test_networks_do_not_share_state() -> None:
    first, second = models.create("geq_digits"), models.create("geq_digits")
    assert first.extra is not second.extra
    assert first.config.options is not second.config.options
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().max() > 0


@pytest.mark.parametrize("name", models.names())
def test_cards(name: str) -> None:
    card = models.describe(name)
    assert card.name == name
    assert card.task == ("segmentation" if name in models.names(task="segmentation") else card.task)
    assert card.text
    assert "\n" not in card.text
    assert card.paper
    assert card.in_channels in (1, 3)
    text = str(card)
    for line in (name, card.paper, f"{card.image_size} × {card.image_size}", *card.options):
        assert line in text
    with torch.device("meta"):
        assert set(card.options) == set(models.create(name).config.options)


def test_a_solver_of_the_users_own_is_refused_with_advice() -> None:
    class Mine(eq.Picard):
        pass

    with pytest.raises(TypeError, match=r"Set it on the layer after the model is made"):
        models.create("geq_digits", solver=Mine())
