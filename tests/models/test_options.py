"""Options of the models: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

import equilibria as eq
from equilibria.models.options import OPTIONS
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
