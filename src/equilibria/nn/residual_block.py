"""The residual block of paper 004, Eq 4.1: the usual first block of a convolutional DEQ."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.engine.options import check_number

from .constraints import Constraint, constrain

__all__ = ["ResidualBlock"]


class ResidualBlock(nn.Module):
    """f(z, x) = norm(ReLU(z + norm(x + W₂ * norm(ReLU(W₁ * z))))) (paper 004, Eq 4.1).

    * is a convolution without bias, norm is group norm; z and x are [B, channels, H, W], the inner
    map is [B, inner, H, W]. Small weights (standard deviation 0.01) make f nearly constant in z at
    the start, so that a solver needs few steps; with 1.0 the iteration is chaotic (§4.1.1).

    Args:
        channels: of z and x.
        inner: of W₁ * z; None: ``channels``.
        groups: of the group norms; must divide ``channels`` and ``inner``.
        kernel_size: odd.
        std: of the normal distribution that both kernels start from.
        affine: whether the group norms have weights of their own.
        constraint: on W₁ and W₂: ``WeightNormalized()``, ``NormBounded(...)`` or None.
    """

    def __init__(
        self,
        channels: int,
        inner: int | None = None,
        *,
        groups: int = 8,
        kernel_size: int = 3,
        std: float = 0.01,
        affine: bool = True,
        constraint: Constraint = None,
    ) -> None:
        super().__init__()
        inner = channels if inner is None else inner
        sizes = {"channels": channels, "inner": inner, "groups": groups, "kernel_size": kernel_size}
        check_sizes("ResidualBlock", sizes)
        check_kernel("ResidualBlock", kernel_size)
        for name in ("channels", "inner"):
            check_groups("ResidualBlock", name, sizes[name], groups)
        self.std = std
        check_number(self, "std", low=0.0, low_open=True)
        self.channels, self.inner = channels, inner
        first, second = (
            nn.Conv2d(a, b, kernel_size, padding=kernel_size // 2, bias=False)
            for a, b in ((channels, inner), (inner, channels))
        )
        for conv in (first, second):
            nn.init.normal_(conv.weight, std=std)
        self.conv1 = constrain(first, "weight", constraint)
        self.conv2 = constrain(second, "weight", constraint)
        self.norm1 = nn.GroupNorm(groups, inner, affine=affine)
        self.norm2 = nn.GroupNorm(groups, channels, affine=affine)
        self.norm3 = nn.GroupNorm(groups, channels, affine=affine)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x), [B, channels, H, W]."""
        for name, t in (("z", z), ("x", x)):
            if t.ndim != 4 or t.shape[1] != self.channels:
                raise ValueError(
                    f"ResidualBlock takes {name} [B, {self.channels}, H, W], got shape "
                    f"{tuple(t.shape)}."
                )
        inside = self.conv2(self.norm1(F.relu(self.conv1(z))))
        out: Tensor = self.norm3(F.relu(z + self.norm2(x + inside)))
        return out


def check_sizes(owner: str, sizes: Mapping[str, object], least: int = 1) -> None:
    """Raise unless every size is an integer of at least ``least``."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{owner}({name}={value!r}): expected an integer of at least {least}.")


def check_kernel(owner: str, kernel_size: int) -> None:
    if kernel_size % 2 == 0:
        raise ValueError(
            f"{owner}(kernel_size={kernel_size}): 'same' padding needs an odd kernel size."
        )


def check_groups(owner: str, name: str, channels: int, groups: int) -> None:
    """Group norm cuts channels into equal groups."""
    if channels % groups:
        raise ValueError(
            f"{owner}: groups={groups} of the group norms must divide {name}={channels}, and "
            f"{channels} % {groups} = {channels % groups}."
        )
