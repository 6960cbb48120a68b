"""As for the library's own tests; pictures are drawn in slow tests and in those of the theory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.conftest import pytest_collection_finish, pytest_configure

__all__ = ["pytest_collection_finish", "pytest_configure"]


@pytest.fixture(autouse=True)
def _pictures_in_words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the file of a picture holds its words, which takes no time."""

    def write(self: Any, path: Path, **_: Any) -> None:
        path.write_text("\n".join(text.get_text() for text in self.findobj(Text)), "utf-8")

    daily = request.node.get_closest_marker("slow") is None
    if daily and "theory" not in request.path.parts:
        monkeypatch.setattr(Figure, "savefig", write)
