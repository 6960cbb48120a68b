"""T at the answer of a solve: what it depends on, and its graph without the samples that failed.

Dependencies. The gradient must reach everything that T uses, each dependency once: where T uses
both a weight W and a feature h(x; W), the gradient to W must not also run through h. So T is
evaluated once on stand-ins: fresh leaves in place of its arguments and of captured intermediate
tensors. Captured leaves (parameters) are read off the graph of that evaluation; an intermediate
tensor that the closure does not show is found by watching a second one, or is an error.

Failed samples. Where their numbers, or the derivatives at them, are not finite, even a gradient of
zero is NaN (0·∞), and reaches shared weights. So they are computed as copies of a healthy sample:
their rows of the state, of the arguments and of captured tensors are exchanged, and their answer is
cut off. A weight may have as many rows as the batch has samples: rows are exchanged only where this
changes no digit of the healthy samples' answers. Where samples are coupled every exchange does;
then NaN and infinity of failed samples become zero, no more.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from equilibria.engine.maps import Map
from equilibria.engine.result import Iterated, Result
from equilibria.engine.spectral import pull
from equilibria.engine.transforms import transforms_active, version
from equilibria.engine.tree import (
    Leaves,
    map_tensors,
    per_sample,
    rows,
    sample_norm,
    select_samples,
    subtract,
    where_sample,
)

Edge = tuple[Any, int]
Pair = tuple[Tensor, Tensor]
"""A dependency of the map, and what stands for it."""


def edge_of(tensor: Tensor) -> Edge:
    """The place of a tensor in the autograd graph."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


@dataclass
class Evaluation:
    """f = T(z) with a graph that ends at ``inside`` (z) and ``stand_ins`` (for ``sources``)."""

    inside: Leaves
    outputs: Leaves
    sources: list[Tensor]
    stand_ins: list[Tensor]
    closure: Closure
    constants: Constants

    def check_unchanged(self, again: Callable[[], Leaves]) -> None:
        """Raise if ``again``, T at the same point now, differs because a constant has changed."""
        if not self.constants.changed():
            return
        with torch.no_grad():
            gap, size = sample_norm(subtract(again(), self.outputs)), sample_norm(self.outputs)
        if bool((gap > 100 * torch.finfo(self.outputs[0].dtype).eps ** 0.75 * size).any()):
            raise changed_in_place()

    def pull(self, inputs: Sequence[Tensor], v: Leaves) -> Leaves:
        """(∂f/∂inputs)ᵀv. Parameters stand for themselves: their hooks wait for the gradient that
        leaves the solve, of which this is a part."""
        held = [hooks for t in inputs if (hooks := t._backward_hooks)]
        kept = [dict(hooks) for hooks in held]
        try:
            for hooks in held:
                hooks.clear()
            return pull(self.outputs, inputs, v)
        finally:
            for hooks, own in zip(held, kept, strict=True):
                hooks.update(own)


def evaluate(fn: Map, z: Leaves) -> Evaluation:
    """Evaluate T at z with a graph to everything it depends on."""
    closure = survey(fn.fn)
    compiled = closure.compiled
    hidden = [t for t in closure.tensors if t.requires_grad and not t.is_leaf and not compiled]
    for attempt in range(2):
        since = _sequence_number()
        inside = [x.detach().requires_grad_() for x in z]
        args, pairs = _stand_ins_for_args(fn.args)
        mode: Any = contextlib.nullcontext()
        if hidden:
            copies = [t.detach().requires_grad_() for t in hidden]
            pairs += zip(hidden, copies, strict=True)
            mode = Substitute(hidden, copies)
        with torch.enable_grad(), mode:
            outputs = fn.with_args(args)(inside)
        if hidden:
            outputs = mode.swapped(outputs)
        known = {edge_of(copy): (source, copy) for source, copy in pairs}
        stop = {edge_of(t) for t in inside}
        found, unknown = _walk([edge_of(f) for f in outputs if f.requires_grad], stop, known, since)
        if not unknown:
            sources, copies = [s for s, _ in found], [c for _, c in found]
            return Evaluation(inside, outputs, sources, copies, closure, Constants(fn, closure))
        if compiled:
            break
        if attempt == 0:
            hidden = [t for t in watch(fn, z) if t.requires_grad and not t.is_leaf]
    names = sorted({node.name() for node, _ in unknown})
    raise RuntimeError(
        "the map uses tensors of an earlier computation that cannot be traced (made by "
        f"{', '.join(names)}). Pass them in args: fixed_point(fn, z0, (x, ...))."
    )


