"""Marks in time: around every map, solve and adjoint of a model, and away again.

All time between two marks belongs to one part of one layer, so that the parts make the whole.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from equilibria.adjoints import Unrolled
from equilibria.engine.adjoint import Adjoint, Watch
from equilibria.engine.iterate import Callback, Iterated
from equilibria.engine.maps import Map
from equilibria.engine.options import options
from equilibria.engine.result import BackwardStats
from equilibria.engine.solver import Solver
from equilibria.engine.tree import Leaves
from equilibria.nn.constraints import OperatorNorm
from equilibria.nn.observing import equilibrium_layers

__all__ = ["PARTS", "Marks", "marked", "solving_layers"]

PARTS = {
    "map": "evaluations of the map",
    "solver": "the rest of the solves",
    "adjoint_map": "evaluations with a graph, products with Jᵀ",
    "adjoint_solver": "the rest of the adjoints",
    "prepare": "equilibrium layers outside of their solves",
    "norm": "norm constraints (power iteration), forward",
    "forward": "explicit layers, forward",
    "loss": "the loss",
    "backward": "explicit layers, backward",
    "optimizer": "the optimizer",
}
"""Every part of a pass, and what it holds."""

Key = tuple[str, str]
"""(name of the layer or "", part)."""


class Marks:
    """Marks on one time axis: a clock reading on a CPU, an event in the stream of a GPU.

    The time of a GPU is the device's, and nothing waits until ``seconds()`` is asked for.
    """

    # No __dict__: adjoints look through closures for tensors, and must find nothing here.
    __slots__ = ("_device", "_marks", "counts", "in_backward")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Key]] = []
        self.counts: Counter[Key] = Counter()
        """(layer, what) → times: "evaluations" of T in the solve, "graph_evaluations" of T for the
        adjoint, "products" with Jᵀ."""
        self.in_backward = False

    def to(self, layer: str, part: str) -> Key:
        """From now on the time is this part's; whose it was."""
        now: Any = time.perf_counter()
        if self._device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
        self._marks.append((now, (layer, part)))
        return self._marks[-2][1] if len(self._marks) > 1 else ("", "forward")

    def seconds(self) -> dict[Key, float]:
        """By layer and part; the time after the last mark is nobody's."""
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._device)
        found: dict[Key, float] = {}
        for (start, key), (end, _) in itertools.pairwise(self._marks):
            passed = start.elapsed_time(end) * 1e-3 if cuda else end - start
            found[key] = found.get(key, 0.0) + passed
        return found

    def hook(self, layer: str, part: str, counted: str = "") -> Callable[[Any], None]:
        """A tensor hook: the gradient has come here, and from now on the time is this part's."""

        def switch(_: Any) -> None:
            self.to(layer, part)
            self.counts[layer, counted] += 1

        return switch


def solving_layers(model: nn.Module) -> dict[str, Any]:
    """Layers that solve by an adjoint of their own, by name; branches count one by one."""
    found: dict[str, Any] = {}
    for name, layer in equilibrium_layers(model).items():
        inner: dict[str, Any] = {name: layer}
        if hasattr(layer, "branches"):
            prefix = f"{name}." if name else ""
            branches: Any = layer.branches
            inner = {f"{prefix}branches.{i}": branch for i, branch in enumerate(branches)}
        found |= {n: m for n, m in inner.items() if isinstance(getattr(m, "adjoint", 0), Adjoint)}
    return found


@contextmanager
def marked(model: nn.Module, marks: Marks) -> Iterator[None]:
    """Inside the block the model's passes put their marks; afterwards all is as before.

    The adjoint of every layer is wrapped, because a solve goes through it: it is given the map and
    hands out the value through which gradients come back. Hooks mark the rest. Nothing waits.
    """
    with ExitStack() as stack:
        for name, layer in solving_layers(model).items():
            stack.callback(setattr, layer, "adjoint", layer.adjoint)
            layer.adjoint = _Marked(inner=layer.adjoint, marks=marks, name=name)
        spans = {layer: (name, "prepare") for name, layer in equilibrium_layers(model).items()}
        for name, module in model.named_modules():
            if isinstance(module, OperatorNorm):
                spans[module] = (name.split(".parametrizations.")[0], "norm")
        for module, key in spans.items():
            _mark_calls(stack, module, marks, key)
        yield


