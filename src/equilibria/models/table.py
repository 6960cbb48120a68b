"""The one table of names, and the functions that look things up in it."""

from __future__ import annotations

from typing import Any

from . import branch_table, deep_opteq, mdeq, monotone, resnet, segmentation, stacks
from .network import Network
from .registry import ModelCard, Registry

__all__ = ["REGISTRY", "create", "describe", "names"]

REGISTRY = Registry(
    branch_table.SPECS,
    stacks.SPECS,
    deep_opteq.SPECS,
    monotone.SPECS,
    mdeq.SPECS,
    resnet.SPECS,
    segmentation.SPECS,
)


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
    return REGISTRY.create(
        name, num_classes, in_channels=in_channels, image_size=image_size, **overrides
    )


def names(pattern: str = "*", task: str | None = None) -> list[str]:
    """The names that match a glob pattern, sorted.

    Args:
        pattern: as of file names: "geq_*", "*_cifar_5m".
        task: "classification" or "segmentation"; None: both.
    """
    return REGISTRY.names(pattern, task)


def describe(name: str) -> ModelCard:
    """The card of a network: what it is, its input, its options. Nothing is built."""
    return REGISTRY.describe(name)
