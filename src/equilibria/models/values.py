"""Option values as JSON and back: numbers as they are, objects through a closed table of our own.

An object is written ``{"kind": "Picard", "max_steps": 4, ...}`` with all its fields. Reading builds
an instance of one of ``KINDS`` through its checked constructor: a file can name no other class.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from equilibria import adjoints, engine, nn, problems, solvers
from equilibria.engine import Adjoint, LinearSolver, SolverOptions
from equilibria.engine.options import hint
from equilibria.nn import NormBounded, WeightNormalized
from equilibria.problems import GammaPolicy, Patches, Regularizer
from equilibria.solvers import BestIterate

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
