"""Small data sets and networks for the tests of evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.data import ImageData


def dataset(images: Tensor, targets: Tensor, classes: int, **changes: Any) -> ImageData:
    given: dict[str, Any] = {"images": images, "targets": targets, "name": "made up"}
    given |= {"classes": tuple(f"class {k}" for k in range(classes)), "split_name": "test"}
    given |= {"mean": (0.5,) * images.shape[1], "std": (0.25,) * images.shape[1]}
    task = "segmentation" if targets.ndim == 3 else "classification"
    return ImageData(**{**given, "task": task, **changes})


def random_data(
    count: int = 20, classes: int = 3, *, channels: int = 1, size: int = 8, seed: int = 0
) -> ImageData:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, channels, size, size), generator=draw, dtype=torch.uint8)
    targets = torch.arange(count) % classes
    return dataset(images, targets, classes)


class Wired(nn.Module):
    """``forward(x, *parts)`` of the given parts as a module."""

    def __init__(self, forward: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.wiring, self.parts = forward, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(x, *self.parts)


class FromTable(nn.Module):
    """Gives prepared logits: the first pixel of the image is the row of the table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        row = ((x[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().long()
        table: Tensor = self.table  # type: ignore[assignment]
        return table[row]


def tiny_geq(
    classes: int = 3,
    *,
    channels: int = 1,
    seed: int = 0,
    solver: eq.Auto | None = None,
    **options: Any,
) -> nn.Sequential:
    """Convolution, GEQ, pooling, linear: about 300 parameters."""
    torch.manual_seed(seed)
    layer = eq.nn.GEQ(
        4,
        4,
        patch=eq.Patches(channels=2, size=2),
        hidden=None,
        solver=eq.Picard(max_steps=4, rtol=0.0) if solver is None else solver,
        **options,
    )
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1),
        layer,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, classes),
    )


def pictures(count: int = 24, size: int = 32) -> np.ndarray:
    """Smooth waves, a disk, a grid and an edge, in colors: [count, size, size, 3] uint8."""
    v, u = np.mgrid[0:size, 0:size] / size
    out = np.zeros((count, size, size, 3))
    for k in range(count):
        for c in range(3):
            wave = np.sin(2 * np.pi * ((1 + k % 5) * u + (1 + (k + c) % 4) * v) + k + 2 * c)
            disk = (u - 0.5 + 0.02 * k % 0.3) ** 2 + (v - 0.5) ** 2 < 0.06
            grid = (np.floor(u * 8) + np.floor(v * 8)) % 2
            edge = u + v * ((k % 3) - 1) > 0.6
            light = 0.25 + 0.02 * k + 0.18 * wave + 0.08 * grid
            out[k, ..., c] = light + 0.25 * disk * (c != k % 3) + 0.2 * edge * (c == k % 3)
    return np.uint8(np.clip(out, 0, 1) * 255 + 0.5)


def picture_tensor(count: int = 24, size: int = 32) -> Tensor:
    return torch.from_numpy(pictures(count, size)).permute(0, 3, 1, 2).contiguous()
