"""A model over a data set: checked against each other, in eval mode, batch by batch, with a bar."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from operator import sub
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.data.image_data import ImageData
from equilibria.engine.result import ConvergenceWarning


def check_whole(name: str, value: object, low: int) -> int:
    """An integer of at least ``low``, or an error that names the argument."""
    wanted = f"{name}={value!r}: expected an integer of at least {low}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(wanted)
    if value < low:
        raise ValueError(wanted)
    return value


def model_name(model: nn.Module) -> str:
    """The name that it was created by, or its class."""
    return str(getattr(getattr(model, "config", None), "name", type(model).__name__))


def device_of(model: nn.Module) -> torch.device:
    held = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if held is None else held.device


def on_device(model: nn.Module, device: torch.device | str | None) -> nn.Module:
    """The model itself, or a copy where it lives on another device: the given one never moves."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model (torch.nn.Module), got {type(model).__name__}.")
    if device is None:
        return model
    wanted, here = torch.device(device), device_of(model)
    same = wanted.type == here.type and wanted.index in (None, here.index)
    return model if same else copy.deepcopy(model).to(wanted)


@contextmanager
def evaluating(model: nn.Module, *, warn: bool = False) -> Iterator[nn.Module]:
    """``model`` in eval mode inside the block; afterwards every module is in its own mode again.

    ``warn``: whether solves that do not converge warn; else the statistics count them.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with warnings.catch_warnings():
            if not warn:
                warnings.simplefilter("ignore", ConvergenceWarning)
            yield model
    finally:
        for module, mode in modes:
            module.training = mode


def model_input(model: nn.Module, dataset: ImageData, images: Tensor) -> Tensor:
    """uint8 images normalized as the data say, in the dtype of the model."""
    x = dataset.normalize(images)
    dtypes = (held.dtype for held in model.parameters() if held.is_floating_point())
    return x.to(next(dtypes, x.dtype))


def steps_in(dataset: ImageData, batch_size: int) -> int:
    return -(-len(dataset) // check_whole("batch_size", batch_size, 1))


def batches(
    dataset: ImageData, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """(uint8 images [B, C, H, W], targets) in order, on the device."""
    check_whole("batch_size", batch_size, 1)
    for start in range(0, len(dataset), batch_size):
        rows = slice(start, min(start + batch_size, len(dataset)))
        yield dataset.images[rows].to(device), dataset.targets[rows].to(device)


def check_pair(model: nn.Module, dataset: ImageData, *, task: str | None = None) -> list[str]:
    """Raise where the model cannot be judged on these data; what is odd comes back as notes."""
    if not isinstance(dataset, ImageData):
        raise TypeError(
            f"expected data from equilibria.data.load(...), got {type(dataset).__name__}."
        )
    where = f"{dataset.name} ({dataset.split_name})"
    if task is not None and dataset.task != task:
        raise ValueError(f"{where} is a data set for {dataset.task}; this takes {task}.")
    config, name = getattr(model, "config", None), model_name(model)
    channels = getattr(config, "in_channels", None)
    if channels is not None and channels != dataset.channels:
        words = {1: "1 channel (gray)", 3: "3 channels (RGB)"}
        takes, has = (words.get(n, f"{n} channels") for n in (channels, dataset.channels))
        raise ValueError(
            f"{name} takes images of {takes}, and {where} has {has}: convert the images, or "
            f"train a model with in_channels={dataset.channels}."
        )
    known = getattr(config, "num_classes", None)
    if known not in (None, len(dataset.classes)):
        raise ValueError(_class_mismatch(name, known, dataset))
    # What was saved with the weights against what the data say.
    extra: Any = getattr(model, "extra", None) or {}
    notes: list[str] = []
    names = extra.get("classes")
    if names and list(names) != list(dataset.classes):
        notes.append(
            "the model's class names differ from the data's (first: "
            f"{names[0]!r}, {dataset.classes[0]!r}): is the order the same?"
        )
    for key, mine in (("mean", dataset.mean), ("std", dataset.std)):
        theirs = tuple(extra.get(key) or mine)
        if len(theirs) != len(mine) or max(map(abs, map(sub, theirs, mine))) > 1e-3:
            trained, used = (", ".join(f"{n:.4g}" for n in numbers) for numbers in (theirs, mine))
            notes.append(
                f"the model was trained with {key}=({trained}), the data are normalized by "
                f"({used}): dataset.with_normalization_of(model.extra) takes the model's"
            )
    return notes


def _class_mismatch(name: str, known: int, dataset: ImageData) -> str:
    wanted = len(dataset.classes)
    return (
        f"{name} tells {known} classes apart and {dataset.name} ({dataset.split_name}) asks for "
        f"{wanted}: take the data set that it was trained on, or a model with num_classes={wanted}."
    )


def check_logits(logits: Any, dataset: ImageData, name: str) -> Tensor:
    """Raise unless these are logits [B, K] (or [B, K, H, W]) for this task."""
    where = f"{dataset.name} ({dataset.split_name})"
    if not isinstance(logits, Tensor):
        raise TypeError(f"{name} returned {type(logits).__name__}; expected a tensor of logits.")
    dims, shape = (2, "[B, K]") if dataset.task == "classification" else (4, "[B, K, H, W]")
    if logits.ndim != dims:
        raise ValueError(
            f"{name} returned a tensor of shape {tuple(logits.shape)}; {dataset.task} on {where} "
            f"takes logits {shape}."
        )
    if logits.shape[1] != len(dataset.classes):
        raise ValueError(_class_mismatch(name, logits.shape[1], dataset))
    return logits
