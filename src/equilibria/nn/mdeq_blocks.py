"""The parts of MDEQ's map: a residual block at each scale, and the exchange between scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from .constraints import Constraint, constrain

__all__ = ["Downsample", "Fusion", "ScaleBlock", "Upsample"]


def _small(conv: nn.Conv2d) -> nn.Conv2d:
    """Start from N(0, 0.01²), as the authors do where no weight normalization follows."""
    nn.init.normal_(conv.weight, std=0.01)
    return conv


def _gain(norm: nn.GroupNorm, value: float) -> None:
    """Set the weight of a group norm, if it has one."""
    if norm.affine:
        nn.init.constant_(norm.weight, value)


class ScaleBlock(nn.Module):
    """h(z, u) = GN₃(ReLU(z + GN₂(m·(W₂ * ReLU(GN₁(W₁ * z))) + u))), z and u [B, C, H, W].

    The residual block of one scale; u is the injected input (or None), m the dropout mask
    [B, C, 1, 1] of this solve (or None). W₁ widens C to expansion·C. Weights are given from
    outside, evaluated once for a solve.

    ``calm`` < 1 makes the block listen to its input at the start: where x is ``injected`` GN₂
    starts with the weight 1/calm, so that z counts for little beside it; elsewhere GN₃ starts with
    calm, so that the other scales are heard; W₂ starts smaller by calm².
    """

    def __init__(
        self,
        channels: int,
        *,
        expansion: int,
        groups: int,
        kernel_size: int,
        affine: bool,
        constraint: Constraint,
        calm: float,
        injected: bool,
    ) -> None:
        super().__init__()
        wide, pad = expansion * channels, kernel_size // 2
        self.padding = pad
        # With weight normalization the authors' kernels keep torch's own initialization.
        first = nn.Conv2d(channels, wide, kernel_size, padding=pad, bias=False)
        second = nn.Conv2d(wide, channels, kernel_size, padding=pad, bias=False)
        if constraint is None:
            first, second = _small(first), _small(second)
        second.weight.data.mul_(calm**2)
        self.conv1 = constrain(first, "weight", constraint)
        self.conv2 = constrain(second, "weight", constraint)
        self.norm1 = nn.GroupNorm(groups, wide, affine=affine)
        self.norm2 = nn.GroupNorm(groups, channels, affine=affine)
        self.norm3 = nn.GroupNorm(groups, channels, affine=affine)
        if calm != 1.0:
            _gain(self.norm2, 1.0 / calm) if injected else _gain(self.norm3, calm)

    def forward(
        self, z: Tensor, weights: Iterator[Tensor], injection: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        out = F.relu(self.norm1(F.conv2d(z, next(weights), padding=self.padding)))
        out = F.conv2d(out, next(weights), padding=self.padding)
        if mask is not None:
            out = out * mask
        if injection is not None:
            out = out + injection
        end: Tensor = self.norm3(F.relu(self.norm2(out) + z))
        return end


class Downsample(nn.Module):
    """From a finer scale to one ``levels`` coarser: that many 3 × 3 convolutions of stride 2."""

    def __init__(
        self, inputs: int, outputs: int, levels: int, *, groups: int, affine: bool
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for level in range(levels):
            last = level == levels - 1
            width = outputs if last else inputs
            parts.append(_small(nn.Conv2d(inputs, width, 3, stride=2, padding=1, bias=False)))
            parts.append(nn.GroupNorm(groups, width, affine=affine))
            if not last:
                parts.append(nn.ReLU())
        self.net = nn.Sequential(*parts)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.net(z)
        return out


class Upsample(nn.Module):
    """From a coarser scale to one ``levels`` finer: 1 × 1 convolution, then nearest pixels.

    Its group norm starts with the weight ``calm``.
    """

    def __init__(
        self, inputs: int, outputs: int, levels: int, *, groups: int, affine: bool, calm: float
    ) -> None:
        super().__init__()
        self.factor = float(2**levels)
        self.conv = _small(nn.Conv2d(inputs, outputs, 1, bias=False))
        self.norm = nn.GroupNorm(groups, outputs, affine=affine)
        _gain(self.norm, calm)

    def forward(self, z: Tensor) -> Tensor:
        return F.interpolate(self.norm(self.conv(z)), scale_factor=self.factor, mode="nearest")


class Fusion(nn.Module):
    """y_i = GN(V_i * ReLU(Σ_j φ_ij(h_j))): every scale hears every other, φ_ii = identity.

    V_i is 1 × 1; its group norm has half the groups.
    """

    def __init__(
        self,
        channels: tuple[int, ...],
        *,
        groups: int,
        affine: bool,
        post_affine: bool,
        constraint: Constraint,
        calm: float,
    ) -> None:
        super().__init__()
        rows = []
        for i, outputs in enumerate(channels):
            row = nn.ModuleDict()
            for j, inputs in enumerate(channels):
                if j < i:
                    row[str(j)] = Downsample(inputs, outputs, i - j, groups=groups, affine=affine)
                elif j > i:
                    row[str(j)] = Upsample(
                        inputs, outputs, j - i, groups=groups, affine=affine, calm=calm
                    )
            rows.append(row)
        self.exchange = nn.ModuleList(rows)
        mixes = [nn.Conv2d(c, c, 1, bias=False) for c in channels]
        if constraint is None:
            mixes = [_small(conv) for conv in mixes]
        self.mix = nn.ModuleList([constrain(conv, "weight", constraint) for conv in mixes])
        half = max(1, groups // 2)
        self.norm = nn.ModuleList([nn.GroupNorm(half, c, affine=post_affine) for c in channels])

    def forward(self, h: list[Tensor], weights: Iterator[Tensor]) -> tuple[Tensor, ...]:
        made = []
        for i, (row, norm) in enumerate(zip(self.exchange, self.norm, strict=True)):
            assert isinstance(row, nn.ModuleDict)
            total = h[i]
            for j, module in row.items():
                total = total + module(h[int(j)])
            made.append(norm(F.conv2d(F.relu(total), next(weights))))
        return tuple(made)
