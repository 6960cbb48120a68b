"""A package that is missing is an error with the line that installs it."""

from __future__ import annotations

import pytest

from equilibria.engine.optional import needs


def test_the_error_names_package_purpose_and_extra() -> None:
    line = r'A picture needs pillow, .*No module named.*: pip install "equilibria\[analysis\]"'
    with (
        pytest.raises(ImportError, match=line) as raised,
        needs("pillow", "A picture", extra="analysis"),
    ):
        import equilibria_no_such_module  # noqa: F401
    assert raised.value.name == "equilibria_no_such_module"
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_other_errors_and_packages_that_are_there_pass() -> None:
    with needs("the standard library", "This test"):
        import math
    assert math.pi > 3
    with pytest.raises(ZeroDivisionError), needs("nothing", "This test"):
        math.floor(1 / 0)
