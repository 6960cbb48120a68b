"""Which tensors a map depends on, arguments and captured ones alike.

The implicit gradient must reach everything that T uses, each dependency once: where T uses both a
weight W and a feature h(x; W), the gradient to W must not also run through h. So T is evaluated
once on stand-ins: fresh leaves in place of its arguments and of captured intermediate tensors.
Captured leaves (parameters) are read off the graph of that evaluation, and an intermediate tensor
that the closure does not show is found by watching a second one. What cannot be found is an error.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from equilibria.engine.maps import Map
from equilibria.engine.tree import Leaves, map_tensors

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
    modules: list[nn.Module]


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
            return Evaluation(inside, outputs, sources, copies, closure.modules)
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
    """What a function can reach: through cells, defaults, partials, methods and attributes."""

    tensors: list[Tensor]
    modules: list[nn.Module]
    """Those inside others left out."""
    compiled: bool
    """Whether torch.compile made the function or something that it calls."""


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
        cells = [c for c in item.__closure__ or () if not _empty(c)]
        inner = [c.cell_contents for c in cells] + list(item.__defaults__ or ())
    elif hasattr(item, "__dict__") and not isinstance(item, (type, types.ModuleType)):
        inner = vars(item).values()
    for child in list(inner):
        _collect(child, found, seen, depth + 1)


def _empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


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

    def swapped(self, leaves: Sequence[Tensor]) -> Leaves:
        """Tensors that a function returned as it found them, replaced too."""
        return [self.swap.get(id(t), t) for t in leaves]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = map_tensors(lambda t: self.swap.get(id(t), t), (args, kwargs or {}))
        return func(*args, **kwargs)
