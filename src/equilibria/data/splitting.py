"""Which samples to hold out: of each class its share, chosen by (count, seed) alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .counting import shuffled

__all__ = ["held_out"]


def held_out(labels: Tensor | None, count: int, fraction: float, seed: int) -> Tensor:
    """A mask [count]: true for the samples held out, round(fraction · count) of them.

    With ``labels`` [count] each class gives its share, by largest remainder: a class of n gives
    ⌊fraction · n⌋ or ⌈fraction · n⌉. A class of two or more is on both sides; a single sample of a
    class is not held out.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"fraction={fraction!r}: expected a number between 0 and 1, such as 0.1.")
    if count < 2:
        raise ValueError(f"cannot split {count} sample(s) in two; at least two are needed.")
    order = shuffled(count, seed)
    if labels is None or int(torch.bincount(labels.cpu()).max()) < 2:
        labels = torch.zeros(count, dtype=torch.long)  # nothing to share by
    labels = labels.detach().cpu()
    sizes = torch.bincount(labels)
    taken = torch.tensor(_shares(sizes.tolist(), fraction))
    # The rank of each sample among those of its class, in the shuffled order.
    by_class = order[torch.argsort(labels[order], stable=True)]
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    rank = torch.arange(count) - starts
    mask = torch.zeros(count, dtype=torch.bool)
    mask[by_class[rank < torch.repeat_interleave(taken, sizes)]] = True
    return mask


def _shares(sizes: list[int], fraction: float) -> list[int]:
    wanted = max(1, round(fraction * sum(sizes)))
    exact = [size * fraction for size in sizes]
    shares = [math.floor(e) for e in exact]
    ranked = sorted(range(len(sizes)), key=lambda k: (shares[k] - exact[k], k))
    for k in ranked[: max(0, wanted - sum(shares))]:
        shares[k] += 1
    return [
        min(max(share, 1), size - 1) if size > 1 else 0
        for share, size in zip(shares, sizes, strict=True)
    ]
