"""The head of a model file: every lie in it is found before a tensor is read."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equilibria import models
from tests.models.small import images, make


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = make("explicit_digits").eval()
    path = tmp_path_factory.mktemp("good") / "model.safetensors"
    models.save(model, path, extra={"classes": ["a", "b"], "mean": [0.5]})
    return path.read_bytes()


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _file(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _refused(path: Path, data: bytes, match: str) -> None:
    path.write_bytes(data)
    for read in (models.read_header, models.load):
        with pytest.raises(models.ModelFileError, match=match) as caught:
            read(path)  # type: ignore[operator]
        assert str(path) in str(caught.value)


def test_what_a_header_tells(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(good)
    header = models.read_header(path)
    assert header["config"]["name"] == "explicit_digits"
    assert header["config"]["num_classes"] == 5
    assert header["extra"] == {"classes": ["a", "b"], "mean": [0.5]}
    assert header["library"] == __import__("equilibria").__version__
    assert header["bytes"] == len(good)
    # An oracle that shares no code with ours: the safetensors reader.
    with safetensors.safe_open(path, "pt") as file:
        found = {name: tuple(file.get_tensor(name).shape) for name in list(file.keys())}
    assert found == {name: entry["shape"] for name, entry in header["tensors"].items()}


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist: expected a file written by"):
        models.load(tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        models.read_header(tmp_path)


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_are_recognized_and_not_opened(protocol: int, tmp_path: Path) -> None:
    _refused(tmp_path / "m.pt", pickle.dumps(_Bomb(), protocol), "looks like a pickle")


def test_torch_files_are_recognized_and_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"bomb": _Bomb()}, path)
    _refused(path, path.read_bytes(), "looks like a pickle .torch.save., which is never opened")


def test_a_length_that_reads_like_a_pickle_is_fine(good: bytes, tmp_path: Path) -> None:
    # The header is padded to a multiple of 8, so one file in 32 begins with the byte 0x80.
    header, body = _parts(good)
    path = tmp_path / "m"
    text = json.dumps(header).encode()
    for low in range(0, 256, 8):
        padded = text + b" " * ((low - len(text)) % 256)
        data = _file(padded, body)
        assert data[0] == low
        path.write_bytes(data)
        assert models.load(path).extra["mean"] == [0.5]


def _change(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(fields)


def _overlap(header: dict[str, Any]) -> None:
    same = [n for n, e in header.items() if n != "__metadata__" and e["shape"] == [8]][:2]
    header[same[0]]["data_offsets"] = header[same[1]]["data_offsets"]


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, n=n: data[:n] for n in range(9)),
        *(
            lambda data, n=n: struct.pack("<Q", n) + data[8:]
            for n in (0, 1, 2**23, 2**24 + 1, 2**40, 2**63, 2**64 - 1)
        ),
        lambda data: data + b"\0\0\0",
        *(
            lambda data, text=text: _file(text, b"")
            for text in (
                b"{ ",
                b'{"a": \xff}',
                b"[1, 2]",
                b"[" * 100_000,
                b'{"a": ' + b"9" * 10_000 + b"}",
                b"{}",
            )
        ),
    ],
)
def test_files_that_are_none(good: bytes, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    _refused(tmp_path / "m", damage(good), "is not a usable model file")


@given(cut=st.floats(0.0, 0.999999))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_truncation_is_found(good: bytes, tmp_path: Path, cut: float) -> None:
    path = tmp_path / "m"
    path.write_bytes(good[: int(cut * len(good))])
    with pytest.raises(models.ModelFileError, match="truncated or damaged"):
        models.load(path)


@pytest.mark.parametrize(
    "change",
    [
        _change("stem.weight", dtype="F128"),
        _change("stem.weight", dtype=None),
        _change("stem.weight", shape=[9]),
        _change("stem.weight", shape=[2**62, 2**62]),
        _change("stem.weight", shape=[-1, 3]),
        _change("stem.weight", shape="8"),
        _change("stem.weight", data_offsets=[0]),
        _change("stem.weight", data_offsets=[4, 0]),
        _change("stem.weight", data_offsets=[10**15, 10**15 + 288]),
        lambda header: header.update({"stem.weight": 3}),
        _overlap,
    ],
)
def test_tensors_that_do_not_fit_the_file(
    good: bytes, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    header, body = _parts(good)
    change(header)
    _refused(tmp_path / "m", _file(header, body), "truncated or damaged")


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"format": "pt"}, r"without the mark of models.save \(format='pt'"),
        ({"format": "equilibria-model/2"}, "format='equilibria-model/2'"),
        ({"config": "{"}, "its config is not valid JSON"),
        ({"config": "[]"}, "its config is a JSON list"),
        ({"config": '{"name": 3}'}, "its config has name=3, expected str"),
        ({"config": '{"name": "geq_digits"}'}, "num_classes=None, expected int"),
        ({"extra": "nothing"}, "its extra is not valid JSON"),
        ({"library": None}, "truncated or damaged"),
    ],
)
def test_metadata_that_is_not_ours(
    good: bytes, tmp_path: Path, metadata: dict[str, Any], match: str
) -> None:
    header, body = _parts(good)
    header["__metadata__"].update(metadata)
    _refused(tmp_path / "m", _file(header, body), match)


def test_no_metadata_at_all(good: bytes, tmp_path: Path) -> None:
    header, body = _parts(good)
    del header["__metadata__"]
    _refused(tmp_path / "m", _file(header, body), "without the mark of models.save")
    path = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path)
    _refused(path, path.read_bytes(), "without the mark of models.save")


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_never_raises_anything_else(
    good: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    (length,) = struct.unpack("<Q", good[:8])
    place = data.draw(st.integers(0, 8 + length - 1))
    byte = data.draw(st.integers(0, 255))
    path = tmp_path / "m"
    path.write_bytes(good[:place] + bytes([byte]) + good[place + 1 :])
    try:
        model = models.load(path)
    except models.ModelFileError:
        return
    # A byte inside extra, or one that says the same: the network is whole.
    with torch.no_grad():
        assert torch.isfinite(model(images(model))).all()
