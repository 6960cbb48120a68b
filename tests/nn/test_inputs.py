"""What every layer says of an input that it cannot take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import equilibria as eq

PATCH = eq.Patches(channels=2, size=2)


@pytest.mark.parametrize(
    "layer",
    [
        eq.nn.DeepOptEq(4, (4,), kernel_size=3),
        eq.nn.MonotoneDEQ(4, kernel_size=3),
        eq.nn.OptEq(4, 4, kernel_size=3),
        eq.nn.GEQ(4, 4, patch=PATCH),
        eq.nn.MDEQ((4, 4), groups=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize(
    ("shape", "text"), [((0, 4, 4, 4), "batch size zero"), ((2, 4, 0, 4), "no pixels")]
)
def test_there_is_nothing_to_solve(layer: nn.Module, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=rf"{type(layer).__name__} got x .* with {text}"):
        layer(torch.zeros(shape))
