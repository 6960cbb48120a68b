"""ResNets (He et al. 2015), the explicit baselines: for classes, for pixels, as feature extractors.

Two stems: ``cifar`` is one 3 × 3 convolution, ``imagenet`` a 7 × 7 of stride 2 with a 3 × 3 max
pool. The stride of a bottleneck is on its 3 × 3 convolution, as everyone trains them today.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from .network import ModelConfig, ModelSpec, Network, conv_norm_relu, entry, segmenter, upsample

Stem = Literal["cifar", "imagenet"]


class Residual(nn.Module):
    """ReLU(body(x) + shortcut(x)); the shortcut is a 1 × 1 convolution where the shape changes.

    The body is BN(C₂ ReLU(BN(C₁x))), both 3 × 3, or as a bottleneck
    BN(C₃ ReLU(BN(C₂ ReLU(BN(C₁x))))), 1 × 1, 3 × 3, 1 × 1; inside it has ``mid`` channels.
    """

    def __init__(self, before: int, mid: int, after: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            body = conv_norm_relu(before, mid, 1) + conv_norm_relu(mid, mid, 3, stride)
            body += conv_norm_relu(mid, after, 1)
        else:
            body = conv_norm_relu(before, mid, 3, stride) + conv_norm_relu(mid, after, 3)
        self.body = nn.Sequential(*body[:-1])  # its last ReLU comes after the sum
        if before == after and stride == 1:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = nn.Sequential(*conv_norm_relu(before, after, 1, stride)[:2])
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.body(x) + self.shortcut(x))
        return out


BASIC_18 = (2, 2, 2, 2)
DEEP_50 = (3, 4, 6, 3)


class Trunk(nn.Module):
    """The stem and the first stages: x [B, C, S, S] → one map a stage, the finest first.

    Stage i has blocks[i] blocks, the first of stride 2 (except at i = 0), and 64·2ⁱ channels, of
    bottlenecks 4·64·2ⁱ. With the imagenet stem its maps are S/4, S/8, S/16, S/32 pixels wide. The
    middle of each block is ``widen`` times wider (2: Wide-ResNet-50-2).
    """

    def __init__(
        self,
        in_channels: int,
        blocks: tuple[int, ...],
        stem: Stem,
        *,
        bottleneck: bool,
        widen: int = 1,
    ) -> None:
        super().__init__()
        size, stride = (3, 1) if stem == "cifar" else (7, 2)
        first = conv_norm_relu(in_channels, 64, size, stride)
        if stem == "imagenet":
            first.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*first)
        before, stages, self.channels = 64, [], []
        for index, count in enumerate(blocks):
            width = 64 * 2**index
            after = 4 * width if bottleneck else width
            stage: list[nn.Module] = []
            for k in range(count):
                stride = 2 if index and not k else 1
                stage.append(Residual(before, widen * width, after, stride, bottleneck))
                before = after
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
        self, config: ModelConfig, *, bottleneck: bool, blocks: tuple[int, ...], stem: Stem
    ) -> None:
        super().__init__(config.in_channels)
        self.trunk = Trunk(config.in_channels, blocks, stem, bottleneck=bottleneck)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(self.trunk.channels[-1], config.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.pool(self.trunk(x)[-1]).flatten(1))
        return out


class FCN(Network):
    """FCN-8s (Shelhamer, Long and Darrell) on a ResNet-18: scores at strides 8, 16, 32, summed.

    Each coarser score is brought up by bilinear interpolation and added to the next finer one.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.in_channels)
        self.trunk = Trunk(config.in_channels, BASIC_18, "imagenet", bottleneck=False)
        self.scores = nn.ModuleList(
            nn.Conv2d(c, config.num_classes, 1) for c in self.trunk.channels[1:]
        )

    def logits(self, x: Tensor) -> Tensor:
        maps = self.trunk(x)[1:]
        scores = [score(m) for score, m in zip(self.scores, maps, strict=True)]
        out: Tensor = scores[-1]
        for _, finer in pairwise(reversed(scores)):
            out = upsample(out, finer) + finer
        return upsample(out, x)


def _spec(name: str, text: str, blocks: tuple[int, ...], stem: Stem, published: int) -> ModelSpec:
    cifar = stem == "cifar"
    return entry(
        name,
        partial(ResNet, bottleneck=blocks == DEEP_50, blocks=blocks, stem=stem),
        text,
        {},
        image_size=32 if cifar else 224,
        paper="He et al. 2015; the baseline of GEQ Tables 1–2",
        paper_parameters=published,
        paper_classes=10 if cifar else 1000,
    )


SPECS = (
    _spec("resnet18_cifar", "ResNet-18, 3 × 3 stem", BASIC_18, "cifar", 11_170_000),
    _spec("resnet50_cifar", "ResNet-50, 3 × 3 stem", DEEP_50, "cifar", 23_500_000),
    _spec("resnet18_imagenet", "ResNet-18", BASIC_18, "imagenet", 11_690_000),
    _spec("resnet50_imagenet", "ResNet-50", DEEP_50, "imagenet", 25_560_000),
    segmenter(
        "fcn_resnet18", FCN, "FCN-8s on a ResNet-18", {}, paper="Shelhamer, Long and Darrell 2017"
    ),
)
