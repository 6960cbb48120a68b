"""What every named network is: a module with its configuration, from images to logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.ops.pooling import average_pool

__all__ = [
    "AveragePool",
    "ModelConfig",
    "Network",
    "Shape",
    "count_parameters",
    "features_to_logits",
    "upsample",
]


@dataclass(frozen=True)
class Shape:
    """What goes in and out: images [B, in_channels, image_size, image_size] → num_classes."""

    num_classes: int
    in_channels: int
    image_size: int


@dataclass(frozen=True)
class ModelConfig:
    """All that ``models.create`` needs to build a network again, in JSON's types."""

    name: str
    num_classes: int
    in_channels: int
    image_size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Every option of the model, defaults included; objects as {"kind": ..., fields}."""

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary that JSON can hold."""
        return asdict(self)


class Network(nn.Module, ABC):
    """x [B, C, H, W], normalized images ↦ logits [B, num_classes], or [B, num_classes, H, W].

    Made by ``models.create``, which sets ``config``; ``models.load`` sets ``extra`` too.
    """

    config: ModelConfig
    extra: dict[str, Any]
    """What was saved beside the weights: class names, mean and deviation, metrics."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.extra = {}

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """The network itself, for an x that was checked."""

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        return self.logits(x)

    def check_input(self, x: Tensor) -> None:
        """Raise unless x is a floating tensor [B, in_channels, H, W]."""
        name = self.config.name if hasattr(self, "config") else type(self).__name__
        expected = f"{name} takes normalized images [B, {self.in_channels}, H, W]"
        if not isinstance(x, Tensor):
            raise TypeError(f"{expected} as a tensor, got {type(x).__name__}.")
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"{expected}, got a tensor of shape {tuple(x.shape)}.")
        if not x.is_floating_point():
            raise TypeError(f"{expected} in floating point, got {x.dtype}; use x.float() / 255.")


def count_parameters(model: nn.Module) -> int:
    """Numbers that training moves; buffers and frozen parameters do not count.

    A parameter that stands at two places counts once.
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def features_to_logits(channels: int, num_classes: int) -> nn.Sequential:
    """BatchNorm, ReLU, global average, linear: the head of the stacks and branches."""
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, num_classes),
    )


class AveragePool(nn.Module):
    """Means over blocks of ``size`` × ``size`` pixels, which must divide the map."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return average_pool(x, self.size, self.size)

    def extra_repr(self) -> str:
        return str(self.size)


def upsample(x: Tensor, like: Tensor) -> Tensor:
    """Bilinear resize of maps x [B, C, h, w] to the pixels of ``like``."""
    return torch.nn.functional.interpolate(
        x, size=like.shape[-2:], mode="bilinear", align_corners=False
    )
