"""What stands around MDEQ: the stem before it, the heads for classes and for pixels after it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .inputs import check_kernel, check_sizes

__all__ = ["MDEQClassifier", "MDEQSegmenter", "MDEQStem"]

_EXPANSION = 4


def _conv(
    inputs: int, outputs: int, size: int, *, stride: int = 1, bias: bool = False
) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=bias)
    nn.init.normal_(conv.weight, std=0.01)
    if conv.bias is not None:
        nn.init.normal_(conv.bias, std=0.01)
    return conv


def _normalized(conv: nn.Conv2d) -> list[nn.Module]:
    return [conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU()]


class MDEQStem(nn.Sequential):
    """Images [B, in_channels, H, W] → features [B, channels, H/2^d, W/2^d] to be injected.

    Two 3 × 3 convolutions (more where d > 2), each with batch norm and ReLU, the first d of stride
    2; then, with ``pointwise``, a 1 × 1 one. The authors leave that out of their two-scale CIFAR
    network.

    Args:
        channels: ``channels[0]`` of the MDEQ.
        in_channels: of the images.
        downsample: d, how often the image is halved: 0 for CIFAR, 2 for ImageNet.
        pointwise: whether the 1 × 1 convolution follows.
    """

    def __init__(
        self, channels: int, *, in_channels: int = 3, downsample: int = 0, pointwise: bool = True
    ) -> None:
        check_sizes("MDEQStem", {"channels": channels, "in_channels": in_channels})
        check_sizes("MDEQStem", {"downsample": downsample}, least=0)
        parts: list[nn.Module] = []
        for i in range(max(2, downsample)):
            stride = 2 if i < downsample else 1
            parts += _normalized(_conv(channels if i else in_channels, channels, 3, stride=stride))
        if pointwise:
            parts += _normalized(_conv(channels, channels, 1))
        super().__init__(*parts)


class _Bottleneck(nn.Module):
    """ReLU(BN(A₃ * ReLU(BN(A₂ * ReLU(BN(A₁ * z))))) + BN(S * z)), A₁, A₃, S 1 × 1 and A₂ 3 × 3."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        self.narrow = _conv(inputs, width, 1)
        self.spatial = _conv(width, width, 3)
        self.widen = _conv(width, outputs, 1)
        norms = (nn.BatchNorm2d(c, affine=False) for c in (width, width, outputs))
        self.norm1, self.norm2, self.norm3 = norms
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs:
            self.skip = nn.Sequential(_conv(inputs, outputs, 1), nn.BatchNorm2d(outputs))

    def forward(self, z: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.narrow(z)))
        out = F.relu(self.norm2(self.spatial(out)))
        return F.relu(self.norm3(self.widen(out)) + self.skip(z))


class MDEQClassifier(nn.Module):
    """States (z_1, …, z_n) of an MDEQ → logits [B, num_classes].

    y_1 = B_1(z_1), y_{i+1} = B_{i+1}(z_{i+1}) + D_i(y_i): each scale goes through a bottleneck to
    4·head_channels[i] channels and is added to the finer ones, brought down by strided 3 × 3
    convolutions. Then 1 × 1 to ``final_channels``, the mean over pixels, and a linear map.

    Args:
        channels: those of the MDEQ, the finest first.
        num_classes: how many logits.
        head_channels: the width of the bottlenecks, one for each scale.
        final_channels: of the last feature map.
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_classes: int,
        *,
        head_channels: Sequence[int],
        final_channels: int,
    ) -> None:
        super().__init__()
        self.channels = tuple(channels)
        if len(head_channels) != len(self.channels):
            raise ValueError(
                f"MDEQClassifier(head_channels={tuple(head_channels)}): expected "
                f"{len(self.channels)} entries, one for each of channels={self.channels}."
            )
        sizes = {"num_classes": num_classes, "final_channels": final_channels}
        sizes |= {f"channels[{i}]": c for i, c in enumerate(self.channels)}
        sizes |= {f"head_channels[{i}]": c for i, c in enumerate(head_channels)}
        check_sizes("MDEQClassifier", sizes)
        wide = [_EXPANSION * c for c in head_channels]
        pairs = zip(self.channels, head_channels, strict=True)
        self.widen = nn.ModuleList(_Bottleneck(a, b) for a, b in pairs)
        self.down = nn.ModuleList(
            nn.Sequential(*_normalized(_conv(a, b, 3, stride=2, bias=True)))
            for a, b in itertools.pairwise(wide)
        )
        last = _conv(wide[-1], final_channels, 1, bias=True)
        self.final = nn.Sequential(*_normalized(last))
        self.linear = nn.Linear(final_channels, num_classes)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        _check_states("MDEQClassifier", states, self.channels)
        y = self.widen[0](states[0])
        for down, widen, z in zip(self.down, self.widen[1:], states[1:], strict=True):
            y = widen(z) + down(y)
        logits: Tensor = self.linear(self.final(y).mean((2, 3)))
        return logits


class MDEQSegmenter(nn.Module):
    """States (z_1, …, z_n) of an MDEQ → logits [B, num_classes, H, W] at the finest scale.

    All scales are brought to the finest by bilinear interpolation and set beside each other; a
    1 × 1 convolution with batch norm and ReLU and a last convolution follow.

    Args:
        channels: those of the MDEQ, the finest first.
        num_classes: classes of a pixel.
        kernel_size: of the last convolution, odd.
    """

    def __init__(self, channels: Sequence[int], num_classes: int, *, kernel_size: int = 1) -> None:
        super().__init__()
        self.channels = tuple(channels)
        sizes = {"num_classes": num_classes}
        sizes |= {f"channels[{i}]": c for i, c in enumerate(self.channels)}
        check_sizes("MDEQSegmenter", sizes)
        check_kernel("MDEQSegmenter", kernel_size)
        total = sum(self.channels)
        self.mix = nn.Sequential(*_normalized(_conv(total, total, 1, bias=True)))
        self.classify = _conv(total, num_classes, kernel_size, bias=True)

    def forward(self, states: Sequence[Tensor], size: tuple[int, int] | None = None) -> Tensor:
        """Logits; with ``size`` = (H, W) of the image they are interpolated to its pixels."""
        _check_states("MDEQSegmenter", states, self.channels)
        shape = states[0].shape[2:]
        same = [states[0], *(_bilinear(z, shape) for z in states[1:])]
        logits: Tensor = self.classify(self.mix(torch.cat(same, 1)))
        return logits if size is None else _bilinear(logits, size)


def _bilinear(z: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(z, size=tuple(size), mode="bilinear", align_corners=True)


def _check_states(owner: str, states: Sequence[Tensor], channels: tuple[int, ...]) -> None:
    found = tuple(z.shape[1] for z in states) if isinstance(states, (tuple, list)) else None
    if found != channels:
        given = type(states).__name__ if found is None else f"states of {found} channels"
        raise ValueError(
            f"{owner} takes the tuple of states of an MDEQ with channels {channels}, got {given}."
        )
