"""A network of a few thousand numbers and a few hundred digits: a step takes milliseconds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import LambdaCallback
from safetensors.torch import load_file
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
    targets = torch.bucketize(torch.as_tensor(whole.images)[:, 0].long(), torch.tensor([80, 170]))
    targets[:, 0] = targets[:, -1] = 255
    names: Any = {"name": "masks", "classes": ("dark", "gray", "bright"), "task": "segmentation"}
    return dataclasses.replace(whole, targets=targets, ignore_index=255, **names)


class Losses(pl.Callback):
    """Notes the loss of every step, as it is."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.values.append(outputs["loss"].item())

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        torch.rand(())  # as a network may that draws numbers when it answers


STEP_END = "on_train_batch_end"


class At(LambdaCallback):
    """Calls ``act`` at the call number ``count`` of a hook."""

    def __init__(self, count: int, act: Callable[[], Any], hook: str = STEP_END) -> None:
        calls = itertools.count(1)
        super().__init__(**{hook: lambda *_, **__: act() if next(calls) == count else None})


class RaiseAt(At):
    """Raises, as a second Ctrl-C does."""

    def __init__(
        self, count: int, error: BaseException | None = None, hook: str = STEP_END
    ) -> None:
        def act() -> None:
            raise error or KeyboardInterrupt

        super().__init__(count, act, hook)


class SignalAt(At):
    """A signal, as the terminal sends it for Ctrl-C."""

    def __init__(
        self, count: int, times: int = 1, number: int = signal.SIGINT, hook: str = STEP_END
    ) -> None:
        super().__init__(count, lambda: [signal.raise_signal(number) for _ in range(times)], hook)


def config(out: Path, **options: Any) -> TrainConfig:
    given: dict[str, Any] = {"model": "tiny", "epochs": 3, "batch_size": 32, "lr": 0.1}
    given |= {"log_every": 4, "out": str(out), "accelerator": "cpu", "loggers": []}
    return TrainConfig(**{**given, **options})


def run(settings: TrainConfig, *, dropout: float = 0.0, **more: Any) -> TrainResult:
    """Fit the tiny network, built from a seed of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tiny(dropout=dropout)
    return fit(settings, **{"data": digits(), "progress": False, "model": model, **more})


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """History without what a clock measured."""
    clock = ("seconds", "images_per_second")
    return [{k: v for k, v in row.items() if k not in clock} for row in rows]


def assert_same_run(found: TrainResult, expected: TrainResult) -> None:
    """History, final weights and the kept weights, bit for bit."""
    np.testing.assert_equal(timeless(found.history), timeless(expected.history))
    assert found.metrics == expected.metrics
    assert same_weights(found.model, expected.model)
    assert same_state(load_file(found.weights), load_file(expected.weights))
    kept, wanted = (sorted((r.folder / "epochs").glob("*")) for r in (found, expected))
    assert [p.name for p in kept] == [p.name for p in wanted]
    assert all(same_state(load_file(a), load_file(b)) for a, b in zip(kept, wanted, strict=True))


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return same_state(a.state_dict(), b.state_dict())


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


def accuracy(model: nn.Module, data: ImageData) -> float:
    x, y = next(iter(eq.data.Batches(data, len(data))))
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())
