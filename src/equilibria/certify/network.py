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
from typing import Any, Protocol, overload, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.engine.result import ConvergenceWarning, Solution
from equilibria.engine.tree import sample_norm
from equilibria.problems.norms import SAFETY, UNIT, dense_norm, sum_error
from equilibria.problems.operators import ConvOperator, DenseOperator
from equilibria.problems.problem import HiddenProblem

from .certificate import Certifiable, Certificate, SelfCertifying, certify_layer, distance
from .guarantee import aligned, number, spread
from .monotone_layer import entrywise
from .rounding import direct_convolutions

__all__ = [
    "Enclosed",
    "NetworkCertificate",
    "TrackedNetwork",
    "certify",
    "certify_network",
    "check_norm",
    "plain_copy",
    "tight_solver",
]

Solve = Callable[..., Solution[Any]]
Solved = Callable[[str, Any, Solve, Tensor, Any], Solution[Any]]

_RTOL, _STEPS = 1e-11, 5000
_UP = 1.0 + 1e-13


@dataclass(frozen=True, eq=False)
class Enclosed:
    """An output computed in float64, and what is proven of the exact function."""

    value: Tensor
    lipschitz: float
    """A Lipschitz constant for all inputs, ℓ2."""
    error: Tensor
    """The exact output lies within this of ``value``, ℓ2, [B]."""


@runtime_checkable
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
        self.name, self.notes = type(model).__name__, list[str]()
        self.network = plain_copy(model).double()
        inside: set[nn.Module] = set()  # of modules that answer for all that they hold
        for name, module in self.network.named_modules():
            _intercept(name, module, self.notes, solved, tracked=module not in inside)
            if hasattr(module, "enclose"):
                inside |= set(module.modules()) - {module}

    @torch.inference_mode(False)  # it would not count changes in place
    @torch.no_grad()
    def certify(self, x: Tensor, norm: str = "2") -> NetworkCertificate:
        """What is proven of the labels of x [B, ...] by the states that the solves gave."""
        check_norm(norm)
        self.notes.clear()
        exact = x.detach().double().clone()
        lipschitz = 1.0 if norm == "2" else math.sqrt(math.prod(x.shape[1:])) * _UP
        start = _Tracked.wrap(exact, lipschitz, exact.new_zeros(len(x)), self.notes)
        start.entries = None if norm == "2" else exact.new_ones((1, *x.shape[1:]))
        with warnings.catch_warnings(), direct_convolutions(x):
            warnings.simplefilter("ignore", ConvergenceWarning)
            logits = self.network(start)
        if not isinstance(logits, _Tracked) or logits.ndim != 2 or logits.shape[1] < 2:
            raise TypeError(
                f"certify takes a network with logits [B, classes], and {self.name} gave "
                f"{getattr(logits, 'shape', type(logits).__name__)}."
            )
        logits = logits.current()
        found = _judged(logits, tuple(dict.fromkeys(self.notes)))
        return dataclasses.replace(found, norm=norm)


def _judged(logits: _Tracked, notes: tuple[str, ...]) -> NetworkCertificate:
    values = logits.plain()
    label = values.argmax(1)
    margin = values.gather(1, label[:, None]) - values
    off = 64 * UNIT * (values.abs().amax(1, keepdim=True) + values.abs())
    if logits.rows is None:
        gap, before = torch.full_like(margin, math.sqrt(2.0) * _UP), logits
    else:
        weight, before = logits.rows
        apart = weight[label][:, None] - weight[None]
        gap = apart.norm(dim=2) * (1.0 + 1e-12)
        size = sample_norm([before.plain()])[:, None] * weight.abs().sum(1).max()
        off = off + 4 * sum_error(weight.shape[1] + 1) * size
    off, reach = off + gap * before.error[:, None], gap * before.lipschitz
    if logits.rows is not None and before.entries is not None:
        moved = apart.abs() @ before.entries[0]
        reach = torch.minimum(reach, moved * (1.0 + 1e-12))
    radii = (margin - off) / reach * (1.0 - 1e-13)
    radii = torch.where(radii > 0.0, radii, 0.0)  # NaN too
    radii.scatter_(1, label[:, None], math.inf)
    radius, nearest = radii.min(1)
    return NetworkCertificate(label, radius, nearest, values, logits.error, logits.lipschitz, notes)


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode; constrained weights are those of the model's dtype, made once."""
    network = copy.deepcopy(model).eval()
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


