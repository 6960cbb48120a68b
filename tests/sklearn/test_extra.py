"""Without scikit-learn the error says which extra brings it."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("equilibria.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r'pip install "equilibria\[train\]"'):
        importlib.import_module("equilibria.sklearn")
