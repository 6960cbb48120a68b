"""A network of a few thousand numbers and a few hundred digits: a step takes milliseconds."""

from __future__ import annotations

import functools
import math
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.data import ImageData
from equilibria.training import TrainConfig, TrainResult, fit


class Tiny(nn.Module):
    """64 pixels → batch norm → GEQ with a bounded W → logits."""

    def __init__(self, classes: int = 10, width: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.geq = eq.nn.GEQ(
            width,
            width,
            in_channels=64,
            hidden=None,
            constraint=eq.nn.NormBounded(bound=0.9),
            solver=eq.Picard(rtol=0.0, atol=0.0, max_steps=3, damping=0.8),
            adjoint=eq.Phantom(steps=2, damping=0.8),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.geq(self.norm(x.flatten(1)))))
        return logits


class Pixels(nn.Module):
    """A segmentation network: two convolutions, logits for every pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.first(x).relu())
        return logits


@functools.cache
def digits(train: int = 192, valid: int = 64) -> tuple[ImageData, ImageData]:
    whole = eq.data.load("digits", progress=False)
    return whole.subset(range(train)), whole.subset(range(train, train + valid))


@functools.cache
def masks(count: int = 64) -> ImageData:
    """Digits whose pixels are dark (0), gray (1) or bright (2); the outer frame does not count."""
    whole = eq.data.load("digits", progress=False).subset(range(count))
    assert isinstance(whole.images, Tensor)
    targets = torch.bucketize(whole.images[:, 0].long(), torch.tensor([80, 170]))
    targets[:, 0] = targets[:, -1] = 255
    return ImageData(
        images=whole.images,
        targets=targets,
        classes=("dark", "gray", "bright"),
        name="masks",
        split_name="train",
        mean=whole.mean,
        std=whole.std,
        task="segmentation",
        ignore_index=255,
    )


class Losses(pl.Callback):
    """Notes the loss of every step, as it is."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.values.append(outputs["loss"].item())


class RaiseAt(pl.Callback):
    """Raises after a number of steps."""

    def __init__(self, step: int, error: BaseException, hook: str = "on_train_batch_end") -> None:
        self.step, self.error, self.hook, self.seen = step, error, hook, 0

    def _count(self, hook: str) -> None:
        if hook == self.hook:
            self.seen += 1
            if self.seen == self.step:
                raise self.error

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._count("on_train_batch_end")

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._count("on_before_optimizer_step")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._count("on_validation_batch_end")


class SignalAt(RaiseAt):
    """A signal, as the terminal sends it for Ctrl-C, at the end of a step."""

    def __init__(
        self,
        step: int,
        times: int = 1,
        number: int = signal.SIGINT,
        hook: str = "on_train_batch_end",
    ) -> None:
        super().__init__(step, KeyboardInterrupt(), hook)
        self.times, self.number = times, number

    def _count(self, hook: str) -> None:
        if hook == self.hook:
            self.seen += 1
            if self.seen == self.step:
                for _ in range(self.times):
                    signal.raise_signal(self.number)


def config(out: Path, **options: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "model": "tiny",
        "epochs": 3,
        "batch_size": 32,
        "lr": 0.1,
        "log_every": 4,
        "out": str(out),
        "accelerator": "cpu",
    }
    return TrainConfig(**{**given, **options})


def run(settings: TrainConfig, *, seed: int = 0, dropout: float = 0.0, **more: Any) -> TrainResult:
    """Fit the tiny network, built from a seed of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Tiny(dropout=dropout)
    return fit(settings, data=digits(), progress=False, model=model, **more)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """History without what a clock measured."""
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in rows
    ]


def same_rows(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Equal to the last bit, NaN included."""

    def same(x: Any, y: Any) -> bool:
        return bool(x == y) or (isinstance(x, float) and math.isnan(x) and math.isnan(y))

    return len(a) == len(b) and all(
        p.keys() == q.keys() and all(same(p[k], q[k]) for k in p)
        for p, q in zip(timeless(a), timeless(b), strict=True)
    )


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
