"""The cache folder, and keys that follow their files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from equilibria.data.sources import cache_dir, fingerprint


@pytest.mark.parametrize(
    ("platform", "variable", "end"),
    [
        ("linux", "XDG_CACHE_HOME", "x/equilibria/data"),
        ("linux", None, ".cache/equilibria/data"),
        ("darwin", None, "Library/Caches/equilibria/data"),
        ("win32", "LOCALAPPDATA", "x/equilibria/data"),
    ],
)
def test_the_systems_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, variable: str | None, end: str
) -> None:
    for name in ("EQUILIBRIA_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "x"))
    assert cache_dir().as_posix().endswith(end)


def test_the_key_follows_the_files(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one")
    key = fingerprint("x", files=[file])
    assert fingerprint("x", files=[file]) == key
    assert fingerprint("y", files=[file]) != key
    file.write_text("three")
    longer = fingerprint("x", files=[file])
    assert longer != key
    os.utime(file, ns=(1, 1))
    assert fingerprint("x", files=[file]) not in (key, longer)
