"""Option values as JSON: what comes back is equal, and nothing but our own classes can be named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria.engine.options import options
from equilibria.models.values import KINDS, from_json, short, to_json

_MADE: dict[str, Any] = {
    "BestIterate": eq.BestIterate(eq.Broyden(memory=3, max_steps=7)),
    "Patches": eq.Patches(channels=4, size=2),
}


# What files may name, whatever the packages export later.
PROMISED = {
    *("Anderson", "Auto", "BestIterate", "Broyden", "Picard", "ProximalGradient"),
    *("SequentialAveraging", "ForwardBackward", "PeacemanRachford", "CG", "GMRES"),
    *("Implicit", "OneStep", "Phantom", "Unrolled", "TransposedSplitting"),
    *("NormBounded", "WeightNormalized", "Patches", "FixedGamma", "LearnedGamma"),
    *("MeanPatchEnergy", "MinPatchEnergy"),
    *("SquaredNorm", "L1", "FeatureIncay", "Decorrelation", "HSIC"),
}


def _round(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value))))


@pytest.mark.parametrize("name", sorted({*KINDS, *PROMISED}))
def test_every_kind_comes_back_equal(name: str) -> None:
    value = _MADE.get(name) or KINDS[name]()
    assert to_json(value)["kind"] == name
    again = _round(value)
    assert type(again) is KINDS[name]
    assert again == value


@settings(max_examples=40, deadline=None)
@given(
    rtol=st.none() | st.floats(0.0, 0.5),
    steps=st.integers(1, 10**6),
    damping=st.floats(0.001, 1.0),
    memory=st.integers(1, 50),
)
def test_all_fields_travel(rtol: float | None, steps: int, damping: float, memory: int) -> None:
    solver = eq.Anderson(rtol=rtol, max_steps=steps, damping=damping, memory=memory)
    assert _round(solver) == solver
    nested = eq.Implicit(solver=solver)
    assert _round(nested) == nested
    averaged = eq.SequentialAveraging(regularizer=eq.SquaredNorm(0.5), max_steps=steps)
    assert to_json(averaged)["regularizer"] == {"kind": "SquaredNorm", "weight": 0.5}
    assert _round(averaged) == averaged


def test_foreign_objects_are_refused() -> None:
    @options
    class Picard(eq.Picard):  # of the same name, but not ours
        pass

    with pytest.raises(TypeError, match="cannot be stored in a model's configuration"):
        to_json(Picard())
    with pytest.raises(TypeError, match="Set it on the layer"):
        to_json(object())


@pytest.mark.parametrize(
    "form",
    [
        {"kind": "Popen", "args": ["true"]},
        {"kind": "os.system"},
        {"kind": ["Picard"]},
        {"kind": None},
        {"max_steps": 3},
        {},
    ],
)
def test_other_classes_cannot_be_named(form: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not known"):
        from_json(form)


def test_close_names_are_offered_and_fields_checked() -> None:
    with pytest.raises(ValueError, match="Did you mean 'Picard'"):
        from_json({"kind": "Picrad"})
    with pytest.raises(TypeError, match="Did you mean 'max_steps'"):
        from_json({"kind": "Picard", "max_step": 3})
    with pytest.raises(ValueError, match=r"damping=2.0\) is out of range"):
        from_json({"kind": "Picard", "damping": 2.0})


def test_short_shows_what_differs_from_the_defaults() -> None:
    assert short(eq.Picard()) == "Picard()"
    assert short(eq.Picard(damping=0.8)) == "Picard(damping=0.8)"
    assert short(eq.Patches(channels=8, size=2)) == "Patches(channels=8, size=2)"
    assert short(eq.Implicit(solver=eq.CG(rtol=0.1))) == "Implicit(solver=CG(rtol=0.1))"
    assert short(eq.BestIterate(eq.Picard())) == "BestIterate(inner=Picard())"
    assert short((1, 2)) == "(1, 2)"
