"""The public names: those promised, sorted, documented, and nothing else by accident."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types

import pytest

import equilibria as eq

PROMISED = {
    "fixed_point",
    "linear_solve",
    "Solution",
    "Stats",
    "Result",
    "ConvergenceWarning",
    "NotConvergedError",
    "Picard",
    "Anderson",
    "Broyden",
    "BestIterate",
    "GMRES",
    "CG",
    "Implicit",
    "Phantom",
    "OneStep",
    "Unrolled",
    "jacobian_penalty",
    "spectral_radius",
}
OPTIONS = [
    "Picard",
    "Anderson",
    "Broyden",
    "GMRES",
    "CG",
    "Implicit",
    "Phantom",
    "OneStep",
    "Unrolled",
]


def kind(name: str) -> int:
    """Acronyms and constants, then classes, then the rest: ruff's order of __all__."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


def test_promised_names_are_public() -> None:
    assert set(eq.__all__) >= PROMISED
    for name in PROMISED:
        assert hasattr(eq, name)


def test_all_is_sorted_and_has_no_repeats() -> None:
    assert eq.__all__ == sorted(set(eq.__all__), key=lambda name: (kind(name), name))


def test_all_names_exist() -> None:
    for name in eq.__all__:
        assert getattr(eq, name) is not None


def test_nothing_else_is_public() -> None:
    """Beside __all__ the package shows its rooms alone."""
    others = {
        name
        for name, item in vars(eq).items()
        if not name.startswith("_") and not isinstance(item, types.ModuleType)
    }
    assert others <= set(eq.__all__)


@pytest.mark.parametrize("name", sorted(set(eq.__all__) - {"__version__"}))
def test_every_public_object_has_a_docstring_of_its_own(name: str) -> None:
    item = getattr(eq, name)
    if isinstance(item, types.ModuleType):
        assert item.__doc__
        return
    text = item.__dict__.get("__doc__") if inspect.isclass(item) else item.__doc__
    assert text, name
    # A dataclass without one is given its signature as a docstring; that does not count.
    assert not text.startswith(f"{name}("), name


@pytest.mark.parametrize("name", sorted(set(eq.__all__) - {"__version__"}))
def test_public_methods_have_docstrings(name: str) -> None:
    item = getattr(eq, name)
    if not inspect.isclass(item):
        pytest.skip("no class")
    for key, member in vars(item).items():
        if key.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        assert inspect.getdoc(getattr(item, key)), f"{name}.{key}"


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_frozen_and_by_keyword(name: str) -> None:
    cls = getattr(eq, name)
    made = cls()
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, 1)
    with pytest.raises(TypeError, match="keyword"):
        cls(1)
    with pytest.raises(TypeError, match=f"{name} has no option 'nonsense'"):
        cls(nonsense=1)


def test_a_misspelled_option_gets_a_suggestion() -> None:
    with pytest.raises(TypeError, match="Did you mean 'memory'"):
        eq.Anderson(memroy=5)


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z0-9.+-]*)", eq.__version__)


def test_signature_of_the_entry_point() -> None:
    """fixed_point(fn, z0, args, *, …): options by keyword, as the design has it."""
    parameters = inspect.signature(eq.fixed_point).parameters
    assert list(parameters)[:3] == ["fn", "z0", "args"]
    for name in ("solver", "adjoint", "throw", "callback"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_result_codes_have_names_and_messages() -> None:
    assert [code.name for code in eq.Result] == [
        "converged",
        "max_steps",
        "diverged",
        "nonfinite",
        "stagnated",
    ]
    assert all(len(code.message) > 20 for code in eq.Result)


def test_fields_of_a_solution() -> None:
    assert [f.name for f in dataclasses.fields(eq.Solution)][:3] == ["value", "result", "stats"]
    names = {f.name for f in dataclasses.fields(eq.Stats)}
    assert {"steps", "residual", "relative", "evaluations", "syncs", "backward"} <= names


@pytest.mark.parametrize("name", ["Certificate", "Guarantee", "MapCertificate", "certify"])
def test_a_name_that_moved_says_where_it_is(name: str) -> None:
    with pytest.raises(ImportError, match=f"from equilibria.certify import {name}"):
        exec(f"from equilibria.problems import {name}")
    exec(f"from equilibria.certify import {name}")