def _stand_ins_for_args(args: Any) -> tuple[Any, list[Pair]]:
    given = {id(t): t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)}
    pairs = {key: (t, t.detach().requires_grad_()) for key, t in given.items() if t.requires_grad}
    stood = map_tensors(lambda t: pairs[id(t)][1] if id(t) in pairs else t, args)
    return stood, list(pairs.values())


def _walk(
    start: list[Edge], stop: set[Edge], known: dict[Edge, Pair], since: int
) -> tuple[list[Pair], set[Edge]]:
    """(source, stand-in) pairs that the graph ends at, and edges to older nodes."""
    found: dict[Edge, Pair] = {}
    unknown: set[Edge] = set()
    seen: set[Any] = set()
    while start:
        edge = start.pop()
        node = edge[0]
        if node is None or edge in stop or edge in found:
            continue
        if edge in known:
            found[edge] = known[edge]
        elif hasattr(node, "variable"):
            found[edge] = (node.variable, node.variable)
        elif node._sequence_nr() < since:
            unknown.add(edge)
        elif node not in seen:
            seen.add(node)
            start.extend(node.next_functions)
    return list(found.values()), unknown


def _sequence_number() -> int:
    """The age that the next autograd node will have."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    assert node is not None
    return int(node._sequence_nr())


@dataclass(frozen=True)
class Closure:
    """What a function can reach: through cells, defaults, partials, methods and attributes; of its
    globals the tensors."""

    tensors: list[Tensor]
    modules: list[nn.Module]
    """Those inside others left out."""
    compiled: bool
    """Whether torch.compile made the function or something that it calls."""


class Constants:
    """What a map is given and holds, and how often each was changed in place: autograd, which saves
    only what it needs, checks no more."""

    def __init__(self, fn: Map, closure: Closure) -> None:
        given = [t for t in pytree.tree_leaves(fn.args) if isinstance(t, Tensor)]
        weights = [p for m in closure.modules for p in m.parameters()]
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        held = (*given, *closure.tensors, *weights)
        self.tensors = [t for t in held if has_nan(t) and not wrapped(t)]
        self.note()

    def note(self) -> None:
        """From here on."""
        self.versions = [version(t) for t in self.tensors]

    def changed(self) -> bool:
        """Whether any was."""
        return self.versions != [version(t) for t in self.tensors]


def changed_in_place() -> RuntimeError:
    """What to raise where they were, and the map is to be evaluated again."""
    return RuntimeError(
        "a tensor that the map uses was changed in place after the solve, and this backward pass "
        "(create_graph=True, torch.func or Unrolled(checkpoint=True)) evaluates the map again. "
        "Change it later, or give the solve a clone of it."
    )


# Beyond these a closure holds more than a map (a trainer, a data set). The rest is found later, on
# the graph or by watching.
_DEPTH, _OBJECTS, _ITEMS = 6, 2000, 256


def survey(fn: Callable[..., Any]) -> Closure:
    """Look through the closure of a function once."""
    found: list[Any] = []
    _collect(fn, found, set(), 0)
    modules = [m for m in found if isinstance(m, nn.Module)]
    if len(modules) > 1:
        inner = {id(c) for m in modules for c in m.modules() if c is not m}
        modules = [m for m in modules if id(m) not in inner]
    compiled = any(hasattr(f, "_torchdynamo_orig_callable") for f in (fn, *found))
    return Closure([t for t in found if isinstance(t, Tensor)], modules, compiled)


def _collect(item: Any, found: list[Any], seen: set[int], depth: int) -> None:
    if depth > _DEPTH or len(seen) > _OBJECTS or id(item) in seen:
        return
    seen.add(id(item))
    inner: Iterable[Any] = ()
    if isinstance(item, (Tensor, nn.Module)) or callable(item):
        found.append(item)
    if isinstance(item, Tensor):
        return
    if isinstance(item, (list, tuple)):
        inner = item if len(item) <= _ITEMS else ()
    elif isinstance(item, dict):
        inner = item.values() if len(item) <= _ITEMS else ()
    elif isinstance(item, nn.Module):
        # Parameters are leaves, found on the graph itself; other attributes may be anything.
        inner = [v for k, v in vars(item).items() if not k.startswith("_")]
    elif isinstance(item, functools.partial):
        inner = (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        inner = (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        named = (item.__globals__.get(name) for name in item.__code__.co_names)
        inner = [*captured(item).values(), *(item.__defaults__ or ())]
        inner += [t for t in named if isinstance(t, Tensor)]
    elif hasattr(item, "__dict__") and not isinstance(item, (type, types.ModuleType)):
        inner = vars(item).values()
    for child in list(inner):
        _collect(child, found, seen, depth + 1)


def captured(fn: Any) -> dict[str, Any]:
    """The names and values that a function has from around it; not what is not assigned yet."""
    found = {}
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


class _Watch(TorchFunctionMode):
    """Notes every tensor that torch functions are given and that none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for t in pytree.tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and id(t) not in self.made:
                self.given[id(t)] = t
        out = func(*args, **kwargs or {})
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and id(t) not in self.given:
                self.made[id(t)] = t
        return out


