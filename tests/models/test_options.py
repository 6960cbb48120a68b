"""Options of the models: what is accepted and what refused; values as JSON come back equal, and
nothing but our own classes can be named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria.engine.options import options
from equilibria.models.options import KINDS, OPTIONS, from_json, short, to_json
from equilibria.models.registry import SPECS, find

NAN, INF = float("nan"), float("inf")
# One option of each kind: a model that has it, values that it takes, values that it refuses.
CASES: dict[str, tuple[str, list[Any], list[Any]]] = {
    "depth": ("geq_digits", [1, 64], [0, 65, True, 3.0, "3", None, (3,)]),
    "fusion": ("geq_cifar_5m", [0], [-1]),
    "widths": (
        "geq_digits",
        [(1,), [4, 5], (65536,)],
        [(), (0,), (1.0,), 4, (True,), (1,) * 17, (65537,), "12", None],
    ),
    "m": ("mondeq_single", [0.1, 1, 1e6], [0.0, 1.1e6, True, "0.5", None, NAN, INF]),
    "alpha": (
        "deep_opteq_199k",
        [0.1, 1, (0.2, 1.0), [0.3]],
        [0.0, 1.1, True, (0.0,), (), "a", None, (0.5,) * 17, NAN],
    ),
    "dropout": ("mdeq_cifar", [0, 0.0, 0.99], [1.0, -0.1, True, None, NAN]),
    "learn_alpha": ("deep_opteq_199k", [True, False], [0, 1, "True", None]),
    "norm": ("geq_digits", ["after", "both"], ["behind", 1, None, ("before",)]),
    "solver": (
        "geq_digits",
        [eq.Auto(), {"kind": "Broyden"}],
        [None, 3, "Picard", eq.Phantom(), {"kind": "Phantom"}, eq.Picard],
    ),
    "adjoint": (
        "geq_digits",
        [eq.Implicit(), {"kind": "OneStep"}],
        [None, eq.Picard(), {"kind": "Picard"}, "Phantom"],
    ),
    "constraint": (
        "geq_digits",
        [None, eq.nn.WeightNormalized(), {"kind": "NormBounded", "bound": 0.3}],
        [0.3, eq.Picard()],
    ),
    "gamma": (
        "geq_digits",
        [eq.MinPatchEnergy(0.3), {"kind": "LearnedGamma", "init": 0.2}],
        [0.5, None],
    ),
    "patch": ("geq_digits", [{"kind": "Patches", "channels": 2, "size": 3}], [None, 2, (8, 2)]),
    "regularizer": (
        "deep_opteq_199k",
        [None, eq.L1(0.1), {"kind": "Decorrelation", "weight": 0.1}],
        [0.1, eq.Picard()],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_accepts_and_refuses(name: str) -> None:
    model, good, bad = CASES[name]
    for value in good:
        made = find(model).parse({name: value})[name]
        if isinstance(value, dict):
            assert type(made).__name__ == value["kind"]
        elif isinstance(value, (list, tuple)):
            assert made == tuple(value)
        else:
            assert made is value
    for value in bad:
        with pytest.raises(ValueError, match=f"{model}: option {name}=.*: expected") as caught:
            find(model).parse({name: value})
        assert OPTIONS[name].allowed in str(caught.value), value


def test_defaults_are_allowed_and_no_option_is_without_a_model() -> None:
    for spec in SPECS.values():
        assert spec.parse(spec.defaults) == spec.defaults
    assert {name for spec in SPECS.values() for name in spec.defaults} == set(OPTIONS)


def test_errors_inside_objects_name_the_option() -> None:
    geq = find("geq_digits")
    with pytest.raises(ValueError, match=r"option solver=.*damping=7.*out of range"):
        geq.parse({"solver": {"kind": "Picard", "damping": 7}})
    with pytest.raises(TypeError, match=r"geq_digits: option solver=.*has no option 'dampen'"):
        geq.parse({"solver": {"kind": "Picard", "dampen": 0.5}})


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
