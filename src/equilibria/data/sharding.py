"""Which samples a process takes in an epoch, and in which batches.

The order σ of epoch k depends on (seed, k) alone. Rank r of W takes σ[r], σ[r + W], σ[r + 2W], …,
so step j of all ranks together covers σ[jBW : (j + 1)BW]: what one process with batches of BW sees.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from .counting import mix

__all__ = ["Shards"]


@dataclass(frozen=True)
class Shards:
    """Batches of ``batch_size`` from ``count`` samples for process ``rank`` of ``world``.

    Without ``drop_last`` every sample is taken exactly once by all ranks together. All ranks make
    the same number of batches, since a process with fewer would leave the others waiting.
    """

    count: int
    batch_size: int
    rank: int = 0
    world: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "world"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected an integer of at least 1.")
        if isinstance(self.rank, bool) or not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank!r}: expected 0 to {self.world - 1} (world − 1).")
        if self.drop_last and self.count < self.batch_size * self.world:
            raise ValueError(
                f"batch_size={self.batch_size}, world={self.world}, drop_last=True: {self.count} "
                "samples fill no batch; take a smaller batch_size, or drop_last=False."
            )
        if not self.drop_last and (
            self.count < self.world or (self.batch_size == 1 and self.count % self.world)
        ):
            raise ValueError(
                f"{self.count} samples cannot be shared by world={self.world} processes in batches "
                f"of {self.batch_size} so that all make as many; use drop_last=True."
            )

    @property
    def batches(self) -> int:
        """How many batches every rank makes in an epoch."""
        together = self.batch_size * self.world
        return self.count // together if self.drop_last else -(-self.count // together)

    def bounds(self) -> list[tuple[int, int]]:
        """(start, stop) of every batch within the samples of this rank."""
        size, number = self.batch_size, self.batches
        mine = number * size if self.drop_last else (self.count - self.rank - 1) // self.world + 1
        cuts = [min(k * size, mine) for k in range(number + 1)]
        if cuts[-1] == cuts[-2]:
            # Nothing is left for the last batch on this rank: share out the one before it.
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