def _mark_calls(stack: ExitStack, module: nn.Module, marks: Marks, key: Key) -> None:
    """While ``module`` runs, the time is ``key``'s, but for what is marked inside."""
    before: list[Key] = []

    def enter(*_: Any) -> None:
        before.append(marks.to(*key))

    def leave(*_: Any) -> None:
        marks.to(*before.pop())

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave).remove)


@options
class _Marked(Adjoint):
    """Another adjoint with marks: before and after its solve, every evaluation, its backward."""

    inner: Adjoint
    marks: Marks
    name: str

    @property
    def plain(self) -> Adjoint:
        return self.inner.plain

    @property
    def watch(self) -> Watch:
        return _FusedWatch(self.marks, self.name)

    def run(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback | None,
        backward: BackwardStats,
    ) -> Iterated:
        marks, name = self.marks, self.name
        before = marks.to(name, "solver")
        args = _gated(fn.args, marks) if torch.is_grad_enabled() else fn.args
        timed = _timed(fn.fn, marks, name, unrolled=isinstance(self.inner, Unrolled))
        map_ = Map(timed, args, fn.spec, z0, fn.surrogate, coupled=fn.coupled, group=fn.group)
        done = self.inner.run(map_, z0, solver, callback, backward)
        for value in done.value:
            if value.requires_grad:
                value.register_hook(marks.hook(name, "adjoint_solver"))
        marks.to(*before)
        return done


class _FusedWatch(Watch):
    """A fused solve: map and update are one operation, and so are products and their sum."""

    __slots__ = ("_marks", "_name")

    def __init__(self, marks: Marks, name: str) -> None:
        self._marks, self._name = marks, name

    @contextmanager
    def solving(self, evaluations: int) -> Iterator[None]:
        before = self._marks.to(self._name, "map")
        self._marks.counts[self._name, "evaluations"] += evaluations
        yield
        self._marks.to(*before)

    @contextmanager
    def pulling(self, terms: int) -> Iterator[None]:
        self._marks.to(self._name, "adjoint_map")
        # Wz and the message, evaluated again
        self._marks.counts[self._name, "graph_evaluations"] += 1
        self._marks.counts[self._name, "products"] += terms
        yield
        self._marks.to("", "backward")


def _timed(
    fn: Callable[..., Any], marks: Marks, name: str, *, unrolled: bool
) -> Callable[..., Any]:
    """The map with marks around it, and around its vector-Jacobian products where it has a graph.

    An evaluation with a graph is the adjoint's; of an unrolled solve it is the solve's own. A
    product with Jᵀ begins when the gradient is at T(z), and ends when it is at z.
    """

    def timed(z: Any, *args: Any) -> Any:
        graph = torch.is_grad_enabled()
        adjoint = marks.in_backward or (graph and not unrolled)
        before = marks.to(name, "adjoint_map" if adjoint else "map")
        marks.counts[name, "graph_evaluations" if adjoint else "evaluations"] += 1
        out = fn(z, *args)
        if adjoint and not marks.in_backward:
            before = (name, "adjoint_solver")  # the solve is over
        if graph:
            counted = "products"  # once for all leaves
            for leaf in pytree.tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(marks.hook(name, "adjoint_map", counted))
                    counted = ""
            for leaf in pytree.tree_leaves(z):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(marks.hook(name, "adjoint_solver"))
        marks.to(*before)
        return out

    return timed


def _gated(args: tuple[Any, ...], marks: Marks) -> tuple[Any, ...]:
    """Views of the tensors that take gradients: past them, gradients have left the solve.

    (A map none of whose arguments takes a gradient has none: then the time until the next mark is
    the adjoint's.)
    """
    leaves, spec = pytree.tree_flatten(args)
    views = {
        i: t.view_as(t) for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad
    }
    if views:
        register_multi_grad_hook(tuple(views.values()), marks.hook("", "backward"))
    found: tuple[Any, ...] = pytree.tree_unflatten(
        [views.get(i, t) for i, t in enumerate(leaves)], spec
    )
    return found
