"""Networks by name. A new one is an ``entry`` in a file of this package, listed here."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

from . import branches, certified, deep_opteq, mdeq, monotone, resnet, stacks
from .network import ModelCard, ModelConfig, ModelSpec, Network, prefixed
from .options import SIZES, to_json

SPECS: Mapping[str, ModelSpec] = {
    spec.card.name: spec
    for family in (branches, stacks, certified, deep_opteq, monotone, mdeq, resnet)
    for spec in family.SPECS
}


def nearest(name: str) -> str:
    """A sentence that offers the nearest names, after a space; empty where none is near."""
    close = difflib.get_close_matches(name, SPECS, n=3, cutoff=0.5)
    return f" Did you mean {', '.join(close)}?" if close else ""


def find(name: str) -> ModelSpec:
    """The entry of that name, or an error that offers the nearest ones."""
    if not isinstance(name, str):
        raise TypeError(f"a model is named by a string, got {name!r}.")
    if name not in SPECS:
        raise ValueError(
            f"there is no model {name!r}.{nearest(name)} models.names() and `equilibria models` "
            f"list all {len(SPECS)}."
        )
    return SPECS[name]


def names(pattern: str = "*", task: str | None = None) -> list[str]:
    """The names that match a glob pattern, sorted.

    Args:
        pattern: as of file names: "geq_*", "*_cifar_5m".
        task: "classification" or "segmentation"; None: both.
    """
    if task not in (None, "classification", "segmentation"):
        raise ValueError(f"task={task!r}: expected 'classification', 'segmentation' or None.")
    return sorted(
        name
        for name, spec in SPECS.items()
        if fnmatch.fnmatchcase(name, pattern) and task in (None, spec.card.task)
    )


def describe(name: str) -> ModelCard:
    """The card of a network: what it is, its input, its options. Nothing is built."""
    return find(name).card


def create(
    name: str,
    num_classes: int = 10,
    *,
    in_channels: int | None = None,
    image_size: int | None = None,
    **overrides: Any,
) -> Network:
    """Build a network by its name, with fresh weights from torch's random numbers.

    Args:
        name: one of ``names()``.
        num_classes: logits of the head.
        in_channels: channels of the images; None: what the model was made for.
        image_size: pixels of a side that the network is laid out for; None: what it was made for.
            Other sizes can be given to most networks, where their patches divide them.
        overrides: options of the model, listed by ``describe(name).options``. Objects (solver,
            adjoint, constraint, ...) may also be given as they stand in ``model.config.options``.

    Returns:
        The network in training mode; ``model.config`` is all that is needed to build it again.
    """
    spec = find(name)
    options = spec.parse(overrides)
    sizes: dict[str, Any] = {
        "num_classes": num_classes,
        "in_channels": spec.card.in_channels if in_channels is None else in_channels,
        "image_size": spec.card.image_size if image_size is None else image_size,
    }
    for what, size in sizes.items():
        if not SIZES[what].accepts(size):
            raise ValueError(f"{name}: {what}={size!r}, expected {SIZES[what].allowed}.")
    stored = {key: to_json(value) for key, value in options.items()}
    config = ModelConfig(name, **sizes, options=stored)
    try:
        model = spec.build(config, **options)
    except (TypeError, ValueError) as error:
        raise prefixed(error, name) from error
    model.config, model.task = config, spec.card.task
    return model
