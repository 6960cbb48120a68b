"""Random projections: K̂ = (JS)(JS)ᵀ with E[SSᵀ] = I, so E[K̂] = K; rows of r numbers, not of P.

    Var K̂_ij ≤ (K_ii K_jj + K_ij²)/r        for both kinds

sparse     S has one ±1 in each row (CountSketch): the gradient's entries fall into r buckets with
           random signs. One pass over the samples; costs a gradient each, whatever r.
gaussian   S has entries N(0, 1/r), the bound is an equality: a column of JS is a derivative along a
           random direction (torch.func.jvp), of all samples and outputs at once. r forward passes
           and no gradient of a single sample: cheap where r is less than the number of outputs·N.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from equilibria.engine import check_number, options

from .rows import Outputs, Plan, Rows, Tell, functional, work_type

_SEEDS = 1 << 62
_TOGETHER = 32
"""Directions that are pushed forward at once."""
_COPIES = 4
"""Directions are drawn, stacked, moved and pushed: so many times their size at once."""


@options
class Projection:
    """Replace the P entries of a gradient by ``size`` random combinations of them."""

    size: int = 1024
    """r; the error falls as 1/√r."""
    kind: Literal["sparse", "gaussian"] = "sparse"
    seed: int = 0
    """Two kernels of one seed are projected alike, so that their difference is a projection too."""

    def __post_init__(self) -> None:
        check_number(self, "size", low=1, high=2**31 - 1, integer=True)
        check_number(self, "seed", low=0, integer=True)
        if self.kind not in ("sparse", "gaussian"):
            raise ValueError(f"Projection(kind={self.kind!r}): expected 'sparse' or 'gaussian'.")


def _generator(seed: int, *words: object) -> torch.Generator:
    """A stream of its own for each seed, parameter and column; the same on every device."""
    mixed = zlib.crc32("\0".join(map(str, words)).encode())
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + mixed) % _SEEDS)


def sparse_features(
    rows: Rows,
    x: Tensor,
    groups: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    outputs: Outputs,
    plan: Plan,
    projection: Projection,
    dtype: torch.dtype,
    tell: Tell | None,
) -> dict[str, Tensor]:
    """Group → JS, [N, pulled, r]."""
    made = _empty(x, groups, outputs, projection, dtype)
    group_of = {name: g for g, names in groups.items() for name in names}
    done, total = 0, len(x) * len(plan.passes)
    for names in plan.passes:
        tables = {q: _buckets(q, sizes[q], projection, x.device) for q in names}
        for start in range(0, len(x), plan.chunk):
            batch = x[start : start + plan.chunk]
            for name, found in rows(batch, names).items():
                bucket, sign = tables[name]
                signed = found.detach().to(work_type(dtype)) * sign
                made[group_of[name]][start : start + len(batch)].index_add_(2, bucket, signed)
            done += len(batch)
            if tell is not None:
                tell(done, total)
    return made


def _buckets(
    name: str, size: int, projection: Projection, device: torch.device
) -> tuple[Tensor, Tensor]:
    """For each entry of a parameter its bucket and its sign, [entries] each."""
    generator = _generator(projection.seed, name)
    bucket = torch.randint(projection.size, (size,), generator=generator)
    sign = torch.randint(2, (size,), generator=generator).mul_(2).sub_(1)
    return bucket.to(device), sign.to(device, torch.float32)


def gaussian_features(
    model: nn.Module,
    x: Tensor,
    groups: Mapping[str, Sequence[str]],
    outputs: Outputs,
    projection: Projection,
    dtype: torch.dtype,
    batch_size: int,
    memory: int,
    tell: Tell | None,
) -> dict[str, Tensor]:
    """Group → JS, [N, pulled, r]: a derivative along each of r random directions."""
    made = _empty(x, groups, outputs, projection, dtype)
    scale = 1.0 / math.sqrt(projection.size)
    held = dict(model.named_parameters())
    done, total = 0, projection.size * len(groups)
    for g, names in groups.items():
        entries = sum(held[n].numel() * held[n].element_size() for n in names)
        together = max(1, min(_TOGETHER, memory // (_COPIES * entries)))
        for first in range(0, projection.size, together):
            columns = range(first, min(first + together, projection.size))
            directions = {n: _directions(n, held[n], columns, projection) for n in names}
            for start in range(0, len(x), batch_size):
                batch = x[start : start + batch_size]
                along = _derivatives(model, batch, directions, outputs).detach() * scale
                made[g][start : start + len(batch), :, columns] = along.movedim(0, -1).to(made[g])
            done += len(columns)
            if tell is not None:
                tell(done * len(x) // total, len(x))
    return made


def _directions(name: str, like: Tensor, columns: range, projection: Projection) -> Tensor:
    """Entries N(0, 1) for a parameter, [columns, *its shape]; each column has a seed of its own."""
    made = [
        torch.randn(like.shape, generator=_generator(projection.seed, name, column))
        for column in columns
    ]
    return torch.stack(made).to(like)


def _derivatives(
    model: nn.Module, x: Tensor, directions: Mapping[str, Tensor], outputs: Outputs
) -> Tensor:
    """Σ_p (∂f/∂θ_p)·v_p for all samples and each of the directions, [directions, c, pulled]."""
    value, chosen = functional(model, list(directions), outputs)

    def along(direction: dict[str, Tensor]) -> Tensor:
        found: Tensor = jvp(lambda p: value(p, x), (chosen,), (direction,))[1]
        return found

    # The equilibrium is solved once for all directions under vmap, and once for each without.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        together: Tensor = vmap(along)(dict(directions))
        return together
    try:
        count = len(next(iter(directions.values())))
        return torch.stack([along({n: v[i] for n, v in directions.items()}) for i in range(count)])
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            "Projection(kind='gaussian') needs forward-mode derivatives, which this model does not "
            f"have ({str(error).splitlines()[0]}). Use Projection(kind='sparse')."
        ) from error


def _empty(
    x: Tensor,
    groups: Mapping[str, Sequence[str]],
    outputs: Outputs,
    projection: Projection,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    shape = (len(x), outputs.pulled, projection.size)
    return {g: torch.zeros(shape, dtype=work_type(dtype), device=x.device) for g in groups}


def standard_error(kernel: Tensor, left: Tensor, right: Tensor, size: int, *, sums: bool) -> Tensor:
    """√((K_ii K_jj + K_ij²)/r): a bound on each entry's standard deviation, [n, m].

    Args:
        kernel: [n, m]; the estimate stands for K where K is not known.
        left: K_ii, [n].
        right: K_jj of the other side, [m].
        size: r.
        sums: whether an entry is a sum over outputs or layers; then K_ij² is replaced by its bound
            K_ii K_jj, as the terms of the sum may cancel in K_ij and do not in its variance.
    """
    product = left[:, None] * right[None, :]
    return ((product + (product if sums else kernel.square())) / size).sqrt()
