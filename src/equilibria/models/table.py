"""The one table of names. A new network is a ModelSpec in a file of this package, listed here."""

from __future__ import annotations

from . import branches, certified, deep_opteq, mdeq, monotone, resnet, segmentation, stacks
from .registry import Registry

__all__ = ["REGISTRY", "create", "describe", "names"]

REGISTRY = Registry(
    branches.SPECS,
    stacks.SPECS,
    certified.SPECS,
    deep_opteq.SPECS,
    monotone.SPECS,
    mdeq.SPECS,
    resnet.SPECS,
    segmentation.SPECS,
)
create, names, describe = REGISTRY.create, REGISTRY.names, REGISTRY.describe
