"""How a kernel is computed within a budget of bytes: which samples and parameters at a time.

Rows of the Jacobian are computed ``chunk`` samples at a time. The rows of as many chunks as fit
stay in memory, and those of all later samples pass by them; then the next chunks stay. So samples
are differentiated once where all rows fit, and about N/(2·resident) times where they do not.
Parameters are split into passes only where the rows of a single sample are too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Plan", "make_plan", "readable"]

_COPIES = 3
"""A fresh chunk exists as gradients, inside autograd, and as the matrix made of them."""
_ROWS = 64
"""Gradients at a time where nothing else limits them: enough to fill the vector units."""


@dataclass(frozen=True)
class Plan:
    """What is held at a time."""

    chunk: int
    """Samples that are differentiated at once."""
    resident: int
    """Chunks whose rows are kept."""
    passes: tuple[tuple[str, ...], ...]
    """Names of the parameters of each pass."""


def readable(count: int) -> str:
    """A number of bytes in words."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def make_plan(
    sizes: Mapping[str, int],
    *,
    samples: int,
    outputs: int,
    itemsize: int,
    memory: int,
    held: int,
    batch_size: int | None,
) -> Plan:
    """Split the work so that rows and kernels take at most ``memory`` bytes.

    Args:
        sizes: entries of each parameter.
        samples: N of the side whose rows are kept.
        outputs: gradients a sample.
        itemsize: bytes of a number.
        memory: the budget.
        held: bytes that are needed all the time (the kernels, or the projected rows).
        batch_size: samples to differentiate at once; None decides.
    """
    room = memory - held
    least = outputs * itemsize * max(sizes.values())
    if room < (_COPIES + 1) * least:
        largest = max(sizes, key=lambda n: sizes[n])
        raise MemoryError(
            f"memory={readable(memory)} is too little: {readable(held)} for the kernel and "
            f"{readable((_COPIES + 1) * least)} for gradients of {outputs} output(s) in "
            f"{largest!r}. Give more memory, fewer samples or outputs ('trace', 'sum', an index), "
            "or a projection."
        )
    passes = _split(sizes, room // ((_COPIES + 1) * outputs * itemsize))
    row = outputs * itemsize * max(sum(sizes[n] for n in names) for names in passes)
    wanted = max(1, _ROWS // outputs) if batch_size is None else batch_size
    chunk = max(1, min(wanted, samples, room // ((_COPIES + 1) * row)))
    resident = max(1, room // (chunk * row) - _COPIES)
    return Plan(chunk, resident, passes)


def _split(sizes: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], ...]:
    """Names in their order, cut so that no part has more than ``limit`` entries."""
    passes: list[list[str]] = []
    count = 0
    for name, size in sizes.items():
        if not passes or count + size > limit:
            passes.append([])
            count = 0
        passes[-1].append(name)
        count += size
    return tuple(tuple(names) for names in passes)
