"""A default that changes raises its model's revision: results by the old one are then out of date.

``python -m tests.models.test_revisions`` writes defaults.json anew.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from equilibria import models
from equilibria.models.options import to_json
from equilibria.models.registry import find

_FILE = Path(__file__).with_name("defaults.json")
_AGAIN = "then write the file anew: python -m tests.models.test_revisions"


def _defaults(name: str) -> dict[str, Any]:
    """The revision, and a short word for each option's default."""
    spec = find(name)
    texts = {o: json.dumps(to_json(value), sort_keys=True) for o, value in spec.defaults.items()}
    words = {option: hashlib.sha256(t.encode()).hexdigest()[:6] for option, t in texts.items()}
    return {"revision": spec.card.revision, "options": words}


@pytest.mark.parametrize("name", models.names())
def test_a_changed_default_has_a_new_revision(name: str) -> None:
    written = json.loads(_FILE.read_text(encoding="utf-8"))
    assert name in written, f"{name} is new: {_AGAIN}"
    found, kept = _defaults(name), written[name]
    assert found["revision"] == kept["revision"], f"{name} has a new revision: {_AGAIN}"
    words = found["options"]
    assert set(words) == set(kept["options"]), f"{name} has other options: {_AGAIN}"
    changed = [o for o, word in kept["options"].items() if words[o] != word]
    assert not changed, f"{name}: the default of {changed} changed: raise its revision, {_AGAIN}"


def test_no_model_of_the_file_is_gone() -> None:
    gone = set(json.loads(_FILE.read_text(encoding="utf-8"))) - set(models.names())
    assert not gone, f"{sorted(gone)} can no longer be loaded by name; {_AGAIN}"


if __name__ == "__main__":
    made = {name: _defaults(name) for name in models.names()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept)}" for name, kept in made.items())
    _FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
