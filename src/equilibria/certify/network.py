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
from collections.abc import Callable, Iterator
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
from .guarantee import number, spread
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
        width = max(len(name) for name, _ in rows)
        return "\n".join([head, *(f"  {name:<{width}}  {text}" for name, text in rows)])


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

    @torch.no_grad()
    def certify(self, x: Tensor, norm: str = "2") -> NetworkCertificate:
        """What is proven of the labels of x [B, ...] by the states that the solves gave."""
        check_norm(norm)
        self.notes.clear()
        exact = x.detach().double()
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
        found = _judged(logits, tuple(dict.fromkeys(self.notes)))
        return dataclasses.replace(found, norm=norm)


def _judged(logits: _Tracked, notes: tuple[str, ...]) -> NetworkCertificate:
    values = logits.plain()
    label = values.argmax(1)
    rows, lipschitz, error = logits.rows, logits.lipschitz, logits.error
    margin = values.gather(1, label[:, None]) - values
    if rows is None:
        gap = torch.full_like(margin, math.sqrt(2.0) * _UP)
        reach, off = gap * lipschitz, gap * error[:, None]
    else:
        weight, before = rows
        gap = (weight[label][:, None] - weight[None]).norm(dim=2) * (1.0 + 1e-12)
        reach, off = gap * before.lipschitz, gap * before.error[:, None]
        if before.entries is not None:
            moved = (weight[label][:, None] - weight[None]).abs() @ before.entries[0]
            reach = torch.minimum(reach, moved * (1.0 + 1e-12))
    off = off + 64 * UNIT * (values.abs().amax(1, keepdim=True) + values.abs())
    if rows is not None:
        weight, before = rows
        size = sample_norm([before.plain()])[:, None] * weight.abs().sum(1).max()
        off = off + 4 * sum_error(weight.shape[1] + 1) * size
    radii = (margin - off) / reach * (1.0 - 1e-13)
    radii = torch.where(radii > 0.0, radii, 0.0)  # NaN too
    radii.scatter_(1, label[:, None], math.inf)
    radius, nearest = radii.min(1)
    return NetworkCertificate(label, radius, nearest, values, error, lipschitz, notes)


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
        changed.observed_solve = changed.solve  # of layers that watch their own map
        changed.forward = lambda x, z0=None: changed.solve(x, z0).value


def _enclosed(module: Enclosing, x: _Tracked) -> Tensor:
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

    @staticmethod
    def wrap(value: Tensor, lipschitz: float, error: Tensor, notes: list[str]) -> _Tracked:
        made: _Tracked = value.as_subclass(_Tracked)
        made.lipschitz, made.error, made.rows, made.notes = lipschitz, error, None, notes
        made.entries = None
        return made

    def bounded(self, entries: Tensor | None) -> None:
        """Take a bound on each entry, and what follows for the norm."""
        self.entries = entries
        if entries is not None:
            self.lipschitz = min(self.lipschitz, float(entries.norm()) * (1.0 + 1e-9))

    def plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    def passed(self, value: Tensor, constant: float, own: Tensor | float = 0.0) -> _Tracked:
        """``value``: of a function with this constant at self, with an error of its own."""
        rounding = SAFETY * 8 * UNIT * sample_norm([value])
        carried = torch.where(self.error > 0.0, self.error * constant, 0.0)
        lipschitz = self.lipschitz * constant if self.lipschitz else 0.0
        error = (carried + own + rounding) * _UP
        return _Tracked.wrap(value, lipschitz * _UP, error, self.notes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in _READS:
            raise TypeError(
                f"certify cannot follow a network that decides by its numbers ({name} of a value "
                "that depends on the input)."
            )
        with torch._C.DisableTorchFunctionSubclass():
            if name == "as_subclass":
                return func(*args, **kwargs)
            unwrap = partial(Tensor.as_subclass, cls=Tensor)
            plain, named = pytree.tree_map_only(cls, unwrap, (args, kwargs))
            out = func(*plain, **named)
            if not isinstance(out, Tensor):
                return out
            sources = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls)]
            rule = _RULES.get(name)
            found = None if rule is None else rule(sources, plain, named, out)
            if found is None:
                first = sources[0]
                first.notes.append(f"no Lipschitz constant is known for {name}")
                found = cls.wrap(out, math.inf, torch.full_like(first.error, math.inf), first.notes)
            elif len(sources) == 1 and sources[0].entries is not None:
                found.bounded(_moved(name, func, sources[0].entries, plain, named))
            return found


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
    weight = kwargs["weight"] if "weight" in kwargs else args[1]
    image: Tensor = func(e, weight.abs(), None, *args[3:], **rest)
    return image * (1.0 + 1e-9)  # and its rounding


