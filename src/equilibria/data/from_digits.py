"""scikit-learn's handwritten digits: inside the package, so they need no download."""

from __future__ import annotations

import torch

from .cards import describe, resolve_split
from .encoded import Found
from .errors import missing_extra
from .splitting import held_out

__all__ = ["read_digits"]


def read_digits(asked: str) -> Found:
    """1,797 images 8×8; a fifth of each class, chosen once and for all, is the test split.

    The values 0 … 16 become round(255 v / 16), which loses nothing.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise missing_extra("scikit-learn", "The data set digits") from error
    card = describe("digits")
    split = resolve_split(asked, card.splits, card.name)
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    targets = torch.from_numpy(bunch.target).long()
    test = held_out(targets, len(targets), 0.2, seed=0)
    chosen = test if split == "test" else ~test
    return Found(
        images=images[chosen], targets=targets[chosen], classes=card.classes, split=split, files=()
    )
