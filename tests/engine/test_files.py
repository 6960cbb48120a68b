"""Atomic files and JSON: what was there stays until the new content is whole."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from equilibria.engine.files import (
    SaveError,
    json_value,
    remove_parts,
    write_bytes,
    write_json,
    write_text,
)


@dataclass
class Numbers:
    a: float


class Named:
    def to_dict(self) -> dict[str, object]:
        return {"b": torch.tensor([1])}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (math.nan, None),
        (-math.inf, None),
        (1e-300, 1e-300),
        (True, True),
        ({1: (math.inf, 2)}, {"1": [None, 2]}),
        (torch.tensor([[1.0, math.nan]], requires_grad=True), [[1.0, None]]),
        (torch.tensor(3), 3),
        (np.float32(0.5), 0.5),
        (np.array([1, 2]), [1, 2]),
        (range(2), [0, 1]),
        ([Numbers(math.inf)], [{"a": None}]),
        (Named(), {"b": [1]}),
        (Path("a") / "b", str(Path("a") / "b")),
    ],
)
def test_values_in_the_types_of_json(given: object, expected: object) -> None:
    found = json_value(given)
    assert found == expected
    assert type(found) is type(expected)


def test_a_file_is_replaced_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    assert write_json(path, {"é": math.nan}) == path
    assert write_json(path, {"é": [1.5, math.inf]}) == path
    assert json.loads(path.read_text(encoding="utf-8")) == {"é": [1.5, None]}
    assert "é" in path.read_text(encoding="utf-8")
    write_bytes(path.with_name("b"), b"\x00")
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.json", "b"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_keeps_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = write_text(tmp_path / "a.txt", "old")

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(SaveError if isinstance(error, OSError) else KeyboardInterrupt) as raised:
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    if isinstance(error, OSError):
        assert "the earlier one is unchanged" in str(raised.value)
        assert str(path) in str(raised.value)


def test_parts_that_a_killed_write_left_are_removed(tmp_path: Path) -> None:
    """Those that nobody has written to for an hour; with a lock, all of them; no other file's."""
    path, day = tmp_path / "a[1].json", 24 * 3600
    old, new = tmp_path / ".a[1].json.7-8.part", tmp_path / ".a[1].json.8-9.part"
    others = [tmp_path / ".a1.json.7-8.part", tmp_path / "a[1].json.part"]
    for part in (old, new, *others):
        part.write_bytes(b"half")
        os.utime(part, (0, time.time() - (0 if part == new else day)))
    write_json(path, 1)
    assert not old.exists()
    assert new.exists()
    remove_parts(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])
