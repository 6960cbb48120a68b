"""What a run is made of: the images, the held-out part, the model; and its weights on disk."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria import data as room
from equilibria import models
from equilibria._version import __version__
from equilibria.data import ImageData
from equilibria.data.splitting import held_out
from equilibria.models.quantized import FIELD

from .config import TrainConfig
from .storing import SaveError, write_bytes

__all__ = ["Prepared", "prepare", "read_weights", "save_weights"]

_DTYPES = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}


@dataclass(frozen=True)
class Prepared:
    """Data and model of a run."""

    train: ImageData
    valid: ImageData | None
    model: nn.Module
    sharded: nn.Module | None
    """A copy that stays whole where the strategy cuts the model in pieces."""
    kept: Tensor | None = None
    """Where the training images stand in the data before a part was held out, long [N]."""

    def rows(self, indices: Sequence[int]) -> list[int]:
        """Training images by their place in the data as it was loaded."""
        return [int(k if self.kept is None else self.kept[k]) for k in indices]

    def plain_model(self) -> nn.Module:
        """The model to give away: whole, on the CPU."""
        return (self.model if self.sharded is None else self.sharded).cpu()

    def describe_model(self) -> dict[str, Any]:
        config = getattr(self.model, "config", None)
        if isinstance(config, models.ModelConfig):
            return config.to_dict()
        return {"name": type(self.model).__name__}

    def describe_data(self) -> dict[str, Any]:
        return {
            "name": self.train.name,
            "train": len(self.train),
            "validation": 0 if self.valid is None else len(self.valid),
            "classes": self.train.num_classes,
        }


def prepare(
    config: TrainConfig,
    data: tuple[ImageData, ImageData | None] | None,
    model: nn.Module | None,
    *,
    progress: bool,
) -> Prepared:
    """Load and split the data, build the model; what is given is checked instead."""
    kept: Tensor | None = None
    if data is None:
        train, valid, kept = _load(config, progress)
    else:
        train, valid = _check_data(data)
    if valid is None and (config.early_stop is not None or config.select == "best"):
        raise ValueError(
            "early_stop and select='best' compare validation results, and there is no validation "
            "data: give data=(training, validation)."
        )
    if model is None:
        model = _create(config, train)
    elif not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if config.precision in _DTYPES:
        # Before a checkpoint is read: Lightning converts after it, and float64 would be rounded.
        model = model.to(_DTYPES[config.precision])
    sharded = copy.deepcopy(model) if config.strategy == "fsdp" else None
    return Prepared(train, valid, model, sharded, kept)


def _load(config: TrainConfig, progress: bool) -> tuple[ImageData, ImageData | None, Tensor | None]:
    whole = room.load(
        config.data,
        "train",
        root=None if config.data_root is None else Path(config.data_root),
        download=config.download,
        image_size=config.image_size,
        on_corrupt=config.on_corrupt,  # type: ignore[arg-type]
        progress=progress,
    )
    train, valid, kept = whole, None, None
    if config.validation > 0.0:
        train, valid = whole.split(config.validation, config.seed)
        mask = held_out(_labels(whole), len(whole), config.validation, config.seed)
        kept = (~mask).nonzero().flatten()
    if config.samples is not None:
        chosen = few(train, config.samples, config.seed)
        train = train.subset(chosen)
        kept = chosen.nonzero().flatten() if kept is None else kept[chosen]
    return train, valid, kept


def _labels(images: ImageData) -> Tensor | None:
    labels = images.targets if images.task == "classification" else None
    return labels if isinstance(labels, Tensor) else None


def few(images: ImageData, samples: int, seed: int) -> Tensor:
    """[N] bool: ``samples`` of them, of each class its share, drawn by the seed.

    Every class has one in and, where one is left out, one out: tiny numbers come out larger, and
    such as are nearly all smaller.
    """
    count = len(images)
    if samples > count:
        raise ValueError(
            f"samples={samples}: {images.name} has {count} training images; give at most as many, "
            "or leave samples out for all of them."
        )
    if samples == count:
        return torch.ones(count, dtype=torch.bool)
    if 2 * samples <= count:
        return held_out(_labels(images), count, samples / count, seed)
    return ~held_out(_labels(images), count, (count - samples) / count, seed)


def _check_data(data: Any) -> tuple[ImageData, ImageData | None]:
    if not isinstance(data, tuple) or len(data) != 2 or not isinstance(data[0], ImageData):
        raise TypeError(
            "data must be (training, validation), two ImageData (the second may be None), got "
            f"{type(data).__name__}."
        )
    train, valid = data
    if valid is None:
        return train, None
    if not isinstance(valid, ImageData):
        raise TypeError(f"the validation data must be ImageData, got {type(valid).__name__}.")
    for name in ("classes", "task", "ignore_index"):
        mine, other = getattr(train, name), getattr(valid, name)
        if mine != other:
            raise ValueError(
                f"training and validation data differ in {name}: {mine!r} and {other!r}."
            )
    if (train.mean, train.std) != (valid.mean, valid.std):
        # One network sees one normalization: that of the images that it is trained on.
        valid = valid.with_normalization(train.mean, train.std)
    return train, valid


def _create(config: TrainConfig, train: ImageData) -> nn.Module:
    card = models.describe(config.model)
    if card.task != train.task:
        raise ValueError(
            f"{config.model} is a network for {card.task}, and {train.name} is data for "
            f"{train.task}; models.names(task={train.task!r}) lists what fits."
        )
    height, width = train.images.shape[2:]
    return models.create(
        config.model,
        train.num_classes,
        in_channels=train.channels,
        image_size=int(height) if height == width else None,
        **config.model_options,
    )


def save_weights(
    made: Prepared, path: Path, config: TrainConfig, metrics: Mapping[str, Any]
) -> None:
    """model.safetensors: the weights, what the model is, and what one needs to use it."""
    train = made.train
    extra = {
        "classes": list(train.classes),
        "mean": list(train.mean),
        "std": list(train.std),
        "task": train.task,
        "ignore_index": train.ignore_index,
        "image_size": [int(n) for n in train.images.shape[2:]],
        "data": train.name,
        # None where the held-out images were given and not split off.
        "validation": None if made.kept is None else config.validation,
        "split_seed": None if made.kept is None else config.seed,
        "metrics": {k: v for k, v in metrics.items() if isinstance(v, (int, float))},
    }
    model = made.model if made.sharded is None else made.sharded
    try:
        if isinstance(getattr(model, "config", None), models.ModelConfig):
            models.save(model, path, extra=extra)
        else:
            _save_plain(model, path, extra)
    except SaveError:
        raise
    except OSError as error:
        raise SaveError(
            error.errno,
            f"could not write {path}: {error.strerror or error}. The checkpoint beside it is "
            f"complete: free some space and resume from {path.parent}",
        ) from error


def _save_plain(model: nn.Module, path: Path, extra: Mapping[str, Any]) -> None:
    """A module of the user's own: the tensors, without a configuration to build it from."""
    import safetensors.torch

    tensors = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in model.state_dict().items()
    }
    metadata = {"library": __version__, "extra": json.dumps(dict(extra))}
    write_bytes(path, safetensors.torch.save(tensors, metadata))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, on the CPU; weights in eight bits come in float32."""
    import safetensors.torch

    with safetensors.safe_open(path, framework="pt") as file:
        quantized = FIELD in (file.metadata() or {})
    if quantized:
        return models.load(path).state_dict()
    found: dict[str, Tensor] = safetensors.torch.load_file(path, device="cpu")
    return found
