"""Networks of one deep OptEq layer (Xie et al. 2021): CIFAR sizes, ImageNet Small and Middle.

images → g(x) → z = f_L ∘ … ∘ f_1(z) → head
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from equilibria.adjoints import Phantom
from equilibria.nn.deep_opteq import DeepOptEq, OptEqBlock
from equilibria.solvers import Anderson

from . import options as opt
from .network import Network, Shape, features_to_logits
from .registry import ModelSpec
from .resnet import Bottleneck, Trunk

__all__ = ["SPECS", "DeepOptEqImageNet", "DeepOptEqNet", "solving"]

# T contracts by (0.8·0.95² + 0.2)⁵ = 0.67 or better with five blocks: eight accelerated steps leave
# less than bfloat16 resolves. Fixed steps never wait for the device and compile whole.
_SOLVER = Anderson(rtol=0.0, atol=0.0, max_steps=8)
_ADJOINT = Phantom(steps=5, damping=0.8)


def solving() -> dict[str, opt.Option]:
    """The options of every network with a deep OptEq layer."""
    return {
        "alpha": opt.numbers(0.8, "α of the blocks, one or one a block", low=0.0, high=1.0),
        "learn_alpha": opt.flag(False, "make each α a parameter"),
        "constraint": opt.constraint(opt.linear_bound(0.95)),
        "regularizer": opt.regularizer(None),
        "regularize": opt.choice(
            "gradient", "how the regularizer enters the map", ("gradient", "prox")
        ),
        "solver": opt.solver(_SOLVER),
        "adjoint": opt.adjoint(_ADJOINT),
    }


class DeepOptEqNet(Network):
    """One 3 × 3 convolution as g, a deep OptEq on all pixels, global pooling (OptEq §7.1).

    ``options`` are those of ``nn.DeepOptEq``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        channels: int,
        mids: tuple[int, ...],
        **options: Any,
    ) -> None:
        super().__init__(shape.in_channels)
        self.extractor = nn.Sequential(
            nn.Conv2d(shape.in_channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        self.layer = DeepOptEq(channels, mids, kernel_size=3, **options)
        self.head = features_to_logits(channels, shape.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.extractor(x)))
        return out


class DeepOptEqImageNet(Network):
    """The first two stages of a ResNet-50, a depthwise-separable deep OptEq, Table 6's classifier.

    The classifier is (1 × 1 convolution, ReLU, max pool) twice, 512 → 1024 → 2048, the mean over
    pixels, and a linear map. Small has five blocks of 512 with 3 × 3 kernels; Middle has a
    Wide-ResNet-50 in front and three times a block of 1024 with 5 × 5 kernels and one of 512 with
    3 × 3.

    The paper's 18 M and 40 M do not add up from its own table: two stages of a ResNet-50 are 1.4 M
    (three are 8.5 M, but end at 14 × 14 pixels). This is what is described, with our count.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        widen: int,
        mids: tuple[int, ...],
        wide_kernels: bool,
        **options: Any,
    ) -> None:
        super().__init__(shape.in_channels)
        self.extractor = Trunk(shape.in_channels, Bottleneck, (3, 4), "imagenet", widen)
        channels = self.extractor.channels[-1]
        self.layer = DeepOptEq(channels, mids, kernel_size=3, separable=True, **options)
        if wide_kernels:
            for index in range(0, len(mids), 2):
                self.layer.blocks[index] = OptEqBlock(
                    channels,
                    mids[index],
                    channels,
                    kernel_size=5,
                    separable=True,
                    constraint=options["constraint"],
                    bias=True,
                )
        self.classifier = nn.Sequential(
            *_narrowing(channels, 2 * channels),
            *_narrowing(2 * channels, 4 * channels),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * channels, shape.num_classes),
        )

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.layer(self.extractor(x)[-1]))
        return out


def _narrowing(before: int, after: int) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, 1, bias=False)
    return [conv, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]


def _cifar(name: str, channels: int, mids: tuple[int, ...], paper: int, text: str) -> ModelSpec:
    return ModelSpec(
        name,
        DeepOptEqNet,
        text,
        in_channels=3,
        image_size=32,
        options={
            "channels": opt.integer(channels, "channels of z and of the extractor"),
            "mids": opt.integers(mids, "channels of each block"),
            **solving(),
        },
        paper="OptEq, Tables 3–5 and 8",
        paper_parameters=paper,
    )


def _imagenet(name: str, widen: int, mids: tuple[int, ...], wide: bool, paper: int) -> ModelSpec:
    return ModelSpec(
        name,
        partial(DeepOptEqImageNet, widen=widen, mids=mids, wide_kernels=wide),
        f"deep OptEq of {len(mids)} separable blocks behind two ResNet-50 stages",
        in_channels=3,
        image_size=224,
        options=solving(),
        paper="OptEq, Tables 6–7 (its count does not add up)",
        paper_parameters=paper,
        paper_classes=1000,
    )


SPECS = (
    _cifar("deep_opteq_199k", 30, (16, 32, 64, 128, 128), 199_000, "deep OptEq of five blocks"),
    _cifar("deep_opteq_162k", 30, (16, 32, 64, 64, 128), 162_000, "deep OptEq of five blocks"),
    _cifar("deep_opteq_1m4", 64, (64, 128, 256, 256, 512), 1_400_000, "deep OptEq, wider"),
    _imagenet("deep_opteq_small", 1, (512,) * 5, False, 18_000_000),
    _imagenet("deep_opteq_middle", 2, (1024, 512) * 3, True, 40_000_000),
)
