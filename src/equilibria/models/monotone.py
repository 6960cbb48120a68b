"""Networks of one monotone layer (Winston and Kolter 2020): one convolution, or three tiers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from equilibria.nn import MonotoneDEQ, TransposedSplitting
from equilibria.solvers import PeacemanRachford

from .network import ModelConfig, ModelSpec, Network, check_pixels, entry


class MonotoneNet(Network):
    """One monotone layer on the image itself, average pooling, a linear map of all its pixels.

    With one entry in ``channels`` it is the single convolution of the paper, else the tiers of the
    multi-tier one, whose coarsest is read. The linear map takes every pixel, so ``image_size`` is
    the one size that the network accepts. ``options`` are those of ``nn.MonotoneDEQ``.
    """

    def __init__(
        self, config: ModelConfig, *, channels: tuple[int, ...], pool: int, **options: Any
    ) -> None:
        super().__init__(config.in_channels, config.image_size)
        halved = len(channels) - 1
        unit = pool * 2**halved
        why = f"{len(channels)} tier(s) halve it {halved} time(s), and it is pooled by {pool}"
        check_pixels(config.image_size, unit, why)
        self.layer = MonotoneDEQ(
            channels if len(channels) > 1 else channels[0],
            in_channels=config.in_channels,
            kernel_size=3,
            **options,
        )
        self.pool = nn.AvgPool2d(pool)
        side = config.image_size // unit
        self.head = nn.Linear(channels[-1] * side * side, config.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        last: Tensor = z if isinstance(z, Tensor) else z[-1]
        out: Tensor = self.head(self.pool(last).flatten(1))
        return out


def _spec(name: str, text: str, channels: tuple[int, ...], pool: int, count: int) -> ModelSpec:
    return entry(
        name,
        MonotoneNet,
        text,
        {
            "channels": channels,
            "pool": pool,
            "m": 1.0,
            "solver": PeacemanRachford(rtol=1e-2, max_steps=50),
            "adjoint": TransposedSplitting(),
        },
        paper="Winston and Kolter 2020; OptEq Table 4",
        paper_parameters=count,
    )


SPECS = (
    _spec("mondeq_single", "one monotone convolution of 81 channels", (81,), 4, 172_218),
    _spec("mondeq_multi", "monotone convolutions in three tiers", (16, 32, 60), 1, 170_194),
)
