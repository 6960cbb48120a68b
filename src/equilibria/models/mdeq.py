"""MDEQ (Bai, Koltun and Kolter 2020), the multiscale baseline: for classes and for pixels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from equilibria.adjoints import Phantom
from equilibria.nn import MDEQ, MDEQClassifier, MDEQSegmenter, MDEQStem
from equilibria.solvers import Anderson

from .network import ModelConfig, Network, check_pixels, entry, segmenter


class _MDEQNetwork(Network):
    """The stem and one equilibrium of several scales; ``options`` are those of ``nn.MDEQ``."""

    def __init__(
        self, config: ModelConfig, *, channels: tuple[int, ...], downsample: int, **options: Any
    ) -> None:
        super().__init__(config.in_channels)
        self.multiple = 2 ** (downsample + len(channels) - 1)
        self.stem = MDEQStem(channels[0], in_channels=config.in_channels, downsample=downsample)
        self.layer = MDEQ(channels, post_affine=False, **options)


class MDEQNet(_MDEQNetwork):
    """Stem, one equilibrium of four scales, the bottleneck head of the paper."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        channels: tuple[int, ...],
        downsample: int,
        head_channels: tuple[int, ...],
        final_channels: int,
        **options: Any,
    ) -> None:
        super().__init__(config, channels=channels, downsample=downsample, **options)
        scales = f"the {len(channels)} scales {len(channels) - 1} time(s)"
        why = f"the stem halves it {downsample} and {scales}"
        check_pixels(config.image_size, self.multiple, why)
        self.head = MDEQClassifier(
            channels, config.num_classes, head_channels=head_channels, final_channels=final_channels
        )

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.stem(x)))
        return out


class MDEQSegmentation(_MDEQNetwork):
    """Stem, one equilibrium of several scales, all of them set beside each other, scores.

    Images whose sides the scales do not divide are padded below and to the right with their edge,
    and the scores cut to size.
    """

    def __init__(self, config: ModelConfig, *, channels: tuple[int, ...], **options: Any) -> None:
        super().__init__(config, channels=channels, **options)
        self.head = MDEQSegmenter(channels, config.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        below, right = -height % self.multiple, -width % self.multiple
        padded = nn.functional.pad(x, (0, right, 0, below), mode="replicate")
        size = (height + below, width + right)
        out: Tensor = self.head(self.layer(self.stem(padded)), size)
        return out[..., :height, :width]


_DEFAULTS: dict[str, Any] = {
    "channels": (32, 64, 128, 256),
    "expansion": 5,
    "groups": 8,
    "dropout": 0.0,
    "downsample": 2,
    "jacobian_weight": 0.0,
    # The authors take 18 Broyden steps; Anderson gets there with fewer and half the memory. Fixed
    # steps never wait for the device. The phantom gradient is what the GEQ paper trains its
    # baselines with.
    "solver": Anderson(rtol=0.0, atol=0.0, max_steps=12),
    "adjoint": Phantom(steps=5, damping=0.8),
}
_HEAD = {"head_channels": (10, 20, 40, 80), "final_channels": 1280}

SPECS = (
    entry(
        "mdeq_cifar",
        MDEQNet,
        "MDEQ of four scales",
        {**_DEFAULTS, "dropout": 0.3, "downsample": 0, **_HEAD},
        paper="Bai et al. 2020; the baseline of GEQ Table 1",
        paper_parameters=10_000_000,
    ),
    segmenter(
        "mdeq_seg",
        MDEQSegmentation,
        "MDEQ of four scales at a quarter of the pixels",
        _DEFAULTS,
        paper="Bai et al. 2020 (sizes ours)",
    ),
)
