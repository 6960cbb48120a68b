"""Networks of one deep OptEq layer (Xie et al. 2021) for CIFAR, ImageNet and segmentation.

images → g(x) → z = f_L ∘ … ∘ f_1(z) → head
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from equilibria.adjoints import Phantom
from equilibria.nn import DeepOptEq, NormBounded, OptEqBlock
from equilibria.solvers import Anderson

from .network import (
    ModelConfig,
    ModelSpec,
    Network,
    conv_norm_relu,
    entry,
    features_to_logits,
    segmenter,
    upsample,
)
from .resnet import Trunk
from .stacks import Block, ExplicitPair


class DeepOptEqNet(Network):
    """One 3 × 3 convolution as g, a deep OptEq on all pixels, global pooling (OptEq §7.1).

    ``options`` are those of ``nn.DeepOptEq``.
    """

    def __init__(
        self, config: ModelConfig, *, channels: int, mids: tuple[int, ...], **options: Any
    ) -> None:
        super().__init__(config.in_channels)
        self.extractor = nn.Sequential(*conv_norm_relu(config.in_channels, channels, 3))
        self.layer = DeepOptEq(channels, mids, kernel_size=3, **options)
        self.head = features_to_logits(channels, config.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.extractor(x)))
        return out


class DeepOptEqImageNet(Network):
    """The first two stages of a ResNet-50, a depthwise-separable deep OptEq, Table 6's classifier.

    The classifier is (1 × 1 convolution, ReLU, max pool) twice, 512 → 1024 → 2048, the mean over
    pixels, and a linear map. Small has five blocks of 512 with 3 × 3 kernels; Middle has a
    Wide-ResNet-50 in front and three times a block of 1024 with 5 × 5 kernels and one of 512 with
    3 × 3.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        widen: int,
        mids: tuple[int, ...],
        wide_kernels: bool,
        **options: Any,
    ) -> None:
        super().__init__(config.in_channels)
        self.extractor = Trunk(config.in_channels, (3, 4), "imagenet", bottleneck=True, widen=widen)
        channels = self.extractor.channels[-1]
        self.layer = DeepOptEq(channels, mids, kernel_size=3, separable=True, **options)
        if wide_kernels:
            block = partial(OptEqBlock, kernel_size=5, separable=True, bias=True)
            for index in range(0, len(mids), 2):
                self.layer.blocks[index] = block(
                    channels, mids[index], channels, constraint=options["constraint"]
                )
        self.classifier = nn.Sequential(
            *conv_norm_relu(channels, 2 * channels, 1),
            nn.MaxPool2d(2),
            *conv_norm_relu(2 * channels, 4 * channels, 1),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * channels, config.num_classes),
        )

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.layer(self.extractor(x)[-1]))
        return out


class BackboneSegmenter(Network):
    """Two stride-2 convolutions, a backbone at a quarter of the pixels, a score for each pixel.

    x [B, C, H, W] → [B, num_classes, H, W]; the scores are brought back by bilinear interpolation,
    so H and W need not be multiples of anything.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backbone: Callable[..., nn.Module],
        channels: int,
        **options: Any,
    ) -> None:
        super().__init__(config.in_channels)
        made, half = backbone(channels, **options), (channels + 1) // 2
        self.stem = nn.Sequential(
            *conv_norm_relu(config.in_channels, half, 3, stride=2),
            *conv_norm_relu(half, channels, 3, stride=2),
        )
        self.backbone = made
        self.head = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, config.num_classes, 1)
        )

    def logits(self, x: Tensor) -> Tensor:
        return upsample(self.head(self.backbone(self.stem(x))), x)


def _explicit(channels: int, mids: tuple[int, ...]) -> nn.Module:
    """A residual pair of convolutions of equal size in the place of each block."""
    pairs = [Block(channels, channels, partial(ExplicitPair, mid=mid)) for mid in mids]
    return nn.Sequential(*pairs)


_DEFAULTS: dict[str, Any] = {
    "alpha": 0.8,
    "learn_alpha": False,
    "constraint": NormBounded(bound=0.95),
    "regularizer": None,
    "regularize": "gradient",
    # T contracts by (0.8·0.95² + 0.2)⁵ = 0.67 or better with five blocks: eight accelerated steps
    # leave less than bfloat16 resolves. Fixed steps never wait for the device and compile whole.
    "solver": Anderson(rtol=0.0, atol=0.0, max_steps=8),
    "adjoint": Phantom(steps=5, damping=0.8),
}


def _cifar(name: str, channels: int, mids: tuple[int, ...], paper: int, text: str) -> ModelSpec:
    return entry(
        name,
        DeepOptEqNet,
        text,
        {"channels": channels, "mids": mids, **_DEFAULTS},
        paper="OptEq, Tables 3–5 and 8",
        paper_parameters=paper,
    )


def _imagenet(name: str, widen: int, mids: tuple[int, ...], wide: bool, paper: int) -> ModelSpec:
    return entry(
        name,
        partial(DeepOptEqImageNet, widen=widen, mids=mids, wide_kernels=wide),
        f"deep OptEq of {len(mids)} separable blocks behind two ResNet-50 stages",
        _DEFAULTS,
        image_size=224,
        paper="OptEq, Tables 6–7 (its count does not add up)",
        paper_parameters=paper,
        paper_classes=1000,
    )


_BACKBONE = {"channels": 128, "mids": (256, 512, 512)}
SPECS = (
    _cifar("deep_opteq_199k", 30, (16, 32, 64, 128, 128), 199_000, "deep OptEq of five blocks"),
    _cifar("deep_opteq_162k", 30, (16, 32, 64, 64, 128), 162_000, "deep OptEq of five blocks"),
    _cifar("deep_opteq_1m4", 64, (64, 128, 256, 256, 512), 1_400_000, "deep OptEq, wider"),
    _imagenet("deep_opteq_small", 1, (512,) * 5, False, 18_000_000),
    _imagenet("deep_opteq_middle", 2, (1024, 512) * 3, True, 40_000_000),
    segmenter(
        "deep_opteq_seg",
        partial(BackboneSegmenter, backbone=partial(DeepOptEq, kernel_size=3)),
        "deep OptEq backbone of three blocks at a quarter of the pixels",
        {**_BACKBONE, **_DEFAULTS},
        paper="OptEq §7.5, Table 10 (no count printed)",
    ),
    segmenter(
        "fcn_seg",
        partial(BackboneSegmenter, backbone=_explicit),
        "explicit twin of deep_opteq_seg: two convolutions for each block",
        _BACKBONE,
    ),
)
