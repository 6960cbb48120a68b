"""ResNets (He et al. 2015), the explicit baselines, and their first stages as feature extractors.

Two stems: ``cifar`` is one 3 × 3 convolution, ``imagenet`` a 7 × 7 of stride 2 with a 3 × 3 max
pool. The stride of a bottleneck is on its 3 × 3 convolution, as everyone trains them today.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor, nn

from .network import Network, Shape
from .registry import ModelSpec

__all__ = ["SPECS", "Basic", "Bottleneck", "ResNet", "Trunk"]

Stem = Literal["cifar", "imagenet"]


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    if before == after and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(before, after, 1, stride), nn.BatchNorm2d(after))


class Basic(nn.Module):
    """ReLU(BN(C₂ ReLU(BN(C₁x))) + shortcut(x)), both 3 × 3."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int, mid: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(before, mid, 3, stride),
            nn.BatchNorm2d(mid),
            nn.ReLU(),
            _conv(mid, width, 3),
            nn.BatchNorm2d(width),
        )
        self.shortcut = _shortcut(before, width, stride)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.body(x) + self.shortcut(x))
        return out


class Bottleneck(nn.Module):
    """ReLU(BN(C₃ ReLU(BN(C₂ ReLU(BN(C₁x))))) + shortcut(x)): 1 × 1, 3 × 3, 1 × 1."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int, mid: int) -> None:
        super().__init__()
        after = self.expansion * width
        self.body = nn.Sequential(
            _conv(before, mid, 1),
            nn.BatchNorm2d(mid),
            nn.ReLU(),
            _conv(mid, mid, 3, stride),
            nn.BatchNorm2d(mid),
            nn.ReLU(),
            _conv(mid, after, 1),
            nn.BatchNorm2d(after),
        )
        self.shortcut = _shortcut(before, after, stride)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.body(x) + self.shortcut(x))
        return out


Block = type[Basic] | type[Bottleneck]


class Trunk(nn.Module):
    """The stem and the first stages: x [B, C, S, S] → one map a stage, the finest first.

    Stage i has blocks[i] blocks, the first of stride 2 (except at i = 0), and block.expansion·64·2ⁱ
    channels. With the imagenet stem its maps are S/4, S/8, S/16, S/32 pixels wide.

    Args:
        in_channels: channels of the images.
        block: Basic or Bottleneck.
        blocks: how many blocks a stage.
        stem: "cifar" or "imagenet".
        widen: the middle of each block is this many times wider (2: Wide-ResNet-50-2).
    """

    def __init__(
        self, in_channels: int, block: Block, blocks: tuple[int, ...], stem: Stem, widen: int = 1
    ) -> None:
        super().__init__()
        size, stride = (3, 1) if stem == "cifar" else (7, 2)
        first: list[nn.Module] = [_conv(in_channels, 64, size, stride), nn.BatchNorm2d(64)]
        first.append(nn.ReLU())
        if stem == "imagenet":
            first.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*first)
        before, stages, self.channels = 64, [], []
        for index, count in enumerate(blocks):
            width = 64 * 2**index
            stage: list[nn.Module] = []
            for k in range(count):
                stride = 2 if index and not k else 1
                stage.append(block(before, width, stride, widen * width))
                before = block.expansion * width
            stages.append(nn.Sequential(*stage))
            self.channels.append(before)
        self.stages = nn.ModuleList(stages)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> list[Tensor]:
        maps, out = [], self.stem(x)
        for stage in self.stages:
            out = stage(out)
            maps.append(out)
        return maps


class ResNet(Network):
    """A trunk of four stages, the mean over pixels, a linear head."""

    def __init__(
        self, shape: Shape, *, block: Block, blocks: tuple[int, ...], stem: Stem, widen: int = 1
    ) -> None:
        super().__init__(shape.in_channels)
        self.trunk = Trunk(shape.in_channels, block, blocks, stem, widen)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(self.trunk.channels[-1], shape.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.pool(self.trunk(x)[-1]).flatten(1))
        return out


BASIC_18 = (2, 2, 2, 2)
DEEP_50 = (3, 4, 6, 3)


def _spec(
    name: str, text: str, block: Block, blocks: tuple[int, ...], stem: Stem, published: int
) -> ModelSpec:
    cifar = stem == "cifar"
    return ModelSpec(
        name,
        partial(ResNet, block=block, blocks=blocks, stem=stem),
        text,
        in_channels=3,
        image_size=32 if cifar else 224,
        paper="He et al. 2015; the baseline of GEQ Tables 1–2",
        paper_parameters=published,
        paper_classes=10 if cifar else 1000,
    )


SPECS = (
    _spec("resnet18_cifar", "ResNet-18, 3 × 3 stem", Basic, BASIC_18, "cifar", 11_170_000),
    _spec("resnet50_cifar", "ResNet-50, 3 × 3 stem", Bottleneck, DEEP_50, "cifar", 23_500_000),
    _spec("resnet18_imagenet", "ResNet-18", Basic, BASIC_18, "imagenet", 11_690_000),
    _spec("resnet50_imagenet", "ResNet-50", Bottleneck, DEEP_50, "imagenet", 25_560_000),
)
