"""MDEQ (Bai, Koltun and Kolter 2020), the multiscale baseline: for classes and for pixels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from equilibria.adjoints import Phantom
from equilibria.nn.mdeq import MDEQ, MDEQClassifier, MDEQSegmenter, MDEQStem
from equilibria.solvers import Anderson

from . import options as opt
from .network import Network, Shape
from .registry import ModelSpec

__all__ = ["SPECS", "MDEQNet", "MDEQSegmentation"]

# The authors take 18 Broyden steps; Anderson gets there with fewer and half the memory. Fixed steps
# never wait for the device. The phantom gradient is what the GEQ paper trains its baselines with.
_SOLVER = Anderson(rtol=0.0, atol=0.0, max_steps=12)
_ADJOINT = Phantom(steps=5, damping=0.8)


def _options(
    channels: tuple[int, ...], dropout: float, downsample: int, jacobian: float = 0.0
) -> dict[str, opt.Option]:
    return {
        "channels": opt.integers(channels, "channels of each scale, the finest first"),
        "expansion": opt.integer(5, "widening inside the blocks", high=64),
        "groups": opt.integer(8, "groups of the group norms"),
        "dropout": opt.fraction(dropout, "probability that a channel is left out in training"),
        "downsample": opt.integer(downsample, "how often the stem halves", low=0, high=8),
        "jacobian_weight": opt.fraction(jacobian, "weight of the Jacobian penalty"),
        "solver": opt.solver(_SOLVER),
        "adjoint": opt.adjoint(_ADJOINT),
    }


class MDEQNet(Network):
    """Stem, one equilibrium of four scales, the bottleneck head of the paper.

    ``options`` are those of ``nn.MDEQ``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        channels: tuple[int, ...],
        head_channels: tuple[int, ...],
        final_channels: int,
        downsample: int,
        **options: Any,
    ) -> None:
        super().__init__(shape.in_channels)
        _check_pixels(shape.image_size, channels, downsample)
        self.stem = MDEQStem(channels[0], in_channels=shape.in_channels, downsample=downsample)
        self.layer = MDEQ(channels, post_affine=False, **options)
        self.head = MDEQClassifier(
            channels, shape.num_classes, head_channels=head_channels, final_channels=final_channels
        )

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.stem(x)))
        return out


class MDEQSegmentation(Network):
    """Stem, one equilibrium of several scales, all of them set beside each other, scores.

    Images whose sides the scales do not divide are padded below and to the right with their edge,
    and the scores cut to size.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        channels: tuple[int, ...],
        downsample: int,
        **options: Any,
    ) -> None:
        super().__init__(shape.in_channels)
        self.multiple = 2 ** (downsample + len(channels) - 1)
        self.stem = MDEQStem(channels[0], in_channels=shape.in_channels, downsample=downsample)
        self.layer = MDEQ(channels, post_affine=False, **options)
        self.head = MDEQSegmenter(channels, shape.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        below, right = -height % self.multiple, -width % self.multiple
        padded = nn.functional.pad(x, (0, right, 0, below), mode="replicate")
        size = (height + below, width + right)
        out: Tensor = self.head(self.layer(self.stem(padded)), size)
        return out[..., :height, :width]


def _check_pixels(size: int, channels: tuple[int, ...], downsample: int) -> None:
    needed = 2 ** (downsample + len(channels) - 1)
    if size % needed:
        raise ValueError(
            f"image_size={size} is no multiple of {needed}: the stem halves it {downsample} and "
            f"the {len(channels)} scales {len(channels) - 1} time(s)."
        )


_LARGE = (32, 64, 128, 256)

SPECS = (
    ModelSpec(
        "mdeq_cifar",
        MDEQNet,
        "MDEQ of four scales",
        in_channels=3,
        image_size=32,
        options={
            **_options(_LARGE, 0.3, 0),
            "head_channels": opt.integers((10, 20, 40, 80), "widths of the head's bottlenecks"),
            "final_channels": opt.integer(1280, "of the last feature map"),
        },
        paper="Bai et al. 2020; the baseline of GEQ Table 1",
        paper_parameters=10_000_000,
    ),
    ModelSpec(
        "mdeq_seg",
        MDEQSegmentation,
        "MDEQ of four scales at a quarter of the pixels",
        in_channels=3,
        image_size=180,
        options=_options(_LARGE, 0.0, 2),
        task="segmentation",
        paper="Bai et al. 2020 (sizes ours)",
    ),
)
