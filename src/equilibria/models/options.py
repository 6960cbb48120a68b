"""The options of the networks: what each name means and takes, and values as JSON and back.

A network lists the names that it has with its own defaults (``ModelSpec.defaults``). An object is
written ``{"kind": "Picard", "max_steps": 4, ...}`` with all its fields. Reading builds an instance
of one of ``KINDS`` through its checked constructor: a file can name no other class.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from equilibria import adjoints, engine, nn, problems, solvers
from equilibria.engine import Adjoint, LinearSolver, SolverOptions
from equilibria.engine.options import hint
from equilibria.nn import NormBounded, WeightNormalized
from equilibria.problems import GammaPolicy, Patches, Regularizer
from equilibria.solvers import BestIterate

from .preprocessing import LARGEST_SIDE


@dataclasses.dataclass(frozen=True)
class Option:
    """What an option means, which values are allowed, in words, and a function that tells."""

    about: str
    allowed: str
    accepts: Callable[[Any], bool]


def option(name: str, default: Any) -> Option:
    """The option of that name; where the default is a tuple, a list of its values."""
    return _list_of(OPTIONS[name]) if isinstance(default, tuple) else OPTIONS[name]


def _integer(about: str, *, low: int = 1, high: int = 1 << 16) -> Option:
    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return Option(about, f"an integer in [{low}, {high}]", accepts)


def _number(about: str, interval: str, inside: Callable[[float], bool]) -> Option:
    def accepts(value: Any) -> bool:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        return numeric and inside(value)  # bounded, so NaN and infinity are outside

    return Option(about, f"a number in {interval}", accepts)


def _choice(about: str, *allowed: str) -> Option:
    return Option(about, f"one of {', '.join(map(repr, allowed))}", lambda v: v in allowed)


def _flag(about: str) -> Option:
    return Option(about, "True or False", lambda v: isinstance(v, bool))


def _object(about: str, allowed: str, *kinds: type[Any]) -> Option:
    form = f"{allowed}, or its JSON form {{'kind': ..., ...}}"
    return Option(about, form, lambda v: isinstance(v, kinds))


def _list_of(one: Option) -> Option:
    def accepts(value: Any) -> bool:
        return isinstance(value, tuple) and 1 <= len(value) <= 16 and all(map(one.accepts, value))

    return Option(one.about, f"a list of 1 to 16 values, each {one.allowed}", accepts)


def _one_or_more(one: Option) -> Option:
    many = _list_of(one)
    allowed = f"{one.allowed}, or {many.allowed}"
    return Option(one.about, allowed, lambda v: one.accepts(v) or many.accepts(v))


SIZES: dict[str, Option] = {
    "num_classes": _integer("logits of the head"),
    "in_channels": _integer("channels of the images"),
    "image_size": _integer("pixels of a side of the images", high=LARGEST_SIDE),
}
"""What every network has, beside its own options."""
_POSITIVE: tuple[str, Callable[[float], bool]] = ("(0, 1e+06]", lambda v: 0.0 < v <= 1e6)
_SHARE: tuple[str, Callable[[float], bool]] = ("[0, 1)", lambda v: 0.0 <= v < 1.0)

OPTIONS: dict[str, Option] = {
    # Sizes.
    "channels": _integer("channels of z; of each scale, the finest first, where there are several"),
    "depth": _integer("layers in each stage", high=64),
    "downsample": _integer("how often the stem halves", low=0, high=8),
    "expansion": _integer("widening inside the blocks", high=64),
    "final_channels": _integer("of the last feature map"),
    "fusion": _integer("3 × 3 convolutions after the average", low=0, high=64),
    "groups": _integer("groups of the group norms"),
    "head_channels": _integer("widths of the head's bottlenecks"),
    "hidden": _integer("columns of W_h"),
    "mids": _integer("channels of U and W in each branch or block"),
    "pool": _integer("average pooling before the head", high=256),
    "scales": _integer("how much coarser each branch is than the stem"),
    "unshuffle": _integer("pixels of the first pixel unshuffle", high=16),
    "widths": _integer("channels of each stage"),
    # Numbers and choices.
    "alpha": _one_or_more(
        _number("α of the blocks, one or one per block", "(0, 1]", lambda v: 0.0 < v <= 1.0)
    ),
    "bias": _flag("whether Ux has a bias"),
    "dropout": _number("probability that a channel is left out in training", *_SHARE),
    "form": _choice("whether OptEq has its state in z or in the space of Wz", "state", "hidden"),
    "jacobian_weight": _number("weight of the Jacobian penalty", *_SHARE),
    "learn_alpha": _flag("make each α a parameter"),
    "m": _number("modulus of strong monotonicity", *_POSITIVE),
    "norm": _choice("where a layer is normalized", "before", "after", "both"),
    "radius": _number("‖Ux + b‖ is scaled to at most this", *_POSITIVE),
    "reading": _choice("whether a branch also sees those before it", "parallel", "chain"),
    "regularize": _choice("how the regularizer enters the map", "gradient", "prox"),
    "shift": _flag("whether every second layer's patches are shifted by half"),
    # Objects.
    "adjoint": _object("how gradients pass it", "an adjoint such as Phantom(steps=5)", Adjoint),
    "constraint": _object(
        "what bounds W",
        "NormBounded(bound=...), WeightNormalized() or None",
        *(NormBounded, WeightNormalized, type(None)),
    ),
    "gamma": _object(
        "γ of the Gaussian kernel",
        "a policy such as MeanPatchEnergy(0.2) or FixedGamma(0.5)",
        GammaPolicy,
    ),
    "patch": _object("patches of the Gaussian kernel", "Patches(channels=, size=)", Patches),
    "regularizer": _object(
        "feature regularizer of OptEq §5.1",
        "a regularizer such as Decorrelation(weight=0.01), or None",
        *(Regularizer, type(None)),
    ),
    "solver": _object(
        "how the equilibrium is found", "a solver such as Picard(max_steps=4)", SolverOptions
    ),
}


# ---------------------------------------------------------------------- values as JSON

_BASES = (
    *(SolverOptions, Adjoint, LinearSolver, GammaPolicy, Patches, Regularizer),
    *(NormBounded, WeightNormalized),
)
_PUBLIC = [
    getattr(package, name)
    for package in (solvers, adjoints, engine, nn, problems)
    for name in package.__all__
]

KINDS: Mapping[str, type[Any]] = {
    item.__name__: item
    for item in _PUBLIC
    if inspect.isclass(item) and issubclass(item, _BASES) and not inspect.isabstract(item)
}
"""The classes that a configuration may name: all public solvers, adjoints, constraints, …"""


def to_json(value: Any) -> Any:
    """A value of a model option in JSON's types: tuples become lists, objects their fields."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    kind = type(value)
    if KINDS.get(kind.__name__) is not kind:
        raise TypeError(
            f"{value!r} cannot be stored in a model's configuration: it is no number, text or "
            f"list, and its class is none of {', '.join(KINDS)}. Set it on the layer after the "
            "model is made (layer.solver = ...) if it need not be saved."
        )
    return {"kind": kind.__name__, **{name: to_json(item) for name, item in _fields(value)}}


def from_json(value: Any) -> Any:
    """The value that ``to_json`` wrote; lists become tuples. Objects pass through unchanged."""
    if isinstance(value, (tuple, list)):
        return tuple(from_json(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    name = value.get("kind")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        near = hint(str(name), KINDS)
        raise ValueError(f"kind={name!r} is not known.{near} Kinds: {', '.join(KINDS)}.")
    given = {str(key): from_json(item) for key, item in value.items() if key != "kind"}
    return kind(**given)


def short(value: Any) -> str:
    """The value as one would write it: an object with the fields that differ from its defaults."""
    kind = type(value)
    if KINDS.get(kind.__name__) is not kind:
        return repr(value)
    usual = {field.name: field.default for field in dataclasses.fields(value)}
    parts = [
        f"{name}={short(item)}"
        for name, item in _fields(value)
        if name not in usual or usual[name] is dataclasses.MISSING or usual[name] != item
    ]
    return f"{kind.__name__}({', '.join(parts)})"


def _fields(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, BestIterate):  # takes its limits from the solver that it wraps
        return [("inner", value.inner)]
    return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
