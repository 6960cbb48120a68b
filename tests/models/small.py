"""Each named network, cut down so that a forward pass on a CPU takes milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from equilibria import models
from equilibria.models.registry import create

_BRANCHES: dict[str, Any] = {"channels": 8, "mids": (8, 8, 16), "scales": (1, 2, 2)}
_DEEP: dict[str, Any] = {"channels": 6, "mids": (4, 8)}
# One of each kind; the others differ in numbers alone (or are large), and the slow tests run them.
KINDS = [
    "geq_cifar_5m",
    "geq_imagenet_6m",
    "kerdeq_cifar_5m",
    "kerdeq_imagenet_6m",
    "mopteq_cifar_5m",
    "mopteq_imagenet_6m",
    "explicit_cifar_5m",
    "mopteq_polynomial_cifar_5m",
    "mopteq_sigmoid_cifar_5m",
    "geq_digits",
    "opteq_digits",
    "explicit_digits",
    "geq_stack_digits",
    "deep_opteq_199k",
    "mondeq_single",
    "mondeq_multi",
    "mdeq_cifar",
    "resnet18_cifar",
    "deep_opteq_seg",
    "mdeq_seg",
    "fcn_seg",
]
_OTHERS = [name for name in models.names() if name not in KINDS]
NAMES = [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS)]


def options(name: str) -> dict[str, Any]:
    """Overrides that make the network small, image_size included."""
    family = name.split("_")[0]
    if "stack" in name or name.endswith(("digits", "mnist")):
        return {"image_size": 8, "widths": (8, 16), "depth": 1}
    if "certified" in name:
        return {"image_size": 16, "widths": (16, 24), "depth": 1}
    if family in ("geq", "kerdeq"):
        size = 32 if "imagenet" in name else 8
        size *= 2 if name.startswith("kerdeq_imagenet") else 1
        return {"image_size": size, **_BRANCHES, "hidden": 4}
    if family in ("mopteq", "explicit"):
        return {"image_size": 32 if "imagenet" in name else 8, **_BRANCHES}
    if name.endswith("_seg") and family != "mdeq":
        return _DEEP
    if name in ("deep_opteq_small", "deep_opteq_middle"):
        return {"image_size": 64}  # as wide as a ResNet-50, which cannot be cut
    if family == "deep":
        return {"image_size": 8, **_DEEP}
    if name == "mdeq_cifar":
        head = {"head_channels": (2, 4), "final_channels": 16}
        return {"image_size": 8, "channels": (8, 16), "expansion": 2, **head}
    if name == "mdeq_seg":
        return {"channels": (8, 16), "expansion": 2}
    if family == "mondeq":
        channels = (6,) if "single" in name else (4, 6)
        return {"image_size": 8, "channels": channels, "pool": 2}
    return {"image_size": 32 if "imagenet" in name else 16}


def make(name: str, num_classes: int = 5, seed: int = 0, **more: Any) -> models.Network:
    torch.manual_seed(seed)
    return models.create(name, num_classes, **{**options(name), **more})


def laid_out(name: str, num_classes: int | None = None) -> models.Network:
    """The network in full, without memory; with as many classes as its paper's if not given."""
    return _laid_out(name, num_classes or models.describe(name).paper_classes)


@cache
def _laid_out(name: str, num_classes: int) -> models.Network:
    """Each once: all of them take seconds, and several tests look at every one."""
    with torch.device("meta"):
        return create(name, num_classes)


def images(model: models.Network, batch: int = 3, seed: int = 1) -> Tensor:
    """Images that the network takes; those to be segmented are no squares."""
    source = torch.Generator().manual_seed(seed)
    config = model.config
    segments = models.describe(config.name).task == "segmentation"
    size = (42, 36) if segments else (config.image_size, config.image_size)
    return torch.randn(batch, config.in_channels, *size, generator=source)
