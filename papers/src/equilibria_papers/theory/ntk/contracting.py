"""K = J Jᵀ group by group, from rows that are computed chunk by chunk and never all kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .outputs import Outputs
from .planning import Plan
from .rows import Rows

__all__ = ["Tell", "contract", "work_type"]

Tell = Callable[[int, int], None]
"""(samples differentiated, of how many)."""
_Chunk = tuple[slice, dict[str, Tensor]]


def work_type(dtype: torch.dtype) -> torch.dtype:
    """Half precision is widened: small eigenvalues are differences of large numbers."""
    return torch.promote_types(dtype, torch.float32)


def contract(
    rows: Rows,
    x: Tensor,
    x2: Tensor | None,
    groups: Mapping[str, Sequence[str]],
    outputs: Outputs,
    plan: Plan,
    dtype: torch.dtype,
    tell: Tell | None,
) -> dict[str, Tensor]:
    """Group → its kernel [N·k, M·k], entry (i·k + a, j·k + b) for outputs a of x_i, b of x2_j."""
    n, m, k = len(x), len(x if x2 is None else x2), outputs.width
    kernels = {
        g: torch.zeros(n * k, m * k, dtype=work_type(dtype), device=x.device) for g in groups
    }
    bar = _Bar(tell, _count(n, None if x2 is None else m, plan))
    for names in plan.passes:
        parts = {g: [q for q in group if q in set(names)] for g, group in groups.items()}
        parts = {g: group for g, group in parts.items() if group}

        def chunks(
            data: Tensor, first: int, parts: dict[str, list[str]] = parts
        ) -> Iterator[_Chunk]:
            for start in range(first, len(data), plan.chunk):
                batch = data[start : start + plan.chunk]
                yield (
                    slice(start * k, (start + len(batch)) * k),
                    _matrices(rows, batch, parts, outputs),
                )
                bar.add(len(batch))

        step = plan.chunk * plan.resident
        for first in range(0, n, step):
            if x2 is None:
                _own(kernels, chunks(x, first), plan.resident)
            else:
                _cross(kernels, chunks(x[: first + step], first), chunks(x2, 0))
    return kernels


def _own(kernels: Mapping[str, Tensor], chunks: Iterator[_Chunk], resident: int) -> None:
    """Keep the first chunks and meet each with all later ones; both halves of the kernel."""
    kept: list[_Chunk] = []
    for where, found in chunks:
        if len(kept) < resident:
            kept.append((where, found))
        for place, other in kept:
            for g, matrix in found.items():
                block = matrix @ other[g].mT
                if place == where:  # symmetric to the last digit, which the product need not be
                    block = (block + block.mT) / 2
                else:
                    kernels[g][place, where] += block.mT
                kernels[g][where, place] += block


def _cross(kernels: Mapping[str, Tensor], left: Iterator[_Chunk], right: Iterator[_Chunk]) -> None:
    kept = list(left)
    for where, found in right:
        for place, other in kept:
            for g, matrix in found.items():
                kernels[g][place, where] += other[g] @ matrix.mT


def _matrices(
    rows: Rows, x: Tensor, groups: Mapping[str, Sequence[str]], outputs: Outputs
) -> dict[str, Tensor]:
    """Group → [c·k, entries]; with the trace [c, K·entries], whose products sum over outputs."""
    found = rows(x, [name for group in groups.values() for name in group])
    made = {}
    for g, names in groups.items():
        joined = torch.cat([found.pop(name) for name in names], dim=2)
        flat = joined.flatten(1) if outputs.traced else joined.flatten(0, 1)
        made[g] = flat.to(work_type(flat.dtype)).detach()
    return made


def _count(n: int, m: int | None, plan: Plan) -> int:
    """How many samples are differentiated in all."""
    step = plan.chunk * plan.resident
    starts = range(0, n, step)
    if m is None:
        each = sum(n - first for first in starts)
    else:
        each = n + m * len(starts)
    return each * len(plan.passes)


class _Bar:
    def __init__(self, tell: Tell | None, total: int) -> None:
        self.tell, self.total, self.done = tell, total, 0

    def add(self, count: int) -> None:
        self.done += count
        if self.tell is not None:
            self.tell(self.done, self.total)
