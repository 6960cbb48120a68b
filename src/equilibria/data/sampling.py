"""Which samples: orders and seeds from numbers alone, parts held out, shares of processes.

Numbers come from splitmix64 (Steele, Lea, Flood 2014, figure 16): the stream of a library's
generator may change with a version, and published splits rest on these.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.options import check_number

_WORD = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def as_index(index: Any, count: int) -> Tensor:
    """Positions in 0 … count − 1, long [n], from a slice, range, sequence, tensor or mask."""
    if not isinstance(index, slice):
        index = index.detach().cpu() if isinstance(index, Tensor) else torch.tensor(list(index))
        index = index.long() if index.numel() == 0 else index
    found = torch.arange(count)[index]
    if found.ndim != 1:
        raise IndexError(f"expected a one-dimensional index, got shape {tuple(index.shape)}.")
    return found


def mix(*numbers: int) -> int:
    """One integer of 63 bits for a sequence of integers; every one of them matters, in order."""
    state = 0
    for number in numbers:
        state = _finish((state ^ (number & _WORD)) + _GOLDEN)
    return state >> 1


def shuffled(count: int, seed: int) -> Tensor:
    """The numbers 0 … count − 1 in an order that depends on (count, seed) alone, long [count]."""
    start = _finish((seed & _WORD) + _GOLDEN)
    keys = [_finish(start + k * _GOLDEN) for k in range(1, count + 1)]
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    return torch.argsort(torch.tensor(signed, dtype=torch.int64), stable=True)


def _finish(z: int) -> int:
    z &= _WORD
    z = ((z ^ (z >> 30)) * _FIRST) & _WORD
    z = ((z ^ (z >> 27)) * _SECOND) & _WORD
    return z ^ (z >> 31)


def host_seed(generator: torch.Generator | None) -> int:
    """A seed drawn from ``generator`` without waiting for its device.

    The generator of a GPU is a counter whose seed and offset the host knows.
    """
    if generator is None or generator.device.type == "cpu":
        return int(torch.randint(0, 2**63 - 1, (), generator=generator))
    if generator.device.type != "cuda":
        device = generator.device
        return int(torch.randint(0, 2**31 - 1, (), generator=generator, device=device))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # offsets of CUDA generators are multiples of four
    return mix(generator.initial_seed(), offset)


def held_out(labels: Tensor | None, count: int, fraction: float, seed: int) -> Tensor:
    """A mask [count]: true for the samples held out, round(fraction · count) of them.

    With ``labels`` [count] each class gives its share, by largest remainder: a class of n gives
    ⌊fraction · n⌋ or ⌈fraction · n⌉. A class of two or more is on both sides, and a single sample
    of a class is not held out: with classes as small as that there are more or fewer in all.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"fraction={fraction!r}: expected a number between 0 and 1, such as 0.1.")
    if count < 2:
        raise ValueError(f"cannot split {count} sample(s) in two; at least two are needed.")
    order = shuffled(count, seed)
    if labels is None or int(torch.bincount(labels.cpu()).max()) < 2:
        labels = torch.zeros(count, dtype=torch.long)  # nothing to share by
    labels = labels.detach().cpu()
    mask = torch.zeros(count, dtype=torch.bool)
    for k, share in enumerate(_shares(torch.bincount(labels).tolist(), fraction)):
        mask[order[labels[order] == k][:share]] = True
    return mask


def few(labels: Tensor | None, count: int, samples: int, seed: int) -> Tensor:
    """A mask [count]: true for ``samples`` of them, of each class its share; if there are as many
    as classes, at least one of each class of two or more."""
    less = min(samples, count - samples)
    if less == 0:
        return torch.full((count,), samples > 0)
    part = held_out(labels, count, less / count, seed)
    kinds = torch.zeros(count, dtype=torch.long) if labels is None else labels.detach().cpu()
    order = shuffled(count, seed).flip(0)
    while gap := int(part.sum()) - less:  # held_out leaves each class on both sides
        side = part if gap > 0 else ~part
        largest = torch.bincount(kinds[side]).argmax()
        part[order[(side & (kinds == largest))[order]][0]] = gap < 0
    return part if less == samples else ~part


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


@dataclass(frozen=True)
class Shards:
    """Batches of ``batch_size`` from ``count`` samples for process ``rank`` of ``world``.

    The order σ of epoch k depends on (seed, k) alone. Rank r of W takes σ[r], σ[r + W], …, so step
    j of all ranks together covers σ[jBW : (j + 1)BW]: what one process with batches of BW sees.
    Without ``drop_last`` every sample is taken exactly once. All ranks make as many batches, since
    a process with fewer would keep the others waiting.
    """

    count: int
    batch_size: int
    rank: int = 0
    world: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "world"):
            check_number(self, name, low=1, integer=True)
        check_number(self, "rank", low=0, high=self.world - 1, integer=True)
        if self.drop_last and self.count < self.batch_size * self.world:
            raise ValueError(
                f"batch_size={self.batch_size}, world={self.world}, drop_last=True: {self.count} "
                "samples fill no batch; take a smaller batch_size, or drop_last=False."
            )
        uneven = self.count < self.world or (self.batch_size == 1 and self.count % self.world)
        if uneven and not self.drop_last:
            raise ValueError(
                f"{self.count} samples cannot be shared by world={self.world} processes in batches "
                f"of {self.batch_size} so that all make as many; use drop_last=True."
            )

    @property
    def batches(self) -> int:
        together = self.batch_size * self.world
        return self.count // together if self.drop_last else -(-self.count // together)

    def bounds(self) -> list[tuple[int, int]]:
        """(start, stop) of every batch within the samples of this rank."""
        size, number = self.batch_size, self.batches
        mine = number * size if self.drop_last else (self.count - self.rank - 1) // self.world + 1
        cuts = [min(k * size, mine) for k in range(number + 1)]
        if cuts[-1] == cuts[-2]:
            # Nothing is left for the last batch on this rank: it takes half of the one before it.
            cuts[-2] -= size // 2
        return list(itertools.pairwise(cuts))

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """The samples of this rank in the order of the epoch, long, on the CPU."""
        if shuffle:
            generator = torch.Generator().manual_seed(mix(seed, epoch))
            order = torch.randperm(self.count, generator=generator)
        else:
            order = torch.arange(self.count)
        if self.drop_last:
            order = order[: self.batches * self.batch_size * self.world]
        return order[self.rank :: self.world].contiguous()
