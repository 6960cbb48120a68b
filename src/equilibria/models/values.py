"""Option values as JSON and back: numbers as they are, objects through a closed table of our own.

An object is written ``{"kind": "Picard", "max_steps": 4, ...}`` with all its fields. Reading builds
an instance of one of the classes below through its checked constructor, and nothing else: a file
can name no other class.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from equilibria.adjoints import Implicit, OneStep, Phantom, Unrolled
from equilibria.engine.krylov import CG, GMRES
from equilibria.nn import NormBounded, WeightNormalized
from equilibria.nn.monotone import TransposedSplitting
from equilibria.problems import (
    HSIC,
    L1,
    Decorrelation,
    FeatureIncay,
    FixedGamma,
    LearnedGamma,
    MeanPatchEnergy,
    MinPatchEnergy,
    Patches,
    SquaredNorm,
)
from equilibria.solvers import (
    Anderson,
    Auto,
    BestIterate,
    Broyden,
    Picard,
    ProximalGradient,
    SequentialAveraging,
)
from equilibria.solvers.forward_backward import ForwardBackward
from equilibria.solvers.peaceman_rachford import PeacemanRachford

__all__ = ["KINDS", "from_json", "short", "to_json"]

KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Anderson,
        Auto,
        BestIterate,
        Broyden,
        Picard,
        ProximalGradient,
        SequentialAveraging,
        ForwardBackward,
        PeacemanRachford,
        Implicit,
        OneStep,
        Phantom,
        Unrolled,
        TransposedSplitting,
        CG,
        GMRES,
        NormBounded,
        WeightNormalized,
        Patches,
        FixedGamma,
        LearnedGamma,
        MeanPatchEnergy,
        MinPatchEnergy,
        SquaredNorm,
        L1,
        FeatureIncay,
        Decorrelation,
        HSIC,
    )
}
"""The classes that a configuration may name."""


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
        close = difflib.get_close_matches(str(name), KINDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"kind={name!r} is not known.{hint} Kinds: {', '.join(KINDS)}.")
    given = {str(key): from_json(item) for key, item in value.items() if key != "kind"}
    return kind(**given)


def short(value: Any) -> str:
    """The value as one would write it: an object with the fields that differ from its defaults."""
    kind = type(value)
    if KINDS.get(kind.__name__) is not kind:
        return repr(value)
    usual = {f.name: f.default for f in dataclasses.fields(value)}
    parts = [
        f"{name}={short(item)}"
        for name, item in _fields(value)
        if name not in usual or usual[name] is dataclasses.MISSING or usual[name] != item
    ]
    return f"{kind.__name__}({', '.join(parts)})"


def _fields(value: Any) -> list[tuple[str, Any]]:
    # BestIterate takes its limits from the solver that it wraps.
    names = (
        ["inner"]
        if isinstance(value, BestIterate)
        else [field.name for field in dataclasses.fields(value) if field.init]
    )
    return [(name, getattr(value, name)) for name in names]
