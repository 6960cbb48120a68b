"""What is proven about the prediction of a whole network: no input within a radius changes it.

The network runs once in float64, on weights cast up from its own dtype, with every equilibrium
solved to a tight tolerance. Each intermediate value y(x) carries a Lipschitz constant of x ↦ y for
all inputs, and a bound on ‖y − y*‖, y* the value of exact arithmetic at the exact equilibria. They
compose: y = F(u) with a constant K of F has K·Lip(u) and K·error(u) plus F's own error, a sum adds
both. With logits l = Vh + d

    |(l_y − l_j)(x′) − (l_y − l_j)(x)| ≤ ‖V_y − V_j‖·Lip(h)·‖x′ − x‖,

so that the label y holds within the least of (l_y − l_j)/(‖V_y − V_j‖·Lip(h)) over the classes j,
after subtracting the error of the margin.

Radii in ℓ∞. With ‖x′ − x‖∞ ≤ ε the input moves by at most √n·ε in ℓ2, which gives every network a
radius. Beside it, as far as it is known, goes a bound on each entry, |y(x′) − y(x)| ≤ ε·e: e = 1 at
the input, |W|e after a linear map, e after a function that is applied entrywise and nonexpansive,
and what ``monotone_layer.entrywise`` derives after a monotone layer. Then ‖y(x′) − y(x)‖ ≤ ε·‖e‖,
and |V_y − V_j|e bounds how a margin can move.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.engine.result import ConvergenceWarning, Solution
from equilibria.engine.tree import sample_norm
from equilibria.problems.norms import UNIT, sum_error
from equilibria.problems.problem import HiddenProblem

from .certificate import Certifiable, Certificate, SelfCertifying, certify_layer, distance
from .function_bounds import UP
from .guarantee import aligned, number, spread
from .monotone_layer import entrywise
from .rounding import direct_convolutions
from .tracked import UNSEEN, CannotFollowError, NoEscape, Tracked

Solve = Callable[..., Solution[Any]]
Solved = Callable[[str, Any, Solve, Tensor, Any], Solution[Any]]

_RTOL, _STEPS = 1e-11, 5000


@dataclass(frozen=True, eq=False)
class Enclosed:
    """An output computed in float64, and what is proven of the exact function."""

    value: Tensor
    lipschitz: float
    """A Lipschitz constant for all inputs, ℓ2."""
    error: Tensor
    """The exact output lies within this of ``value``, ℓ2, [B]."""


class Enclosing(Protocol):
    """A module that says itself what is proven of its output."""

    def enclose(self, x: Tensor) -> Enclosed: ...


@dataclass(frozen=True, eq=False)
class NetworkCertificate:
    """The label of each sample, and the radius within which no input has another. ``print`` it."""

    label: Tensor
    """The class of the largest logit, [B]."""
    radius: Tensor
    """No input within this distance of x has another label; 0 where nothing is proven. [B]."""
    nearest: Tensor
    """The class that limits the radius, [B]."""
    logits: Tensor
    """[B, classes], float64, every equilibrium solved to a tight tolerance."""
    error: Tensor
    """The exact logits lie within this of ``logits``, ℓ2, [B]."""
    lipschitz: float
    """A Lipschitz constant of x ↦ logits for all inputs, from ``norm`` to ℓ2; inf: none proven."""
    notes: tuple[str, ...] = ()
    norm: str = "2"
    """Of the radius: "2" or "inf"."""

    def __str__(self) -> str:
        rows = [
            ("labels", ", ".join(map(str, self.label.tolist()[:8])) or "none"),
            ("radius", spread(self.radius)),
            ("Lipschitz", number(self.lipschitz)),
            ("‖logits − exact‖ ≤", spread(self.error)),
            *(("note", note) for note in self.notes),
        ]
        proven = int((self.radius > 0).sum())
        kind = "ℓ∞" if self.norm == "inf" else "ℓ2"
        head = f"label proven within the radius ({kind}) for {proven} of {len(self.radius)} samples"
        return aligned(head, rows)


def tight_solver(layer: Any) -> Any:
    """The layer's own solver with a tolerance near the accuracy of float64."""
    solver = getattr(layer.solver, "inner", layer.solver)  # of BestIterate
    return dataclasses.replace(solver, rtol=_RTOL, atol=0.0, max_steps=_STEPS)


@overload
def certify(layer: SelfCertifying, x: Tensor | None = None, z: Any = None) -> Any: ...


@overload
def certify(
    layer: Certifiable | HiddenProblem, x: Tensor | None = None, z: Tensor | None = None
) -> Certificate: ...


