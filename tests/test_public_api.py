"""The public names: those promised, and nothing else by accident; old places say the new ones."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest

import equilibria as eq

PROMISED = {
    *(
        "fixed_point",
        "linear_solve",
        "root",
        "multistart",
        "Equilibria",
        "Solution",
        "Stats",
        "Result",
    ),
    *("ConvergenceWarning", "NotConvergedError"),
    *("Picard", "Anderson", "Broyden", "NewtonKrylov", "BestIterate", "GMRES", "CG"),
    *("Implicit", "Phantom", "OneStep", "Unrolled", "jacobian_penalty", "spectral_radius"),
}


def test_promised_names_are_public() -> None:
    assert set(eq.__all__) >= PROMISED
    for name in eq.__all__:
        assert getattr(eq, name) is not None


def test_nothing_else_is_public() -> None:
    """Beside __all__ the package shows its packages alone."""
    others = {
        name
        for name, item in vars(eq).items()
        if not name.startswith("_") and not isinstance(item, types.ModuleType)
    }
    assert others <= set(eq.__all__)


def test_signature_of_the_entry_point() -> None:
    """fixed_point(fn, z0, args, *, …): options by keyword, as the design has it."""
    parameters = inspect.signature(eq.fixed_point).parameters
    assert list(parameters)[:3] == ["fn", "z0", "args"]
    for name in ("solver", "adjoint", "throw", "callback"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", ["Certificate", "Guarantee", "MapCertificate", "certify"])
def test_a_name_that_moved_says_where_it_is(name: str) -> None:
    with pytest.raises(ImportError, match=f"from equilibria.certify import {name}"):
        exec(f"from equilibria.problems import {name}")
    exec(f"from equilibria.certify import {name}")


@pytest.mark.parametrize(("name", "new"), [("theory", "theory"), ("experiments", "tables")])
def test_a_package_that_moved_says_where_it_is(name: str, new: str) -> None:
    text = f"equilibria.{name} is now equilibria_papers.{new}.*pip install equilibria-papers"
    with pytest.raises(ImportError, match=text):
        importlib.import_module(f"equilibria.{name}")
    with pytest.raises(AttributeError, match=text):
        getattr(eq, name)
