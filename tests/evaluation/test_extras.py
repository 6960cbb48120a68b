"""The room opens without extras, and says which one is missing where it is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from equilibria.evaluation import extras


@pytest.mark.parametrize(
    ("module", "ask", "named"),
    [
        ("PIL", extras.pillow_image, r"JPEG compression needs pillow.*equilibria\[train\]"),
        ("torchmetrics", extras.torchmetrics_module, r"needs torchmetrics.*equilibria\[train\]"),
        ("rich", extras.rich_module, r"needs rich.*equilibria\[train\]"),
        ("captum", extras.captum_attr, r"GradCAM needs captum.*equilibria\[analysis\]"),
        (
            "matplotlib.figure",
            lambda: extras.matplotlib_figure(1, 1),
            r"a picture needs matplotlib.*equilibria\[analysis\]",
        ),
    ],
)
def test_what_is_missing_is_named(
    module: str, ask: Callable[[], object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask() is not None
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=named):
        ask()


def test_the_room_opens_without_them() -> None:
    heavy = ["captum", "matplotlib", "rich", "scipy", "torchmetrics"]
    code = (
        f"import sys\nfor name in {heavy}: sys.modules[name] = None\nimport equilibria.evaluation\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