@overload
def certify(layer: nn.Module, x: Tensor, *, norm: str = "2") -> NetworkCertificate: ...


def certify(layer: Any, x: Tensor | None = None, z: Any = None, *, norm: str = "2") -> Any:
    """What is proven about the equilibrium of a layer at x and about z, or of a network's label.

    ``certify(layer, x)`` solves with the layer's own solver (of a copy in eval mode: the layer is
    left as it is); ``certify(layer, x, z)`` judges a given state [B, *state], at any stage of a
    solve. ``certify(problem, z=z)`` takes a problem in place of the layer. A layer with a method
    ``certify(x, z)`` (those without a hidden problem: MonotoneDEQ, DeepOptEq, DEQ, MultiBranch)
    is asked itself, and answers with a ``MapCertificate`` or a ``CompositeCertificate``.

    ``certify(model, x)`` of any other module with logits [B, classes] gives for each sample the
    radius within which its label cannot change (``certify_network``), in the ℓ2 norm or, with
    ``norm="inf"``, in the maximum norm.
    """
    layers = isinstance(layer, (HiddenProblem, SelfCertifying, Certifiable))
    if layers or z is not None or not isinstance(layer, nn.Module):
        if norm != "2":
            raise ValueError(
                f"norm={norm!r} is for the radius of a network's label; what certify proves of a "
                'layer or a problem is in ℓ2. Leave norm out, or give norm="2".'
            )
        return certify_layer(layer, x, z)
    if x is None:
        raise TypeError(f"certify({type(layer).__name__}, x) needs the input x [B, ...].")
    return certify_network(layer, x, norm)


def check_norm(norm: object) -> None:
    """Raise unless it is a norm of radii."""
    if norm not in ("2", "inf"):
        raise ValueError(f'norm={norm!r}: expected "2" or "inf".')


def certify_network(model: nn.Module, x: Tensor, norm: str = "2") -> NetworkCertificate:
    """The certified label of every sample of x [B, ...]; see ``certify``.

    The network that is certified is the one in evaluation mode at its exact equilibria: weights and
    running statistics are those of ``model``, constraints evaluated in its own dtype. Where an
    operation has no known Lipschitz constant, the radius is 0 and a note names it. Radii are in
    units of x: for images normalized by (pixels − mean)/std multiply by the smallest std.
    """
    return TrackedNetwork(model).certify(x, norm)


def _tightly(name: str, layer: Any, solve: Solve, x: Tensor, z0: Any) -> Solution[Any]:
    return solve(x, z0, solver=tight_solver(layer))


class TrackedNetwork:
    """A copy in float64 whose layers answer with bounds; ``solved`` says how each is solved.

    ``solved(name, layer, solve, x, z0)`` gives a Solution of the layer, whose own solve of x, in
    float64, is ``solve``. Any z will do: what is proven of it is asked of the layer.
    """

    def __init__(self, model: nn.Module, solved: Solved = _tightly) -> None:
        self.name = type(model).__name__
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise TypeError(
                f"certify cannot follow the scripted modules of {self.name}; give the network as "
                "it was before torch.jit."
            )
        self.network = plain_copy(model).double()
        inside: set[nn.Module] = set()  # of modules that answer for all that they hold
        for name, module in self.network.named_modules():
            changed: Any = module
            if _encloses(module):
                changed.forward = partial(_enclosed, changed)
                inside |= set(module.modules()) - {module}
            else:
                _intercept(name, module, solved, tracked=module not in inside)

    @torch.inference_mode(False)  # it would not count changes in place
    @torch.no_grad()
    def certify(self, x: Tensor, norm: str = "2") -> NetworkCertificate:
        """What is proven of the labels of x [B, ...] by the states that the solves gave."""
        check_norm(norm)
        exact = x.detach().double().clone()
        lipschitz = 1.0 if norm == "2" else math.sqrt(math.prod(x.shape[1:])) * UP
        start = Tracked.wrap(exact, lipschitz, exact.new_zeros(len(x)), notes=[])
        start.entries = None if norm == "2" else exact.new_ones((1, *x.shape[1:]))
        with warnings.catch_warnings(), direct_convolutions(x), NoEscape():
            warnings.simplefilter("ignore", ConvergenceWarning)
            try:
                logits = self.network(start)
            except CannotFollowError as error:
                raise TypeError(str(error)) from error
            except RuntimeError as error:  # of torch's interpreter
                if UNSEEN not in start.notes:
                    raise
                raise TypeError(UNSEEN) from error
        if not isinstance(logits, Tracked) or logits.ndim != 2 or logits.shape[1] < 2:
            raise TypeError(
                f"certify takes a network with logits [B, classes], and {self.name} gave "
                f"{getattr(logits, 'shape', type(logits).__name__)}."
            )
        return _judged(logits.current(), norm)


