"""Times of a network on this machine: training steps a second, and Table 8's two times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine import ConvergenceWarning

from .scene import Scene

__all__ = ["throughput", "times"]

_BATCHES, _BATCH = 80, 125  # OptEq §7.4: "the total time for 80 iteration steps", batches of 125
_WARM, _TIMED = 3, 10


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    _wait(device)
    began = time.perf_counter()
    done = work()
    _wait(device)
    return time.perf_counter() - began, done


def _autocast(scene: Scene) -> Any:
    """The precision of the training; mixed ones only, for the weights are float32."""
    kinds = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    kind = kinds.get(scene.precision)
    return nullcontext() if kind is None else torch.autocast(scene.device.type, dtype=kind)


@contextmanager
def _training_copy(model: nn.Module) -> Iterator[nn.Module]:
    """A copy in training mode: running statistics and weights of the measured one stay."""
    import copy
    import warnings

    made = copy.deepcopy(model).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield made


def _batch(scene: Scene, size: int) -> tuple[Tensor, Tensor]:
    """``size`` training images, normalized, on the device; small sets are repeated."""
    index = torch.arange(size) % len(scene.train)
    images, targets = scene.train.images[index], scene.train.targets[index]
    return scene.train.normalize(images.to(scene.device)), targets.to(scene.device)


def times(scene: Scene) -> dict[str, float]:
    """OptEq Table 8: seconds of 80 forward passes and of 80 backward passes, batches of 125.

    Measured with the graph of training. A smoke test runs two batches and scales.
    """
    count, size = (2, 16) if scene.smoke else (_BATCHES, _BATCH)
    x, y = _batch(scene, size)
    forward = backward = 0.0
    with _training_copy(scene.model) as model, _autocast(scene):
        for number in range(count + 1):
            spent, logits = _seconds(scene.device, lambda: model(x))
            loss = nn.functional.cross_entropy(logits, y)
            back, _ = _seconds(scene.device, loss.backward)
            model.zero_grad(set_to_none=True)
            if number:  # the first one warms up
                forward, backward = forward + spent, backward + back
    scale = _BATCHES * _BATCH / (count * size)
    return {"seconds.forward": scale * forward, "seconds.backward": scale * backward}


def throughput(scene: Scene) -> dict[str, float]:
    """OptEq Table 9: training images a second, a step being forward, backward and SGD's."""
    size, timed = (8, 2) if scene.smoke else (scene.train_batch, _TIMED)
    x, y = _batch(scene, size)
    with _training_copy(scene.model) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with _autocast(scene):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        for _ in range(_WARM if not scene.smoke else 1):
            step()

        def steps() -> None:
            for _ in range(timed):
                step()

        spent, _ = _seconds(scene.device, steps)
    count = sum(p.numel() for p in scene.model.parameters())
    return {"images_per_second": size * timed / spent, "parameters_m": count / 1e6}
