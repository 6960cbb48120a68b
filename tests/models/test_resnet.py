"""ResNets written by hand: their arithmetic, strides and stages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.models.resnet import Residual, Trunk


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    """Batch norm in eval mode, from its definition."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return (x - norm.running_mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)


def _stir(module: nn.Module) -> None:
    """Batch norms that do something."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            for value in (part.weight, part.bias, part.running_mean):
                nn.init.normal_(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "stride", "convolutions"),
    [
        *((6, stride, [(3, stride), (3, 1)]) for stride in (1, 2)),
        *((6, stride, [(1, 1), (3, stride), (1, 1)]) for stride in (1, 2)),
        (16, 1, [(1, 1), (3, 1), (1, 1)]),
    ],
)
def test_blocks_from_their_formula(
    before: int, stride: int, convolutions: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    block = Residual(before, 4, 16, stride, bottleneck=len(convolutions) == 3).eval()
    _stir(block)
    x = torch.randn(2, before, 8, 8)
    with torch.no_grad():
        out = x
        for place, (size, step) in enumerate(convolutions):
            weight, norm = block.body[3 * place].weight, block.body[3 * place + 1]
            assert weight.shape[2:] == (size, size)
            out = _norm(F.conv2d(out, weight, stride=step, padding=size // 2), norm)
            out = out.relu() if place + 1 < len(convolutions) else out
        across = x
        if before != 16:
            across = F.conv2d(x, block.shortcut[0].weight, stride=stride)  # type: ignore[index]
            across = _norm(across, block.shortcut[1])  # type: ignore[index]
        torch.testing.assert_close(block(x), (out + across).relu())


@pytest.mark.parametrize(
    ("stem", "sizes"), [("cifar", [32, 16, 8, 4]), ("imagenet", [16, 8, 4, 2])]
)
def test_pixels_and_channels_of_the_stages(stem: str, sizes: list[int]) -> None:
    side = 32 if stem == "cifar" else 64
    with torch.device("meta"):
        for bottleneck, channels in (
            (False, [64, 128, 256, 512]),
            (True, [256, 512, 1024, 2048]),
        ):
            trunk = Trunk(3, (1, 1, 1, 1), stem, bottleneck=bottleneck)  # type: ignore[arg-type]
            maps = trunk(torch.zeros(2, 3, side, side))
            assert [tuple(m.shape) for m in maps] == [
                (2, c, s, s) for c, s in zip(channels, sizes, strict=True)
            ]
            assert trunk.channels == channels
