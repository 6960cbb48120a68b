"""Checks of a model's options: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

import equilibria as eq
from equilibria.models import options as opt

_OPTIONS: dict[str, tuple[opt.Option, list[Any], list[Any]]] = {
    "integer": (opt.integer(3, "a", low=2, high=9), [2, 9], [1, 10, True, 3.0, "3", None, (3,)]),
    "integers": (
        opt.integers((1, 2), "a"),
        [(1,), [4, 5], (65536,)],
        [(), (0,), (1.0,), 4, (True,), (1,) * 17, (65537,), "12", None],
    ),
    "number": (
        opt.number(0.5, "a", low=0.0, high=1.0),
        [0.1, 1, 1.0],
        [0.0, 1.1, True, "0.5", None, float("nan"), float("inf")],
    ),
    "numbers": (
        opt.numbers(0.5, "a", low=0.0, high=1.0),
        [0.1, 1, (0.2, 1.0), [0.3]],
        [0.0, (0.0,), (), "a", None, (0.5,) * 17],
    ),
    "fraction": (opt.fraction(0.0, "a"), [0, 0.0, 0.99], [1.0, -0.1, True, None, float("nan")]),
    "flag": (opt.flag(False, "a"), [True, False], [0, 1, "True", None]),
    "choice": (opt.choice("a", "b", ("a", "c")), ["a", "c"], ["d", 1, None, ("a",)]),
    "solver": (
        opt.solver(eq.Picard()),
        [eq.Auto(), {"kind": "Broyden"}],
        [None, 3, "Picard", eq.Phantom(), {"kind": "Phantom"}, eq.Picard],
    ),
    "adjoint": (
        opt.adjoint(eq.Phantom()),
        [eq.Implicit(), {"kind": "OneStep"}],
        [None, eq.Picard(), {"kind": "Picard"}, "Phantom"],
    ),
    "constraint": (
        opt.constraint(eq.nn.NormBounded()),
        [None, eq.nn.WeightNormalized(), {"kind": "NormBounded", "bound": 0.3}],
        [0.3, eq.Picard()],
    ),
    "gamma": (
        opt.gamma(eq.FixedGamma()),
        [eq.MinPatchEnergy(0.3), {"kind": "LearnedGamma", "init": 0.2}],
        [0.5, None],
    ),
    "patch": (
        opt.patch(eq.Patches(channels=1, size=1)),
        [{"kind": "Patches", "channels": 2, "size": 3}],
        [None, 2, (8, 2)],
    ),
    "regularizer": (
        opt.regularizer(None),
        [None, eq.L1(0.1), {"kind": "Decorrelation", "weight": 0.1}],
        [0.1, eq.Picard()],
    ),
}


@pytest.mark.parametrize("name", _OPTIONS)
def test_accepts_and_refuses(name: str) -> None:
    option, good, bad = _OPTIONS[name]
    assert option.accepts(option.default)
    for value in good:
        made = option.parse("it", value)
        if isinstance(value, dict):
            assert type(made).__name__ == value["kind"]
        elif isinstance(value, (list, tuple)):
            assert made == tuple(value)
        else:
            assert made is value
    for value in bad:
        with pytest.raises(ValueError, match="option it=") as caught:
            option.parse("it", value)
        assert option.allowed in str(caught.value), value


def test_errors_inside_objects_name_the_option() -> None:
    with pytest.raises(ValueError, match=r"option solver=.*damping=7.*out of range"):
        opt.solver(eq.Picard()).parse("solver", {"kind": "Picard", "damping": 7})
    with pytest.raises(TypeError, match=r"option solver=.*has no option 'dampen'"):
        opt.solver(eq.Picard()).parse("solver", {"kind": "Picard", "dampen": 0.5})
