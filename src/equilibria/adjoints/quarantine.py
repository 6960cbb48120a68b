"""Keep samples that failed from spoiling the gradients of the others.

A zero gradient into a failed sample is not enough: where its numbers are NaN, 0·NaN is NaN, and it
reaches the gradients of shared weights. So the differentiated evaluations run on inputs in which
the NaN and infinities of failed samples are replaced by zero, and their answers are cut off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.engine.iterate import Iterated
from equilibria.engine.maps import Map
from equilibria.engine.result import Result
from equilibria.engine.tree import Leaves, where_sample

from .capture import Substitute, survey

FAILED = (Result.diverged, Result.nonfinite)


def failed_samples(done: Iterated) -> Tensor | None:
    """[B] bool: samples that diverged or met NaN; None where the host knows that there are none."""
    if done.counts is not None and not any(done.counts.get(code) for code in FAILED):
        return None
    failed: Tensor = (done.result == int(FAILED[0])) | (done.result == int(FAILED[1]))
    return failed


def has_batch(t: Any, failed: Tensor) -> bool:
    """Whether t may hold one row a sample."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return False
    return t.dim() > 0 and t.shape[0] == failed.shape[0]


def clean(t: Tensor, failed: Tensor | None) -> Tensor:
    """t with NaN and infinity in the rows of failed samples replaced by zero."""
    if failed is None or not has_batch(t, failed):
        return t
    rows = failed.view(-1, *([1] * (t.dim() - 1)))
    return torch.where(rows & ~torch.isfinite(t), 0.0, t)


def quarantine(fn: Map, failed: Tensor) -> Map:
    """The map on cleaned arguments and cleaned captured tensors, with their graphs."""
    args = pytree.tree_map(lambda t: clean(t, failed) if isinstance(t, Tensor) else t, fn.args)
    held = _captured_rows(fn, failed)
    if not held:
        return fn.with_args(args)
    cleaned = [clean(t, failed) for t in held]
    inner = fn.fn

    def substituted(z: Any, *given: Any) -> Any:
        with Substitute(held, cleaned):
            return inner(z, *given)

    return Map(substituted, args, fn.spec, [failed], fn.surrogate)


def sick_samples(fn: Map, like: Tensor) -> Tensor | None:
    """[B] bool: samples with NaN or infinity in what the map is given; None if it has no rows."""
    given = [t for t in pytree.tree_leaves(fn.args) if has_batch(t, like)]
    rows = [
        ~torch.isfinite(t.detach()).reshape(t.shape[0], -1).all(1)
        for t in (*given, *_captured_rows(fn, like))
    ]
    return torch.stack(rows).any(0) if rows else None


def _captured_rows(fn: Map, like: Tensor) -> list[Tensor]:
    """Captured tensors that may hold one row a sample (a compiled graph cannot look for them)."""
    if torch.compiler.is_compiling():
        return []
    held = survey(fn.fn).tensors
    return [t for t in held if has_batch(t, like) and not isinstance(t, nn.Parameter)]


def pinned(fn: Map, failed: Tensor, at: Leaves) -> Map:
    """The map with the states of failed samples held at ``at``, where it is finite."""
    inner, spec = fn, fn.spec

    def held(z: Any, *_: Any) -> Any:
        leaves = pytree.tree_leaves(z)
        return pytree.tree_unflatten(inner(where_sample(failed, at, leaves)), spec)

    return Map(held, fn.args, spec, at, fn.surrogate)


def cut_off(failed: Tensor | None, value: Leaves, constant: Leaves) -> Leaves:
    """``value``, but ``constant`` (which carries no graph) for failed samples."""
    if failed is None:
        return value
    return where_sample(failed, constant, value)