def _judged(logits: Tracked, norm: str) -> NetworkCertificate:
    values = logits.numbers
    label = values.argmax(1)
    margin = values.gather(1, label[:, None]) - values
    off = 64 * UNIT * (values.abs().amax(1, keepdim=True) + values.abs())
    if logits.rows is None:
        gap, before = torch.full_like(margin, math.sqrt(2.0) * UP), logits
    else:
        weight, before, norms = logits.rows
        apart = weight[label][:, None] - weight[None]
        gap = sample_norm([apart.flatten(0, 1)]).view_as(margin) * (1.0 + 1e-12)
        size = norms[:, None] * weight.abs().sum(1).max()
        off = off + 4 * sum_error(weight.shape[1] + 1) * size
    off, reach = off + gap * before.error[:, None], gap * before.lipschitz
    if logits.rows is not None and before.entries is not None:
        moved = apart.abs() @ before.entries[0]
        reach = torch.minimum(reach, moved * (1.0 + 1e-12))
    radii = (margin - off) / reach * (1.0 - 1e-13)
    radii = torch.where(radii > 0.0, radii, 0.0)  # NaN too
    radii.scatter_(1, label[:, None], math.inf)
    radius, nearest = radii.min(1)
    notes = tuple(dict.fromkeys(logits.notes))
    known = logits.error, logits.lipschitz
    return NetworkCertificate(label, radius, nearest, values, *known, notes, norm)


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode; constrained weights are those of the model's dtype, made once."""
    network: nn.Module = copy.deepcopy(getattr(model, "_orig_mod", model)).eval()  # not compiled
    for module in network.modules():
        for name, made in getattr(module, "parametrizations", {}).items():
            weight = getattr(module, name).detach()
            made.register_buffer("made", weight)
            made.forward = partial(_made, made)
    return network


def _made(constrained: nn.Module) -> Tensor:
    """The weight, which moves with the module."""
    made: Tensor = constrained.get_buffer("made").clone()
    return made


def _encloses(module: nn.Module) -> bool:
    """Whether it is ``Enclosing``, and no ``forward`` was put above its ``enclose`` later."""
    kinds = (module, *type(module).__mro__)
    return "enclose" in next(vars(k) for k in kinds if {"forward", "enclose"} & vars(k).keys())


def _intercept(name: str, module: nn.Module, solved: Solved, *, tracked: bool) -> None:
    """Let the module answer with bounds when it is called with a tracked tensor."""
    changed: Any = module
    if getattr(module, "is_equilibrium", False) and not hasattr(module, "branches"):
        inner = partial(_plainly, name, module, changed.solve, solved)
        if not tracked:  # the module around it asks for the solve, and for what is proven
            changed.solve = inner
            return
        changed.solve = partial(_solved, name or "(the network)", module, inner)
        changed.observed_solve = changed.solve  # which forward calls


def _enclosed(module: Enclosing, x: Tracked) -> Tensor:
    x = x.current()
    with torch._C.DisableTorchFunction():  # plain tensors alone
        found = module.enclose(x.numbers)
    return x.passed(found.value, found.lipschitz, found.error)


def _plainly(
    name: str, layer: Any, solve: Solve, solved: Solved, x: Tensor, z0: Any = None, **options: Any
) -> Solution[Any]:
    """A solve as ``solved`` wants it, with the other options that were given."""
    options.pop("solver", None)
    return solved(name, layer, partial(solve, **options), x, z0)


def _solved(
    name: str, layer: Any, solve: Solve, x: Tracked, z0: Any = None, **options: Any
) -> Solution[Any]:
    """A solve whose answer carries what the layer's certificate proves."""
    x = x.current()
    with torch._C.DisableTorchFunction():  # plain tensors alone; a problem may use torch.func
        solution = solve(x.numbers, z0, **options)
        found = distance(layer, x.numbers, solution.value)
    if found.lipschitz is None:
        x.notes.append(f"layer {name}: {found.note}")
    constant = math.inf if found.lipschitz is None else found.lipschitz
    wrap = partial(x.passed, constant=constant, own=found.error)
    value = pytree.tree_map_only(Tensor, wrap, solution.value)
    if x.entries is not None and found.lipschitz is not None and hasattr(layer, "inclusion"):
        size, entries = entrywise(layer, x.numbers, x.entries)
        for part in pytree.tree_leaves(value):
            part.lipschitz = min(part.lipschitz, size)
            part.bounded(entries)
    return dataclasses.replace(solution, value=value)