_READS = {"__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "equal"}
"""What would let a network branch on its numbers, or leave torch with them."""

Rule = Callable[[list[_Tracked], Any, Any, Tensor], "_Tracked | None"]


def _same_batch(u: _Tracked, out: Tensor) -> bool:
    return out.ndim > 0 and len(out) == len(u)


def _unary(constant: float) -> Rule:
    """An elementwise function, or a rearrangement, with this constant."""

    def rule(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
        single = len(sources) == 1 and _same_batch(sources[0], out)
        single = single and out.numel() == sources[0].numel()  # no copies, by broadcasting
        single = single and out.dtype == sources[0].dtype  # not the bits read as another type
        return sources[0].passed(out, constant) if single else None

    return rule


def _softplus(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    """Above its threshold torch takes x, a jump of log(1 + e^{−threshold})/β: rounding at 20."""
    threshold = kwargs.get("threshold", args[2] if len(args) > 2 else 20.0)
    return sources[0].passed(out, 1.0) if threshold >= 20.0 else None


def _leaky(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    slope = kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01)
    return sources[0].passed(out, max(1.0, abs(float(slope))))


def _permuted(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    """A permutation of dimensions that leaves the batch in its place."""
    dims = pytree.tree_leaves((args[1:], kwargs))
    return sources[0].passed(out, 1.0) if int(dims[0]) % out.ndim == 0 else None


def _transposed(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    dims = [int(d) % out.ndim for d in pytree.tree_leaves((args[1:], kwargs))]
    return sources[0].passed(out, 1.0) if 0 not in dims else None


def _dropout(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    return None if training else sources[0].passed(out, 1.0)


def _sum(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    scale = kwargs.get("alpha", 1)
    if scale != 1 or not all(_same_batch(u, out) and u.shape == out.shape for u in sources):
        return None
    first = sources[0].passed(out, 1.0)
    for other in sources[1:]:
        first.lipschitz = (first.lipschitz + other.lipschitz) * _UP
        first.error = (first.error + other.error) * _UP
    return first


def _scaled(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    """Multiplication with, or division by, a number."""
    if len(sources) != 1 or len(args) != 2:
        return None
    first, second = args
    divided = isinstance(first, Tensor) and isinstance(second, (int, float))
    factor = second if divided else first
    if not isinstance(factor, (int, float)):
        return None
    return sources[0].passed(out, abs(float(factor)))


def _quotient(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    if len(sources) != 1 or len(args) != 2 or not isinstance(args[1], (int, float)):
        return None
    if kwargs.get("rounding_mode") is not None:
        return None
    return sources[0].passed(out, 1.0 / abs(float(args[1])) * _UP)


def _cat(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    parts = args[0] if args else kwargs["tensors"]
    if dim == 0 or len(sources) != len(parts) or not _same_batch(sources[0], out):
        return None
    lipschitz = math.sqrt(sum(u.lipschitz**2 for u in sources)) * _UP
    error = torch.stack([u.error for u in sources]).norm(dim=0) * _UP
    return _Tracked.wrap(out, lipschitz, error, sources[0].notes)


def _mean(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    if len(sources) != 1 or not _same_batch(sources[0], out):
        return None
    dims = pytree.tree_leaves((args[1:], {k: v for k, v in kwargs.items() if k == "dim"}))
    if not dims or any(d % sources[0].ndim == 0 for d in dims if not isinstance(d, bool)):
        return None
    count = sources[0].numel() // max(out.numel(), 1)
    return _averaged(sources[0], out, 1.0 / math.sqrt(count), count)


def _averaged(u: _Tracked, out: Tensor, constant: float, terms: int) -> _Tracked:
    """A linear map of norm ``constant`` and of the norm of its magnitude, sums of ``terms``."""
    return u.passed(out, constant * _UP, SAFETY * sum_error(terms) * sample_norm([u.plain()]))


def _magnitude(weight: Tensor) -> float:
    """‖|W|‖₂ ≤ √(‖W‖₁‖W‖∞) of a matrix or a convolution, any stride, padding and dilation."""
    rows = weight.abs().flatten(1).sum(1).max()
    columns = weight.abs().transpose(0, 1).flatten(1).sum(1).max()
    return float((rows * columns).sqrt()) * (1.0 + 1e-12)


def _linear_map(
    u: _Tracked, weight: Tensor, bias: Tensor | None, out: Tensor, norm: float
) -> _Tracked:
    terms = weight[0].numel() + 1
    size = _magnitude(weight) * sample_norm([u.plain()])
    if bias is not None:
        size = size + bias.abs().max() * math.sqrt(out[0].numel())
    return u.passed(out, norm, SAFETY * sum_error(terms) * size)


def _dense(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    if len(sources) != 1 or sources[0].ndim != 2:
        return None
    weight = given["weight"]
    found = _linear_map(
        sources[0], weight, given.get("bias"), out, DenseOperator(weight).norm_upper()
    )
    found.rows = (weight, sources[0])
    return found


def _convolution(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    given |= dict(zip(names, args, strict=False)) | kwargs
    weight, groups = given["weight"], given["groups"]
    if len(sources) != 1 or weight.ndim != 4 or groups != 1:
        return None
    norm = _magnitude(weight)
    if given["dilation"] in (1, (1, 1)):
        operator = ConvOperator(weight, given["stride"], given["padding"])
        norm = min(norm, operator.norm_upper_on(out.shape[1:]))
    return _linear_map(sources[0], weight, given["bias"], out, norm)


def _batch_norm(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    names = (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    )
    given: dict[str, Any] = {"weight": None, "bias": None, "training": False, "eps": 1e-5}
    given |= dict(zip(names, args, strict=False)) | kwargs
    if len(sources) != 1 or given["training"] or given["running_var"] is None:
        return None
    factor = (given["running_var"] + given["eps"]).rsqrt()
    if given["weight"] is not None:
        factor = factor * given["weight"].abs()
    shift = given["running_mean"].abs() * factor
    if given["bias"] is not None:
        shift = shift + given["bias"].abs()
    own = SAFETY * 8 * UNIT * shift.max() * math.sqrt(out[0].numel())
    return sources[0].passed(out, float(factor.max()) * _UP, own)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _pool(maximum: bool) -> Rule:
    """Blocks of k pixels: each output sees k inputs, and each input is seen by ⌈k/s⌉ at most."""

    def rule(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
        rest = "dilation ceil_mode" if maximum else "ceil_mode count_include_pad divisor_override"
        names = f"input kernel_size stride padding {rest}".split()
        given: dict[str, Any] = {"stride": None}
        given |= dict(zip(names, args, strict=False)) | kwargs
        if given.get("dilation", 1) not in (1, (1, 1)) or given.get("divisor_override"):
            return None
        kernel = _pair(given["kernel_size"])
        step = _pair(given["stride"]) if given["stride"] else kernel
        seen = math.prod(math.ceil(k / s) for k, s in zip(kernel, step, strict=True))
        padded = given.get("padding", 0) not in (0, (0, 0)) or given.get("ceil_mode", False)
        if maximum:
            constant = math.sqrt(seen)
        else:  # rows of sum 1, columns of at most seen/k; at an edge fewer may be averaged
            constant = math.sqrt(seen) if padded else math.sqrt(seen / math.prod(kernel))
        return _averaged(sources[0], out, constant, math.prod(kernel))

    return rule


def _separable(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    """A resize of maps, the same along rows and columns: ‖A ⊗ B‖ = ‖A‖‖B‖, from its matrices."""
    (u,) = sources
    if u.ndim != 4:
        return None
    constant = 1.0
    for axis in (2, 3):
        eye = torch.eye(u.shape[axis], dtype=torch.float64)[:, None]
        line = eye[..., None] if axis == 2 else eye[:, :, None]
        given = dict(zip(("input", "size", "scale_factor", "mode"), args, strict=False)) | kwargs
        size = (out.shape[2], 1) if axis == 2 else (1, out.shape[3])
        mode = given.get("mode", "nearest")
        extra = {} if mode == "nearest" else {"align_corners": given.get("align_corners")}
        moved = F.interpolate(line, size=size, mode=mode, **extra)
        constant *= dense_norm(moved.flatten(1)).upper
    return _averaged(u, out, constant, 16)


def _adaptive(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    (u,) = sources
    pairs = list(zip(u.shape[2:], out.shape[2:], strict=True))
    if any(a % b for a, b in pairs):
        return None
    count = math.prod(a // b for a, b in pairs)
    return _averaged(u, out, 1.0 / math.sqrt(count), count)


def _padded(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
    return sources[0].passed(out, 1.0) if mode == "constant" and len(sources) == 1 else None


def _item(sources: list[_Tracked], args: Any, kwargs: Any, out: Tensor) -> _Tracked | None:
    """Slices keep some entries; of the batch, all."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    kept = all(isinstance(i, slice) or i is Ellipsis for i in index)
    if not kept or not _same_batch(sources[0], out):
        return None
    return sources[0].passed(out, 1.0)


def _rules() -> Iterator[tuple[str, Rule]]:
    one = (
        "relu", "tanh", "clamp", "clamp_min", "clamp_max", "abs", "neg", "hardtanh",
        "relu6", "softshrink", "flatten", "reshape", "view", "contiguous", "unsqueeze", "detach",
        "clone", "double", "pixel_unshuffle", "pixel_shuffle", "unflatten",
    )  # fmt: skip
    for name in one:
        yield name, _unary(1.0)
    yield "softplus", _softplus
    yield "leaky_relu", _leaky
    yield "transpose", _transposed
    yield "permute", _permuted
    for name in ("dropout", "dropout1d", "dropout2d", "feature_dropout"):
        yield name, _dropout
    yield "sigmoid", _unary(0.25)
    yield "gelu", _unary(1.13)  # the largest slope is 1.1290
    yield "silu", _unary(1.1)  # 1.0998
    for name in ("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"):
        yield name, _sum
    for name in ("mul", "__mul__", "__rmul__"):
        yield name, _scaled
    for name in ("div", "__truediv__", "true_divide"):
        yield name, _quotient
    yield "cat", _cat
    yield "mean", _mean
    yield "linear", _dense
    yield "conv2d", _convolution
    yield "batch_norm", _batch_norm
    yield "avg_pool2d", _pool(maximum=False)
    yield "max_pool2d", _pool(maximum=True)
    yield "adaptive_avg_pool2d", _adaptive
    yield "interpolate", _separable
    yield "pad", _padded
    yield "__getitem__", _item


_RULES: dict[str, Rule] = dict(_rules())