def _intercept(
    name: str, module: nn.Module, notes: list[str], solved: Solved, *, tracked: bool
) -> None:
    """Let the module answer with bounds when it is called with a tracked tensor."""
    changed: Any = module
    if isinstance(module, Enclosing):
        changed.forward = partial(_enclosed, module)
    elif getattr(module, "is_equilibrium", False) and not hasattr(module, "branches"):
        inner = partial(_plainly, name, module, changed.solve, solved)
        if not tracked:  # the module around it asks for the solve, and for what is proven
            changed.solve = inner
            return
        changed.solve = partial(_solved, name or "(the network)", module, inner, notes)
        changed.observed_solve = changed.solve  # which forward calls


def _enclosed(module: Enclosing, x: _Tracked) -> Tensor:
    x = x.current()
    found = module.enclose(x.plain())
    return x.passed(found.value, found.lipschitz, found.error)


def _plainly(
    name: str, layer: Any, solve: Solve, solved: Solved, x: Tensor, z0: Any = None, **options: Any
) -> Solution[Any]:
    """A solve as ``solved`` wants it, with the other options that were given."""
    options.pop("solver", None)
    return solved(name, layer, partial(solve, **options), x, z0)


def _solved(
    name: str,
    layer: Any,
    solve: Solve,
    notes: list[str],
    x: _Tracked,
    z0: Any = None,
    **options: Any,
) -> Solution[Any]:
    """A solve whose answer carries what the layer's certificate proves."""
    x = x.current()
    solution = solve(x.plain(), z0, **options)
    found = distance(layer, x.plain(), solution.value)
    if found.lipschitz is None:
        notes.append(f"layer {name}: {found.note}")
    constant = math.inf if found.lipschitz is None else found.lipschitz
    wrap = partial(x.passed, constant=constant, own=found.error)
    value = pytree.tree_map_only(Tensor, wrap, solution.value)
    if x.entries is not None and found.lipschitz is not None and hasattr(layer, "inclusion"):
        size, entries = entrywise(layer, x.plain(), x.entries)
        value.lipschitz = min(value.lipschitz, size)
        value.bounded(entries)
    return dataclasses.replace(solution, value=value)


# ---------------------------------------------------------------------- tracked tensors


