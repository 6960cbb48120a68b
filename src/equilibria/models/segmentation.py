"""Networks that label each pixel: a deep OptEq backbone (OptEq §7.5) and FCN baselines."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from equilibria.nn import DeepOptEq

from .deep_opteq import DEFAULTS
from .network import Network, Shape, conv_norm_relu, entry, upsample
from .resnet import BASIC_18, Basic, Trunk
from .stacks import Block, ExplicitPair

__all__ = ["FCN", "SPECS", "DeepOptEqSegmenter", "ExplicitSegmenter"]


class _Backbone(Network):
    """Two stride-2 convolutions, a backbone at a quarter of the pixels, a score for each pixel.

    x [B, C, H, W] → [B, num_classes, H, W]; the scores are brought back by bilinear interpolation,
    so H and W need not be multiples of anything.
    """

    def __init__(self, shape: Shape, channels: int, backbone: nn.Module) -> None:
        super().__init__(shape.in_channels)
        half = (channels + 1) // 2
        self.stem = nn.Sequential(
            *conv_norm_relu(shape.in_channels, half, 3, stride=2),
            *conv_norm_relu(half, channels, 3, stride=2),
        )
        self.backbone = backbone
        self.head = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, shape.num_classes, 1)
        )

    def logits(self, x: Tensor) -> Tensor:
        return upsample(self.head(self.backbone(self.stem(x))), x)


class DeepOptEqSegmenter(_Backbone):
    """The backbone is a deep OptEq of three blocks, 256, 512 and 512 (OptEq §7.5)."""

    def __init__(
        self, shape: Shape, *, channels: int, mids: tuple[int, ...], **options: Any
    ) -> None:
        super().__init__(shape, channels, DeepOptEq(channels, mids, kernel_size=3, **options))


class ExplicitSegmenter(_Backbone):
    """Its explicit twin: each block becomes a residual pair of convolutions of equal size."""

    def __init__(self, shape: Shape, *, channels: int, mids: tuple[int, ...]) -> None:
        pairs = [Block(channels, channels, partial(ExplicitPair, mid=mid)) for mid in mids]
        super().__init__(shape, channels, nn.Sequential(*pairs))


class FCN(Network):
    """FCN-8s (Shelhamer, Long and Darrell) on a ResNet-18: scores at strides 8, 16, 32, summed.

    Each coarser score is brought up by bilinear interpolation and added to the next finer one.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.in_channels)
        self.trunk = Trunk(shape.in_channels, Basic, BASIC_18, "imagenet")
        self.scores = nn.ModuleList(
            nn.Conv2d(c, shape.num_classes, 1) for c in self.trunk.channels[1:]
        )

    def logits(self, x: Tensor) -> Tensor:
        maps = self.trunk(x)[1:]
        scores = [score(m) for score, m in zip(self.scores, maps, strict=True)]
        out: Tensor = scores[-1]
        for _, finer in pairwise(reversed(scores)):
            out = upsample(out, finer) + finer
        return upsample(out, x)


_SIZES = {"channels": 128, "mids": (256, 512, 512)}
_segmenter = partial(entry, image_size=180, task="segmentation")  # CamVid at 240 × 180 pixels

SPECS = (
    _segmenter(
        "deep_opteq_seg",
        DeepOptEqSegmenter,
        "deep OptEq backbone of three blocks at a quarter of the pixels",
        {**_SIZES, **DEFAULTS},
        paper="OptEq §7.5, Table 10 (no count printed)",
    ),
    _segmenter(
        "fcn_seg",
        ExplicitSegmenter,
        "explicit twin of deep_opteq_seg: two convolutions for each block",
        _SIZES,
    ),
    _segmenter(
        "fcn_resnet18",
        FCN,
        "FCN-8s on a ResNet-18",
        {},
        paper="Shelhamer, Long and Darrell 2017",
    ),
)
