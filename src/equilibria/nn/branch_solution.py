"""The Solution of several branches: as bad as the worst of them, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.result import BackwardStats, Result, Solution, Stats
from equilibria.engine.tree import sample_norm

__all__ = ["BranchSolution", "combine"]

# From best to worst; a sample of the whole ends as its worst branch did.
_SEVERITY = (
    Result.converged,
    Result.max_steps,
    Result.stagnated,
    Result.diverged,
    Result.nonfinite,
)


@dataclass(frozen=True)
class BranchSolution(Solution[tuple[Tensor, ...]]):
    """``value`` is the tuple of states; ``parts`` are the Solutions of the branches.

    ``result`` is each sample's worst code; ``stats.steps`` and ``stats.relative`` are the largest,
    ``stats.residual`` is that of all states together, and evaluations and syncs are sums.
    """

    parts: tuple[Solution[Tensor], ...] = ()

    def detach(self) -> BranchSolution:
        parts = tuple(part.detach() for part in self.parts)
        return replace(self, value=tuple(part.value for part in parts), parts=parts)


class _BranchBackward(BackwardStats):
    """What the branches' backward solves did, read when asked: they are filled in later."""

    def __init__(self, parts: Sequence[BackwardStats]) -> None:
        object.__setattr__(self, "parts", tuple(parts))

    def __getattribute__(self, name: str) -> Any:
        if name not in _READ:
            return object.__getattribute__(self, name)
        found = [getattr(part, name) for part in object.__getattribute__(self, "parts")]
        return _READ[name](found)


def _masked(found: list[int]) -> int:
    """−1 where a branch does not know."""
    return -1 if min(found) < 0 else max(found)


def _largest(found: list[Tensor | None]) -> Tensor | None:
    known = [t for t in found if t is not None]
    return torch.stack(known).amax(0) if known else None


_READ: dict[str, Any] = {
    "solves": sum,
    "unconverged": sum,
    "masked": _masked,
    "steps": _largest,
    "residual": _largest,
}


def worst(codes: Sequence[Tensor]) -> Tensor:
    """The worst result code of each sample, [B], without waiting for the device."""
    stacked = torch.stack(list(codes))
    order = torch.zeros_like(stacked)
    for rank, code in enumerate(_SEVERITY):
        order = torch.where(stacked == int(code), rank, order)
    found: Tensor = stacked.gather(0, order.argmax(0, keepdim=True))[0]
    return found


def combine(parts: Sequence[Solution[Tensor]]) -> BranchSolution:
    """One Solution out of those of the branches, in their order."""
    stats = [part.stats for part in parts]
    backward: BackwardStats = BackwardStats()
    if not torch.compiler.is_compiling():
        backward = _BranchBackward([s.backward for s in stats])
    together = Stats(
        steps=torch.stack([s.steps for s in stats]).amax(0),
        residual=sample_norm([s.residual for s in stats]),
        relative=torch.stack([s.relative for s in stats]).amax(0),
        evaluations=sum(s.evaluations for s in stats),
        syncs=sum(s.syncs for s in stats),
        backward=backward,
    )
    choices = [f"{i}: {part.choice}" for i, part in enumerate(parts) if part.choice]
    return BranchSolution(
        value=tuple(part.value for part in parts),
        result=worst([part.result for part in parts]),
        stats=together,
        choice="; ".join(choices),
        parts=tuple(parts),
    )