def watch(fn: Map, z: Leaves) -> list[Tensor]:
    """Evaluate T once and return the tensors it was fed from outside, other than z."""
    mode = _Watch()
    # Copies, so that a tensor which is the start and an argument too is seen as the latter.
    inside = [x.detach() for x in z]
    own = {id(x) for x in inside}
    with torch.no_grad(), mode:
        out = fn(inside)
    # A tensor that the map returns as it found it went through no torch function.
    mode.given |= {id(t): t for t in out if id(t) not in mode.made}
    return [t for key, t in mode.given.items() if key not in own]


class Substitute(TorchFunctionMode):
    """Feeds torch functions other tensors in place of given ones: a closure made explicit."""

    def __init__(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        super().__init__()
        self.swap = {id(a): b for a, b in zip(old, new, strict=True)}
        self.keep = list(old)  # ids stay valid while the tensors live
        self.met: set[int] = set()  # those that were replaced

    def _new(self, t: Tensor) -> Tensor:
        if id(t) not in self.swap:
            return t
        self.met.add(id(t))
        return self.swap[id(t)]

    def swapped(self, leaves: Sequence[Tensor]) -> Leaves:
        """Tensors that a function returned as it found them, replaced too."""
        return [self._new(t) for t in leaves]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = map_tensors(self._new, (args, kwargs or {}))
        return func(*args, **kwargs)


# Failed samples ----------------------------------------------------------------------------------

Evaluated = TypeVar("Evaluated", bound=Leaves | Evaluation)


def host_may_read(t: Tensor) -> bool:
    """Whether a number of t can be read without waiting for a device, and by eager code."""
    compiling = torch.compiler.is_compiling()
    return t.device.type == "cpu" and not compiling and not transforms_active()


def blown_up(result: Tensor) -> Tensor:
    """[B] bool: samples that diverged or met NaN."""
    return (result == int(Result.diverged)) | (result == int(Result.nonfinite))


def failed_codes(result: Tensor) -> Tensor | None:
    """The same; None where the host knows that there are none."""
    failed = blown_up(result)
    return None if host_may_read(failed) and not bool(failed.any()) else failed


def failed_samples(done: Iterated) -> Tensor | None:
    """The same of a solve."""
    counts = done.counts
    if counts is not None and not (counts.get(Result.diverged) or counts.get(Result.nonfinite)):
        return None
    return failed_codes(done.result)


def finite_samples(leaves: Leaves) -> Tensor:
    """[B] bool: samples without NaN and infinity."""
    finite = [rows(torch.isfinite(x.detach())).all(1) for x in leaves]
    return torch.stack(finite).all(0)


def has_batch(t: Any, failed: Tensor) -> bool:
    """Whether t may hold one row per sample."""
    return isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == failed.shape[0]


def has_nan(t: Tensor) -> bool:
    """Whether a tensor of this dtype can hold NaN."""
    return t.is_floating_point() or t.is_complex()


def clean(t: Tensor, failed: Tensor | None) -> Tensor:
    """t with NaN and infinity in the rows of failed samples replaced by zero."""
    if failed is None or not has_batch(t, failed) or not has_nan(t):
        return t
    return torch.where(per_sample(failed, t) & ~torch.isfinite(t), 0.0, t)


def lend(t: Tensor, failed: Tensor | None) -> Tensor:
    """t with the rows of failed samples replaced by a copy of the first healthy one, a constant.

    Entries that are equal already stay, with their gradient. Where no sample is healthy NaN and
    infinity become zero.
    """
    if failed is None or not has_batch(t, failed):
        return t
    first = torch.argmax((~failed).to(torch.int8)).view(1)
    row = t.detach().index_select(0, first)
    if has_nan(t):
        row = torch.where(failed.all() & ~torch.isfinite(row), 0.0, row)
    return torch.where(per_sample(failed, t) & (t != row), row, t)


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
    if set(done.counts or ()) <= {Result.converged} and not host_may_read(done.result):
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

    def substituted(inner: Callable[..., Any], z: Any, *given: Any) -> Any:
        with Substitute(held, others):
            return inner(z, *given)

    return fn.wrapped(substituted, args)


@torch.no_grad()
def _separated(fn: Map, z: Leaves, lent: Leaves, failed: Tensor) -> Map | None:
    """The map whose failed samples are copies of a healthy one; None where that changes others."""
    healthy = (~failed).nonzero()[:, 0]
    tensors = {id(t): t for t in _arguments(fn, failed)}
    if not survey(fn.fn).compiled:  # whose captured tensors cannot be exchanged
        seen = [t for t in watch(fn, z) if has_batch(t, failed)]
        tensors |= {id(t): t for t in seen if not isinstance(t, nn.Parameter)}
    points = list(zip(_nearby(z), _nearby(lent), strict=True))
    wanted = [select_samples(fn(at), healthy) for at, _ in points]

    def unchanged(chosen: list[Tensor]) -> bool:
        with torch.no_grad():
            other = _exchanged(fn, chosen, [lend(t, failed) for t in chosen])
            found = [select_samples(other(at), healthy) for _, at in points]
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
    return z, [x + (1e-3 * per_sample(size, x)).to(x.dtype) for x in z]


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def without_gradient(fn: Map, value: Leaves, *others: Tensor) -> Leaves:
    """The value, with a gradient of zero to all that the map depends on and to ``others``."""
    sources = [*evaluate(fn, value).sources, *(t for t in others if t.requires_grad)]
    # 0, as the sum over no entries: NaN in a source reaches neither the value nor the gradient.
    nothing = [s.flatten()[:0].abs().sum() for s in sources]
    return [functools.reduce(torch.add, [n.to(v) for n in nothing], v.detach()) for v in value]


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
            live = live & ~per_sample(part.failed, c)
        found.append(v + torch.where(live, c - c.detach(), 0.0))
    return found
