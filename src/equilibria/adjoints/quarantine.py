"""Keep samples that failed from spoiling the gradients of the others.

A zero gradient into a failed sample is not enough: where its numbers, or the derivatives at them,
are not finite, 0·∞ is NaN, and it reaches the gradients of shared weights. So where gradients are
taken a failed sample is computed as a copy of a healthy one: its rows of the state, of the
arguments and of captured tensors are those of its mate. Then its answer is cut off.

A tensor of B rows may be a weight that happens to have as many rows as the batch has samples. Its
rows are exchanged only where this changes no digit of the healthy samples' answers. Where samples
are coupled every exchange does; then NaN and infinity of failed samples become zero, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.engine.iterate import Iterated
from equilibria.engine.maps import Map
from equilibria.engine.result import Result
from equilibria.engine.transforms import transforms_active
from equilibria.engine.tree import Leaves, map_tensors, sample_norm, where_sample

from .capture import Evaluation, Substitute, evaluate, survey, watch

Evaluated = TypeVar("Evaluated", bound=Leaves | Evaluation)

FAILED = (Result.diverged, Result.nonfinite)


def host_may_read(t: Tensor) -> bool:
    """Whether a number of t can be read without waiting for a device, and by eager code."""
    compiling = torch.compiler.is_compiling()
    return t.device.type == "cpu" and not compiling and not transforms_active()


def failed_codes(result: Tensor) -> Tensor | None:
    """[B] bool: samples that diverged or met NaN; None where the host knows that there are none."""
    failed: Tensor = (result == int(FAILED[0])) | (result == int(FAILED[1]))
    return None if host_may_read(failed) and not bool(failed.any()) else failed


def failed_samples(done: Iterated) -> Tensor | None:
    """The same of a solve."""
    if done.counts is not None and not any(done.counts.get(code) for code in FAILED):
        return None
    return failed_codes(done.result)


def finite_samples(leaves: Leaves) -> Tensor:
    """[B] bool: samples without NaN and infinity."""
    finite = [torch.isfinite(x.detach()).reshape(len(x), -1).all(1) for x in leaves]
    return torch.stack(finite).all(0)


def _rows(mask: Tensor, t: Tensor) -> Tensor:
    """mask [B] shaped to broadcast over t [B, ...]."""
    return mask.view(-1, *([1] * (t.dim() - 1)))


def has_batch(t: Any, failed: Tensor) -> bool:
    """Whether t may hold one row a sample."""
    return isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == failed.shape[0]


def clean(t: Tensor, failed: Tensor | None) -> Tensor:
    """t with NaN and infinity in the rows of failed samples replaced by zero."""
    if failed is None or not has_batch(t, failed) or not t.is_floating_point():
        return t
    return torch.where(_rows(failed, t) & ~torch.isfinite(t), 0.0, t)


def lend(t: Tensor, failed: Tensor | None) -> Tensor:
    """t with the rows of failed samples replaced by a copy of the first healthy one, a constant.

    Entries that are equal already stay, with their gradient. Where no sample is healthy NaN and
    infinity become zero.
    """
    if failed is None or not has_batch(t, failed):
        return t
    first = torch.argmax((~failed).to(torch.int8)).view(1)
    row = t.detach().index_select(0, first)
    if t.is_floating_point():
        row = torch.where(failed.all() & ~torch.isfinite(row), 0.0, row)
    return torch.where(_rows(failed, t) & (t != row), row, t)


def cut_off(failed: Tensor | None, value: Leaves, constant: Leaves) -> Leaves:
    """``value``, but ``constant`` (which carries no graph) for failed samples."""
    if failed is None:
        return value
    return where_sample(failed, constant, value)


@dataclass(frozen=True)
class Isolated:
    """A map and a state at which it may be differentiated; ``failed`` [B] samples are copies."""

    fn: Map
    z: Leaves
    failed: Tensor | None
    apart: bool = True
    """Whether failed samples are out of the way; not so where the map couples samples."""


def isolate(fn: Map, done: Iterated, lost: Tensor | None = None) -> Isolated | None:
    """Where to differentiate fn after a solve; None where the host knows that all samples failed.

    Samples of ``lost`` [B] count as failed. Where the host does not know which samples failed
    (fixed steps on a GPU, compiled or under a transform), their states are replaced, and of other
    tensors NaN and infinity alone.
    """
    failed = failed_samples(done)
    if lost is not None:
        failed = lost if failed is None else failed | lost
    if failed is None:
        return Isolated(fn, done.value, None)
    z = [lend(x, failed) for x in done.value]
    if done.counts is None and not host_may_read(failed):
        return Isolated(cleaned(fn, failed), z, failed)
    if bool(failed.all()):
        return None
    separate = _separated(fn, done.value, z, failed)
    if separate is None:
        return Isolated(cleaned(fn, failed), done.value, failed, apart=False)
    return Isolated(separate, z, failed)


def evaluate_isolated(
    fn: Map, done: Iterated, run: Callable[[Isolated], Evaluated]
) -> tuple[Isolated, Evaluated] | None:
    """``run``, which evaluates fn at the answer, with failed samples isolated.

    A solve may end where T, or a further step, is not finite: fixed steps are judged one step
    before, others may be out of steps. Such samples are isolated too, and ``run`` is repeated.
    """
    part = isolate(fn, done)
    if part is None:
        return None
    found = run(part)
    if not host_may_read(done.result):
        return part, found
    images = found.outputs if isinstance(found, Evaluation) else found
    lost = ~finite_samples(images)
    if part.failed is not None:
        lost = lost & ~part.failed
    if not bool(lost.any()):
        return part, found
    part = isolate(fn, done, lost)
    return None if part is None else (part, run(part))


def cleaned(fn: Map, failed: Tensor) -> Map:
    """The map on arguments and captured tensors without NaN and infinity in failed rows."""
    held = [] if torch.compiler.is_compiling() else survey(fn.fn).tensors
    held = [t for t in held if has_batch(t, failed) and not isinstance(t, nn.Parameter)]
    tensors = [*_arguments(fn, failed), *held]
    return _exchanged(fn, tensors, [clean(t, failed) for t in tensors])


def _arguments(fn: Map, failed: Tensor) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(fn.args) if has_batch(t, failed)]


def _exchanged(fn: Map, old: Sequence[Tensor], new: Sequence[Tensor]) -> Map:
    """The map with other tensors in place of some of its arguments and of what it captures."""
    swap = {id(a): b for a, b in zip(old, new, strict=True) if a is not b}
    args = map_tensors(lambda t: swap.get(id(t), t), fn.args)
    given = {id(t) for t in pytree.tree_leaves(fn.args)}
    held = [t for t in old if id(t) in swap and id(t) not in given]
    if not held:
        return fn.with_args(args)
    others = [swap[id(t)] for t in held]

    def substituted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def within(z: Any, *given: Any) -> Any:
            with Substitute(held, others):
                return inner(z, *given)

        return within

    return fn.wrapped(substituted, args)


@torch.no_grad()
def _separated(fn: Map, z: Leaves, lent: Leaves, failed: Tensor) -> Map | None:
    """The map whose failed samples are copies of a healthy one; None where that changes others."""
    healthy = (~failed).nonzero()[:, 0]
    tensors = {id(t): t for t in _arguments(fn, failed)}
    if not survey(fn.fn).compiled:  # whose captured tensors cannot be exchanged
        seen = [t for t in watch(fn, z) if has_batch(t, failed)]
        tensors |= {id(t): t for t in seen if not isinstance(t, nn.Parameter)}
    points = [(a, b) for a, b in zip(_nearby(z), _nearby(lent), strict=True)]
    wanted = [_take(fn(at), healthy) for at, _ in points]

    def unchanged(chosen: list[Tensor]) -> bool:
        with torch.no_grad():
            other = _exchanged(fn, chosen, [lend(t, failed) for t in chosen])
            found = [_take(other(at), healthy) for _, at in points]
        pairs = zip(found, wanted, strict=True)
        return all(_equal(a, b) for f, w in pairs for a, b in zip(f, w, strict=True))

    chosen = list(tensors.values())
    if not unchanged(chosen):
        if not unchanged([]):
            return None
        chosen = [t for t in chosen if unchanged([t])]
    with torch.enable_grad():
        return _exchanged(fn, chosen, [lend(t, failed) for t in chosen])


def _nearby(z: Leaves) -> tuple[Leaves, Leaves]:
    """z, and a point close to it: at z = 0 a weight would go unnoticed."""
    size = sample_norm(z)
    size = torch.where(size > 0, size, 1.0)
    return z, [x + (1e-3 * _rows(size, x)).to(x.dtype) for x in z]


def _take(leaves: Leaves, index: Tensor) -> Leaves:
    return [x.index_select(0, index) for x in leaves]


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def without_gradient(fn: Map, value: Leaves, *others: Tensor) -> Leaves:
    """The value, with a gradient of zero to all that the map depends on and to ``others``."""
    sources = [*evaluate(fn, value).sources, *(t for t in others if t.requires_grad)]
    if not sources:
        return value
    return list(_Zero.apply(len(value), *[v.detach() for v in value], *sources))


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.count = count
        ctx.save_for_backward(*tensors[count:])
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        zeros = [torch.zeros_like(t) for t in ctx.saved_tensors]
        return (None, *([None] * ctx.count), *zeros)


def carry(fn: Map, done: Iterated, steps: Callable[[Isolated], Leaves]) -> Leaves:
    """The answer with the gradient of ``steps`` taken at it: none to failed samples.

    The steps serve the gradient; the answer stays the one that was judged.
    """
    taken = evaluate_isolated(fn, done, steps)
    if taken is None:
        return without_gradient(fn, done.value)
    part, carrier = taken
    found = []
    for v, c in zip(done.value, carrier, strict=True):
        live = torch.isfinite(c.detach())
        if part.failed is not None:
            live = live & ~_rows(part.failed, c)
        found.append(v + torch.where(live, c - c.detach(), 0.0))
    return found
