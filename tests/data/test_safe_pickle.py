"""Pickles of arrays are read; pickles of anything else run nothing."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from pathlib import Path

import numpy as np
import pytest

from equilibria.data import DataError
from equilibria.data.safe_pickle import read_pickle

DATA = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)


def stored(tmp_path: Path, value: object, protocol: int = 2) -> Path:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("key", ["data", b"data"])
def test_arrays_of_every_protocol(tmp_path: Path, protocol: int, key: object) -> None:
    value = {
        key: DATA,
        "wide": np.asfortranarray(DATA),
        "labels": [1, 2],
        "names": ["a", b"b"],
        "ids": np.arange(3),
        "nothing": None,
    }
    found = read_pickle(stored(tmp_path, value, protocol))
    assert np.array_equal(found["data"], DATA)
    assert np.array_equal(found["wide"], DATA)
    assert found["data"].dtype == np.uint8
    assert found["ids"].tolist() == [0, 1, 2]
    assert (found["labels"], found["names"], found["nothing"]) == ([1, 2], ["a", "b"], None)


def test_a_pickle_of_python_2(tmp_path: Path) -> None:
    """Strings as Python 2 wrote them: the opcode that only it knows, and numpy's old module."""
    raw = DATA.tobytes()
    text = (
        b"\x80\x02}q\x00U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\x00\x85U\x01b\x87R(K\x01K\x05K\x07\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U"
        + bytes([len(raw)])
        + raw
        + b"tbs."
    )
    pickletools.dis(text, out=io.StringIO())  # it is a valid program
    path = tmp_path / "batch"
    path.write_bytes(text)
    assert np.array_equal(read_pickle(path)["data"], DATA)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_not_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    path = stored(tmp_path, {"data": DATA, "extra": Evil(marker)}, protocol)
    pickle.loads(path.read_bytes())
    assert marker.exists()  # the attack works where it is let in
    marker.unlink()
    with pytest.raises(DataError, match=r"batch: refused.*system"):
        read_pickle(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "text",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"c_codecs\ndecode\n.",
        b"\x80\x02cnumpy\nndarray.__class__\n.",
        b"Pid\n.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
    ],
)
def test_other_names_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(text)
    with pytest.raises(DataError, match=r"refused|not a readable pickle"):
        read_pickle(path)


def test_a_file_cannot_change_how_the_next_is_read(tmp_path: Path) -> None:
    """BUILD on a function sets its attributes; the function belongs to that file alone."""
    path = tmp_path / "batch"
    state = b"(N}U\x0c__defaults__)s\x86"  # (None, {"__defaults__": ()}) for setattr
    path.write_bytes(b"\x80\x02c_codecs\nencode\n" + state + b"b.")
    with pytest.raises(DataError):
        read_pickle(path)
    test_arrays_of_every_protocol(tmp_path, 2, "data")


@pytest.mark.parametrize("keep", [0, 1, 30, 0.5, 0.95])
def test_damaged_pickles_are_named(tmp_path: Path, keep: float) -> None:
    path = stored(tmp_path, {"data": DATA})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep if keep >= 1 else keep * len(whole))])
    with pytest.raises(DataError, match="batch is not a readable pickle"):
        read_pickle(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "holds a list"),
        ({"data": {"a": 1}}, "holds a dict"),
        ({"data": np.array([{"a": 1}], dtype=object)}, "type O"),
        ({"data": np.zeros(3)}, "type f8"),
        ({"data": np.array(["a"])}, "type U1"),
        ({"data": 1 + 2j}, "refused"),
        ({"data": np.zeros(3, dtype=">i4")}, "byte order|type"),
    ],
)
def test_other_values_are_refused(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_pickle(stored(tmp_path, value))


def test_an_array_with_too_few_bytes(tmp_path: Path) -> None:
    path = stored(tmp_path, {"data": DATA}, protocol=3)
    text = path.read_bytes().replace(b"K\x05K\x07\x86", b"K\x05K\x09\x86")
    assert text != path.read_bytes()
    path.write_bytes(text)
    with pytest.raises(DataError, match="35 bytes; the file is cut off"):
        read_pickle(path)