class _Tracked(Tensor):
    """A tensor [B, ...] with a Lipschitz constant in the input and an error bound [B]."""

    lipschitz: float
    error: Tensor
    rows: tuple[Tensor, _Tracked] | None
    """V and h, where this is Vh + d."""
    entries: Tensor | None
    """e [1, ...]: no entry moves by more than ε·e when the input moves by ε in ℓ∞."""
    notes: list[str]
    version: int
    """Of the numbers: where torch counts another one, they were changed in place since."""

    @staticmethod
    def wrap(value: Tensor, lipschitz: float, error: Tensor, notes: list[str]) -> _Tracked:
        made: _Tracked = value.as_subclass(_Tracked)
        made.lipschitz, made.error, made.rows, made.notes = lipschitz, error, None, notes
        made.entries, made.version = None, value._version
        return made

    def bounded(self, entries: Tensor | None) -> None:
        """Take a bound on each entry, and what follows for the norm."""
        self.entries = entries
        if entries is not None:
            self.lipschitz = min(self.lipschitz, float(entries.norm()) * (1.0 + 1e-9))

    def plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.as_subclass(self, Tensor)

    def as_subclass(self, cls: Any) -> Any:
        """Itself: a network cannot take off what is known of it."""
        return self

    def current(self) -> _Tracked:
        """Itself, or where its numbers were changed in place, them with nothing known."""
        value = self.plain()
        if value._version == self.version:
            return self
        self.notes.append("no Lipschitz constant is known for a value that is changed in place")
        return self.unknown(value)

    def passed(self, value: Tensor, constant: float, own: Tensor | float = 0.0) -> _Tracked:
        """``value``: of a function with this constant at self, with an error of its own."""
        rounding = SAFETY * 8 * UNIT * sample_norm([value])
        carried = torch.where(self.error > 0.0, self.error * constant, 0.0)
        lipschitz = self.lipschitz * constant if self.lipschitz else 0.0
        error = (carried + own + rounding) * _UP
        return _Tracked.wrap(value, lipschitz * _UP, error, self.notes)

    def unknown(self, value: Tensor) -> _Tracked:
        """``value``: made from self in a way of which nothing is known."""
        return _Tracked.wrap(value, math.inf, torch.full_like(self.error, math.inf), self.notes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        leaves = pytree.tree_leaves((args, kwargs))
        sources = [leaf.current() for leaf in leaves if isinstance(leaf, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            if func == _DATA:  # the same memory, but changes of it would not be counted
                func, name = Tensor.detach, "detach"
            plain, named = pytree.tree_map_only(cls, cls.plain, (args, kwargs))
            out = None if name in _READS else func(*plain, **named)
            if name in _READS or not _known_kinds(out):
                raise TypeError(
                    f"certify cannot follow a network that decides by its numbers ({name} of a "
                    "value that depends on the input)."
                )
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
                return out
            found = None
            if isinstance(out, Tensor):
                found = _bounds(name, func, sources, plain, named, out)
            if found is None:
                sources[0].notes.append(f"no Lipschitz constant is known for {name}")
                return pytree.tree_map_only(Tensor, sources[0].unknown, out)
            if out is plain[0]:  # such as relu(x, inplace=True): x has these bounds, too
                vars(args[0]).update(vars(found))
            return found


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_READS = {
    "__bool__", "__float__", "__int__", "__index__", "__contains__", "item", "tolist", "equal",
    "allclose", "is_nonzero",
}  # fmt: skip
"""What would let a network branch on its numbers."""
_FACTS = (int, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout)
"""What may be known of a tensor apart from its numbers: shapes, kinds, places."""


def _known_kinds(out: Any) -> bool:
    """Whether an answer is made of tensors and facts: an array, say, would leave torch."""
    return all(isinstance(leaf, (Tensor, *_FACTS)) for leaf in pytree.tree_leaves(out))


def _bounds(
    name: str, func: Any, sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor
) -> _Tracked | None:
    """``out`` of a function of ``sources`` with what is proven of it; None where nothing is."""
    if name in ("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"):
        return _sum(sources, args, kwargs, out)
    if name == "cat":
        return _cat(sources, args, kwargs, out)
    u, rule = sources[0], _RULES.get(name)
    if rule is None or len(sources) > 1 or out.ndim == 0 or len(out) != len(u):
        return None
    bound = rule(u.plain(), args, kwargs, out)
    if bound is None:
        return None
    found = u.passed(out, *bound)
    if name == "linear":
        found.rows = (_named(args, kwargs)["weight"], u)
    if u.entries is not None:
        found.bounded(_moved(name, func, u.entries, args, kwargs))
    return found


def _sum(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    if kwargs.get("alpha", 1) != 1 or len(args) > 2 or any(u.shape != out.shape for u in sources):
        return None
    first = sources[0].passed(out, 1.0)
    for other in sources[1:]:
        first.lipschitz = (first.lipschitz + other.lipschitz) * _UP
        first.error = (first.error + other.error) * _UP
    return first


def _cat(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    parts = args[0] if args else kwargs["tensors"]
    if dim == 0 or len(sources) != len(parts) or len(out) != len(sources[0]):
        return None
    lipschitz = math.sqrt(sum(u.lipschitz**2 for u in sources)) * _UP
    error = torch.stack([u.error for u in sources]).norm(dim=0) * _UP
    return _Tracked.wrap(out, lipschitz, error, sources[0].notes)


_ENTRYWISE = {"relu", "tanh", "softplus", "clamp", "clamp_min", "clamp_max", "abs", "neg", "relu6"}
_MOVES = {
    "flatten",
    "reshape",
    "view",
    "contiguous",
    "clone",
    "detach",
    "double",
    "pixel_unshuffle",
}


def _moved(name: str, func: Any, e: Tensor, args: Any, kwargs: Any) -> Tensor | None:
    """The bound on each entry after an operation on values with the bound e [1, ...]; or None."""
    if name in _ENTRYWISE:
        return e
    if name in _MOVES and args:
        moved: Tensor = func(e.expand_as(args[0]).contiguous(), *args[1:], **kwargs)
        return moved[:1]
    if name not in ("linear", "conv2d"):
        return None
    rest = {key: value for key, value in kwargs.items() if key not in ("input", "weight", "bias")}
    weight = _named(args, kwargs)["weight"]
    image: Tensor = func(e, weight.abs(), None, *args[3:], **rest)
    return image * (1.0 + 1e-9)  # and its rounding


# ---------------------------------------------------------------------- one function at a time

Bound = tuple[float, Tensor | float]
Rule = Callable[[Tensor, Any, Any, Tensor], "Bound | None"]
"""(u, args, kwargs, f(u)) → a Lipschitz constant of f, and what the computed f(u) may be off by
beside a few units in its last place; None where nothing is known. f(u) has as many samples as u."""
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


def _named(
    args: Any, kwargs: Any, names: str = "input weight bias stride padding dilation groups"
) -> dict[str, Any]:
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def _same_entries(constant: float) -> Rule:
    """A function of each entry, or a rearrangement, with this constant."""

    def rule(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
        # No copies, by broadcasting; not the bits read as another type.
        return (constant, 0.0) if (out.numel(), out.dtype) == (u.numel(), u.dtype) else None

    return rule


_rule(
    "relu", "tanh", "clamp", "clamp_min", "clamp_max", "abs", "neg", "hardtanh",
    "relu6", "softshrink", "flatten", "reshape", "view", "contiguous", "unsqueeze", "detach",
    "clone", "double", "pixel_unshuffle", "pixel_shuffle", "unflatten",
)(_same_entries(1.0))  # fmt: skip
_rule("sigmoid")(_same_entries(0.25))
_rule("silu")(_same_entries(1.1))  # the largest slope is 1.0998


@_rule("gelu")
def _gelu(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """The largest slope is 1.1290. In u·(1 + erf) the sum cancels where u is negative."""
    return 1.13, SAFETY * 8 * UNIT * sample_norm([u])


@_rule("softplus")
def _softplus(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """Above its threshold torch takes u, which is log(1 + e^{−threshold})/β off at most."""
    given = _named(args, kwargs, "input beta threshold")
    beta, threshold = given.get("beta", 1.0), given.get("threshold", 20.0)
    off = math.log1p(math.exp(-threshold)) / abs(beta)
    above = (beta * u > threshold).to(u.dtype)
    return (1.0, off * sample_norm([above]) * _UP) if threshold >= 20.0 else None


@_rule("leaky_relu")
def _leaky(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    slope = _named(args, kwargs, "input negative_slope").get("negative_slope", 0.01)
    return max(1.0, abs(float(slope))), 0.0


@_rule("permute")
def _permuted(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """A permutation of dimensions that leaves the batch in its place."""
    dims = pytree.tree_leaves((args[1:], kwargs))
    return (1.0, 0.0) if int(dims[0]) % out.ndim == 0 else None


@_rule("transpose")
def _transposed(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    dims = [int(d) % out.ndim for d in pytree.tree_leaves((args[1:], kwargs))]
    return (1.0, 0.0) if 0 not in dims else None


@_rule("dropout", "dropout1d", "dropout2d", "feature_dropout")
def _dropout(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    training = _named(args, kwargs, "input p training").get("training", True)
    return None if training else (1.0, 0.0)


@_rule("mul", "__mul__", "__rmul__")
def _scaled(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    numbers = [value for value in args if isinstance(value, (int, float))]
    return (abs(float(numbers[0])), 0.0) if numbers else None


@_rule("div", "__truediv__", "true_divide")
def _quotient(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    by = args[1] if len(args) == 2 and args[0].shape == u.shape else None
    if not isinstance(by, (int, float)) or by == 0 or kwargs.get("rounding_mode") is not None:
        return None
    return 1.0 / abs(float(by)) * _UP, 0.0


@_rule("mean")
def _mean(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    dims = pytree.tree_leaves((args[1:], {k: v for k, v in kwargs.items() if k == "dim"}))
    if not dims or any(d % u.ndim == 0 for d in dims if not isinstance(d, bool)):
        return None
    count = u.numel() // max(out.numel(), 1)
    return _averaged(u, 1.0 / math.sqrt(count), count)


def _averaged(u: Tensor, constant: float, terms: int) -> Bound:
    """A linear map of norm ``constant`` and of the norm of its magnitude, sums of ``terms``."""
    own = SAFETY * sum_error(terms) * max(1.0, constant) * sample_norm([u])
    return constant * _UP, own


def _magnitude(weight: Tensor) -> float:
    """‖|W|‖₂ ≤ √(‖W‖₁‖W‖∞) of a matrix or a convolution, any stride, padding and dilation."""
    rows = weight.abs().flatten(1).sum(1).max()
    columns = weight.abs().transpose(0, 1).flatten(1).sum(1).max()
    return float((rows * columns).sqrt()) * (1.0 + 1e-12)


def _linear_map(u: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm: float) -> Bound:
    terms = weight[0].numel() + 1
    size = _magnitude(weight) * sample_norm([u])
    if bias is not None:
        size = size + bias.abs().max() * math.sqrt(out[0].numel())
    return norm, SAFETY * sum_error(terms) * size


@_rule("linear")
def _dense(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    given = _named(args, kwargs)
    if u.ndim != 2:
        return None
    norm = DenseOperator(given["weight"]).norm_upper()
    return _linear_map(u, given["weight"], given.get("bias"), out, norm)


@_rule("conv2d")
def _convolution(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    given = _named(args, kwargs)
    weight = given["weight"]
    if u.ndim != 4 or given.get("groups", 1) != 1:
        return None
    norm, padding = _magnitude(weight), given.get("padding", 0)
    uneven = padding == "same" and not all(side % 2 for side in weight.shape[2:])
    if given.get("dilation", 1) in (1, (1, 1)) and not uneven:
        padding = 0 if padding == "valid" else padding
        operator = ConvOperator(weight, given.get("stride", 1), padding)
        norm = min(norm, operator.norm_upper_on(out.shape[1:]))
    return _linear_map(u, weight, given.get("bias"), out, norm)


@_rule("batch_norm")
def _batch_norm(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """Of torch.nn.functional; torch.batch_norm has its arguments in another order."""
    weight, bias = (kwargs.get(name) for name in ("weight", "bias"))
    if len(args) != 3 or kwargs.get("training", True) or args[2] is None:
        return None
    factor = (args[2] + kwargs["eps"]).rsqrt()
    if weight is not None:
        factor = factor * weight.abs()
    shift = args[1].abs() * factor
    if bias is not None:
        shift = shift + bias.abs()
    own = SAFETY * 8 * UNIT * shift.max() * math.sqrt(out[0].numel())
    return float(factor.max()) * _UP, own


def _pair(value: Any) -> tuple[Any, Any]:
    return (value, value) if isinstance(value, (int, float)) else tuple(value)


def _pool(maximum: bool) -> Rule:
    """Blocks of k pixels: each output sees k inputs, and each input is seen by ⌈k/s⌉ at most."""
    rest = "dilation ceil_mode" if maximum else "ceil_mode count_include_pad divisor_override"

    def rule(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
        given = _named(args, kwargs, f"input kernel_size stride padding {rest}")
        if given.get("dilation", 1) not in (1, (1, 1)) or given.get("divisor_override"):
            return None
        kernel = _pair(given["kernel_size"])
        step = _pair(given.get("stride") or kernel)
        seen = math.prod(math.ceil(k / s) for k, s in zip(kernel, step, strict=True))
        padded = given.get("padding", 0) not in (0, (0, 0)) or given.get("ceil_mode", False)
        if maximum or padded:  # rows of sum 1; at an edge fewer may be averaged
            constant = math.sqrt(seen)
        else:  # columns of at most seen/k
            constant = math.sqrt(seen / math.prod(kernel))
        return _averaged(u, constant, math.prod(kernel))

    return rule


_rule("avg_pool2d")(_pool(maximum=False))
_rule("max_pool2d")(_pool(maximum=True))


@_rule("interpolate")
def _resized(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """A resize of maps, the same along rows and columns: ‖A ⊗ B‖ = ‖A‖‖B‖, from its matrices."""
    # With both options torch's weights along an axis depend on the size of the other.
    if u.ndim != 4 or (kwargs["antialias"] and kwargs["align_corners"]):
        return None
    constant = magnitude = 1.0
    key = "size" if kwargs["scale_factor"] is None else "scale_factor"
    for axis in (0, 1):
        length, target = u.shape[2 + axis], list(_pair(kwargs[key]))
        target[1 - axis] = 1 if key == "size" else 1.0
        line = torch.eye(length, dtype=u.dtype).view(length, 1, length, 1)
        line = line if axis == 0 else line.mT
        matrix = F.interpolate(line, **(kwargs | {key: target})).flatten(1)
        constant *= dense_norm(matrix).upper
        magnitude *= dense_norm(matrix.abs()).upper
    # Its weights come from places, which are rounded: of 16 pixels, at an index below n.
    terms = 16 + max(u.shape[2:])
    return constant * _UP, _averaged(u, magnitude, terms)[1]


@_rule("adaptive_avg_pool2d")
def _adaptive(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    pairs = list(zip(u.shape[-2:], out.shape[-2:], strict=True))
    if any(a % b for a, b in pairs):
        return None
    count = math.prod(a // b for a, b in pairs)
    return _averaged(u, 1.0 / math.sqrt(count), count)


@_rule("pad")
def _padded(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """With a constant, and not in place of samples."""
    given = _named(args, kwargs, "input pad mode")
    inside = len(given["pad"]) <= 2 * (u.ndim - 1)
    return (1.0, 0.0) if given.get("mode", "constant") == "constant" and inside else None


@_rule("__getitem__")
def _item(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """Slices keep some entries; of the batch, all."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    kept = all(isinstance(i, slice) or i is Ellipsis for i in index)
    return (1.0, 0.0) if kept else None
