"""What a measure looks at: a network, the images that it is judged on, and a folder to draw in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from equilibria.data import ImageData

__all__ = ["Scene"]


@dataclass(frozen=True, eq=False)
class Scene:
    """The model is in eval mode, on the device."""

    model: nn.Module
    train: ImageData
    test: ImageData
    folder: Path
    device: torch.device
    batch_size: int
    """Images at a time, of the test."""
    train_batch: int
    """Images of a training step."""
    precision: str
    """Of the training, in Lightning's words."""
    seed: int
    progress: bool
    smoke: bool
    held_out: ImageData | None = None
    """What choices may look at."""
    epochs: int = 0
    """Of the whole training."""
