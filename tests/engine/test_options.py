"""Options: frozen, keyword-only, and errors that name the option, the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

import equilibria as eq
from equilibria.engine.options import check_number, options

OPTION_CLASSES = [
    eq.Picard,
    eq.Anderson,
    eq.Broyden,
    eq.GMRES,
    eq.CG,
    eq.Implicit,
    eq.Phantom,
    eq.OneStep,
    eq.Unrolled,
]


@options
class Example:
    ratio: float = 0.5
    count: int = 3
    limit: float | None = None

    def __post_init__(self) -> None:
        check_number(self, "ratio", low=0.0, high=1.0, low_open=True)
        check_number(self, "count", low=1, integer=True)
        check_number(self, "limit", low=0.0, high=2.0, high_open=True, optional=True)


INTERVALS = {
    "ratio": ((5e-324, 0.3, 1), (0.0, -1.0, math.nextafter(1, 2), math.nan, math.inf), r"\(0, 1\]"),
    "limit": ((0.0, 1.5, None), (-5e-324, 2.0, math.nan), r"number in \[0, 2\) or None"),
    "count": ((1, 10**9), (0, -3), r"integer in \[1, inf\)"),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_ends_of_intervals(name: str) -> None:
    inside, outside, allowed = INTERVALS[name]
    for value in inside:
        assert getattr(Example(**{name: value}), name) == value
    for value in outside:
        with pytest.raises(ValueError, match=rf"Example\({name}=.*{allowed}"):
            Example(**{name: value})


def test_integers_beyond_every_float_and_every_tensor() -> None:
    assert Example(count=2**63 - 1).count == 2**63 - 1
    with pytest.raises(ValueError, match=r"Example\(count=1000+ \.\.\.\) is out .* 64 bits"):
        Example(count=10**400)
    with pytest.raises(ValueError, match=r"Example\(ratio=an integer of thousands of digits\)"):
        Example(ratio=10**5000)
    with pytest.raises(TypeError, match=r"no option 'rato' \(got rato=an integer of thousands"):
        Example(rato=10**5000)  # type: ignore[call-arg]


@pytest.mark.parametrize("value", ["3", True, 2.0, None, [3]])
def test_wrong_types_are_named(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"count=.*expected an integer.*{type(value).__name__}"):
        Example(count=value)


def test_positional_values_are_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(TypeError, match=r"keyword options only.*Example\(ratio=\.\.\., count="):
        Example(0.5, 3)  # type: ignore[misc]


@pytest.mark.parametrize("cls", OPTION_CLASSES)
def test_unknown_options_name_value_choices_and_near_miss(cls: Any) -> None:
    fields = [f.name for f in dataclasses.fields(cls)]
    with pytest.raises(TypeError) as caught:
        cls(tolernace_of_nothing=1.25)
    text = str(caught.value)
    assert cls.__name__ in text
    assert "tolernace_of_nothing=1.25" in text
    assert "Did you mean" not in text
    assert all(name in text for name in fields) or (not fields and "no options" in text)
    if fields:
        near = fields[0] + "x"
        with pytest.raises(TypeError, match=rf"no option '{near}'.*Did you mean '{fields[0]}'\?"):
            cls(**{near: 1})


STEPS = (0.0, -1.0, math.inf, math.nan)
OUT_OF_RANGE: dict[Any, dict[str, tuple[Any, ...]]] = {
    eq.Picard: {"damping": (0.0, -0.1, 1.5)},
    eq.Anderson: {"memory": (0,), "damping": (1.01,), "ridge": (0.0,)},
    eq.Broyden: {"memory": (0,), "safeguard": (0.0, 1.0)},
    eq.ProximalGradient: {"tau": (0.0, -1.0, math.nan)},
    eq.ForwardBackward: {"alpha": STEPS},
    eq.PeacemanRachford: {"alpha": STEPS},
    eq.SequentialAveraging: {"rho": (0.0,), "c": (0.0,), "lipschitz": (0.0,)},
    eq.GMRES: {"restart": (0,), "rtol": (-1e-3,)},
    eq.CG: {"atol": (-1.0,), "max_steps": (0,), "block": (0,)},
    eq.Phantom: {"steps": (0,), "damping": (0.0,), "form": ("series",)},
}


@pytest.mark.parametrize("cls", OUT_OF_RANGE)
def test_own_options_out_of_range_name_themselves(cls: Any) -> None:
    for name, values in OUT_OF_RANGE[cls].items():
        for value in values:
            with pytest.raises(ValueError, match=rf"{cls.__name__}\({name}={value!r}\).*expected"):
                cls(**{name: value})
