"""The cache folder, keys that follow their files, and limits on what is read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from equilibria import data
from equilibria.data import CorruptImageError, DataError, read_image, sources
from equilibria.data.sources import cache_dir, check_expansion, fingerprint, read_file
from tests.data.made_files import write_cifar10_pickles, write_class_folders


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


@pytest.mark.skipif(os.name == "nt", reason="files of POSIX")
@pytest.mark.parametrize(
    ("kind", "said"), [("pipe", "a named pipe"), ("device", "a device"), ("folder", "a folder")]
)
def test_pipes_and_devices_are_refused_at_once(tmp_path: Path, kind: str, said: str) -> None:
    """A pipe would wait for ever, an endless device fill the memory; also behind a link."""
    write_class_folders(tmp_path, {"a": 3, "b": 3})
    path = tmp_path / "a" / "001.png"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    for read in (lambda: read_image(path), lambda: data.load(tmp_path, progress=False)):
        with pytest.raises(CorruptImageError, match=rf"{path}: not a readable image.*{said}"):
            read()
    with pytest.warns(UserWarning, match="skipped 1 of"):
        data.load(tmp_path, on_corrupt="skip", progress=False)
    table = tmp_path / "set"
    table.mkdir()
    path.rename(table / "train.parquet")
    with pytest.raises(DataError, match=rf"train\.parquet is not a readable.*{said}"):
        data.load(table)


def test_a_file_of_holes_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CorruptImageError, match=r"1,099,511,627,776 bytes.*MOST_IMAGE_BYTES"):
        read_image(path)
    write_cifar10_pickles(tmp_path)
    os.truncate(tmp_path / "test_batch", 2**40)
    with pytest.raises(DataError, match=r"test_batch.*MOST_FILE_BYTES"):
        data.load("cifar10", "test", root=tmp_path)


def test_limits_are_the_constants_that_the_errors_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 1000)
    assert read_file(path) == b"x" * 1000
    monkeypatch.setattr(sources, "MOST_FILE_BYTES", 999)
    with pytest.raises(OSError, match=r"1,000 bytes.*more than 999.*sources\.MOST_FILE_BYTES"):
        read_file(path)
    check_expansion(path, 2**24)  # small enough, whatever the ratio
    with pytest.raises(DataError, match=r"1,000 bytes expand to 16,777,217.*MOST_EXPANSION"):
        check_expansion(path, 2**24 + 1)
    monkeypatch.setattr(sources, "MOST_EXPANSION", 2**15)
    check_expansion(path, 2**24 + 1)
