"""The table in the docs is the one that the code counts now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_in_the_docs_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("table", ROOT / "docs" / "make_model_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "results" / "models.md").read_text(encoding="utf-8")
    assert written == module.table(), "run: python docs/make_model_table.py"
