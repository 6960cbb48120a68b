"""Put marks around every map, solve and adjoint of a model, and take them away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
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

from .timeline import (
    ADJOINT_MAP,
    ADJOINT_SOLVER,
    BACKWARD,
    MAP,
    NORM,
    PREPARE,
    SOLVER,
    Timeline,
)

__all__ = ["EVALUATIONS", "GRAPHS", "PRODUCTS", "instrumented", "solving_layers"]

EVALUATIONS, GRAPHS, PRODUCTS = "evaluations", "graph_evaluations", "products"
"""What is counted a layer: T in the solve, T with a graph for the adjoint, products with Jᵀ."""


def solving_layers(model: nn.Module) -> dict[str, Any]:
    """Layers that solve by an adjoint of their own, by name; branches count one by one."""
    found: dict[str, Any] = {}
    for outer, layer in equilibrium_layers(model).items():
        joint = getattr(layer, "joint", None)
        if joint is not False:
            inner: dict[str, nn.Module] = {outer: layer}
        else:
            prefix = f"{outer}." if outer else ""
            branches: Any = layer.branches
            inner = {f"{prefix}branches.{i}": branch for i, branch in enumerate(branches)}
        found.update(
            {n: m for n, m in inner.items() if isinstance(getattr(m, "adjoint", None), Adjoint)}
        )
    return found


@contextmanager
def instrumented(model: nn.Module, line: Timeline) -> Iterator[None]:
    """Inside the block the model's passes put their marks on ``line``; afterwards all is as before.

    The adjoint of every layer is wrapped, because a solve goes through it: it is given the map and
    hands out the value through which gradients come back. Hooks mark the rest. Nothing waits.
    """
    names = {module: name for name, module in model.named_modules()}
    with ExitStack() as stack:
        for name, layer in solving_layers(model).items():
            own = layer.adjoint
            layer.adjoint = Timed(inner=own, line=line, name=name)
            stack.callback(setattr, layer, "adjoint", own)
        for name, layer in equilibrium_layers(model).items():
            _mark_calls(stack, layer, line, (name, PREPARE))
        for module, name in names.items():
            if isinstance(module, OperatorNorm):
                owner = name.split(".parametrizations.")[0]
                _mark_calls(stack, module, line, (owner, NORM))
        yield


def _mark_calls(stack: ExitStack, module: nn.Module, line: Timeline, key: tuple[str, str]) -> None:
    """While ``module`` runs, the time is ``key``'s, but for what is marked inside."""
    before: list[tuple[str, str]] = []

    def enter(*_: Any) -> None:
        before.append(line.to(key))

    def leave(*_: Any) -> None:
        line.to(before.pop())

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave).remove)


@options
class Timed(Adjoint):
    """Another adjoint with marks: before and after its solve, every evaluation, its backward."""

    inner: Adjoint
    line: Timeline
    name: str

    @property
    def plain(self) -> Adjoint:
        return self.inner.plain

    @property
    def watch(self) -> Watch:
        return _ExpressWatch(self.line, self.name)

    def run(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback | None,
        backward: BackwardStats,
    ) -> Iterated:
        line, name = self.line, self.name
        before = line.to((name, SOLVER))
        args = _gated(fn.args, line) if torch.is_grad_enabled() else fn.args
        timed = _timed(fn.fn, line, name, unrolled=isinstance(self.inner, Unrolled))
        map_ = Map(timed, args, fn.spec, z0, fn.surrogate)
        done = self.inner.run(map_, z0, solver, callback, backward)
        for value in done.value:
            if value.requires_grad:
                value.register_hook(_switch(line, (name, ADJOINT_SOLVER)))
        line.to(before)
        return done


class _ExpressWatch(Watch):
    """The express lane: map and update are one operation, and so are products and their sum."""

    __slots__ = ("_line", "_name")

    def __init__(self, line: Timeline, name: str) -> None:
        self._line, self._name = line, name

    @contextmanager
    def solving(self, evaluations: int) -> Iterator[None]:
        before = self._line.to((self._name, MAP))
        self._line.count((self._name, EVALUATIONS), evaluations)
        yield
        self._line.to(before)

    @contextmanager
    def pulling(self, terms: int) -> Iterator[None]:
        self._line.to((self._name, ADJOINT_MAP))
        self._line.count((self._name, GRAPHS))  # Wz and the message, evaluated again
        self._line.count((self._name, PRODUCTS), terms)
        yield
        self._line.to(("", BACKWARD))


def _switch(line: Timeline, key: tuple[str, str], *, counted: str = "") -> Callable[[Any], None]:
    """A tensor hook: the gradient has come here, and from now on the time is ``key``'s."""

    def hook(_: Any) -> None:
        line.to(key)
        if counted:
            line.count((key[0], counted))

    return hook


def _timed(
    fn: Callable[..., Any], line: Timeline, name: str, *, unrolled: bool
) -> Callable[..., Any]:
    """The map with marks around it, and around its vector-Jacobian products where it has a graph.

    An evaluation with a graph is the adjoint's; of an unrolled solve it is the solve's own.
    """

    def timed(z: Any, *args: Any) -> Any:
        graph = torch.is_grad_enabled()
        part = ADJOINT_MAP if line.in_backward or (graph and not unrolled) else MAP
        before = line.to((name, part))
        line.count((name, EVALUATIONS if part == MAP else GRAPHS))
        out = fn(z, *args)
        if part == ADJOINT_MAP and not line.in_backward:
            before = (name, ADJOINT_SOLVER)  # the solve is over
        if graph:
            _mark_products(z, out, line, name)
        line.to(before)
        return out

    return timed


def _mark_products(z: Any, out: Any, line: Timeline, name: str) -> None:
    """A product with Jᵀ begins when the gradient is at T(z), and ends when it is at z."""
    counted = PRODUCTS
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(_switch(line, (name, ADJOINT_MAP), counted=counted))
            counted = ""  # once for all leaves
    for leaf in pytree.tree_leaves(z):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(_switch(line, (name, ADJOINT_SOLVER)))


class _Gate(torch.autograd.Function):
    """The identity; its backward is where gradients leave the solve for what came before it.

    Autograd runs what was recorded last first, so that this, recorded before the solve, runs when
    all of the solve's backward is done. (A map none of whose arguments takes a gradient has no
    gate: then the time until the next mark is the adjoint's.)
    """

    @staticmethod
    def forward(ctx: Any, line: Timeline, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.line = line
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.line.to(("", BACKWARD))
        return (None, *grads)


def _gated(args: tuple[Any, ...], line: Timeline) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(args)
    at = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
    if not at:
        return args
    gate: Any = _Gate.apply
    for i, passed in zip(at, gate(line, *(leaves[i] for i in at)), strict=True):
        leaves[i] = passed
    found: tuple[Any, ...] = pytree.tree_unflatten(leaves, spec)
    return found
