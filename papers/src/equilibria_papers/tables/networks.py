"""The networks of the thesis' chapter 4, which the table of models does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from equilibria.adjoints import Implicit
from equilibria.engine import GMRES
from equilibria.nn import DEQ, RepeatedBlock, ResidualBlock
from equilibria.solvers import Anderson

_POOLED = 4


class ResidualNet(nn.Module):
    """images → convolution → fixed point of Eq 4.1, or Eq 4.1 applied K times → pool → logits.

    x [B, C, H, W] → [B, classes]. The thesis names the block (Eq 4.1) and the solver (Anderson to
    1e-2 in at most 50 steps, §4.1.2); widths and head are those of the tutorial that its block
    comes from: 48 channels, 64 inside, group norms of 8.

    Args:
        classes, in_channels: of the data.
        channels, inner: of z, and inside the block.
        std: standard deviation of the block's kernels at the start (§4.1.1: 1 or 0.01).
        repeats: K; None: the fixed point.
        rtol, max_steps: of Anderson.
    """

    def __init__(
        self,
        classes: int,
        in_channels: int,
        *,
        channels: int = 48,
        inner: int = 64,
        std: float = 0.01,
        repeats: int | None = None,
        rtol: float = 1e-2,
        max_steps: int = 50,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        )
        block = ResidualBlock(channels, inner, std=std)
        self.layer: nn.Module = (
            DEQ(
                block,
                # A few samples take all steps. The others leave the batch, which halves its time.
                solver=Anderson(rtol=rtol, max_steps=max_steps, compact=True),
                adjoint=Implicit(solver=GMRES(rtol=rtol)),
            )
            if repeats is None
            else RepeatedBlock(block, repeats=repeats)
        )
        self.head = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.AdaptiveAvgPool2d(_POOLED),
            nn.Flatten(),
            nn.Linear(channels * _POOLED**2, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.stem(x)))
        return logits


NETWORKS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType({"residual_deq": ResidualNet})
"""name → build(classes, in_channels, **options)."""
