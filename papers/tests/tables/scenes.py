"""What measures are tried on: scenes, images that hold their number, networks in closed form."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.data import ImageData
from equilibria_papers.tables.measures import Scene
from tests.evaluation.standins import dataset

Array = npt.NDArray[np.float64]


def scene_of(model: nn.Module, test: ImageData, folder: Path, **changes: Any) -> Scene:
    made = Scene(
        model=model.eval(),
        train=test,
        test=test,
        folder=folder,
        device=torch.device("cpu"),
        batch_size=16,
        train_batch=8,
        precision="32-true",
        seed=0,
        progress=False,
        smoke=False,
    )
    return dataclasses.replace(made, **changes)


def numbered(targets: Any, classes: int, pixels: int = 2, **more: Any) -> ImageData:
    """Images that hold their own number, so that a model can look up an answer for each.

    Two pixels of 256 values; the mirror image has them exchanged.
    """
    made = np.zeros((len(targets), 1, pixels, pixels), dtype=np.uint8)
    number = np.arange(len(targets))
    made[:, 0, 0, 0], made[:, 0, 0, -1] = number // 256, number % 256
    more = {"name": "numbered", "mean": (0.0,), "std": (1.0,), **more}
    return dataset(torch.from_numpy(made), torch.as_tensor(targets).long(), classes, **more)


class Linear(nn.Module):
    """(z, x) ↦ A z + x."""

    def __init__(self, a: Array) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.from_numpy(a))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.a.T + x


class TwoLayers(nn.Module):
    """Two linear equilibria of K₁ and K₂ plain steps, the second on what the first gives."""

    def __init__(self, first: Array, second: Array, steps: tuple[int, int]) -> None:
        super().__init__()
        plain = [eq.Picard(rtol=0.0, atol=0.0, max_steps=k) for k in steps]
        self.one = eq.nn.DEQ(Linear(first), solver=plain[0])
        self.two: nn.Module = eq.nn.DEQ(Linear(second), solver=plain[1])
        self.head = nn.Linear(64, 10).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.two(self.one(x.flatten(1))))
        return logits


def contraction(seed: int, norm: float) -> Array:
    drawn = np.random.default_rng(seed).standard_normal((64, 64))
    made: Array = norm * drawn / np.linalg.norm(drawn, 2)
    return made


def digits(count: int) -> tuple[ImageData, Array]:
    """Digits, and what a network is given of them."""
    data = eq.data.load("digits", "test", progress=False).subset(range(count))
    pixels = torch.as_tensor(data.images).numpy().reshape(count, 64) / 255.0
    return data, (pixels - data.mean[0]) / data.std[0]


def iterates(a: Array, x: Array, steps: int) -> Array:
    """z^[0] = 0 … z^[steps], [steps + 1, B, n]."""
    found = [np.zeros_like(x)]
    for _ in range(steps):
        found.append(found[-1] @ a.T + x)
    return np.stack(found)
