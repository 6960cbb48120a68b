"""Saving and loading: atomic, checked against the network, and nothing lost on the way."""

from __future__ import annotations

import builtins
import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria import models
from equilibria.engine import files
from equilibria.engine.files import SaveError
from tests.models.small import images, make


@pytest.fixture
def model() -> models.Network:
    return make("geq_digits").eval()


def _rewrite(path: Path, change: Any) -> None:
    """Change a file's header through ``change(header)``; tensors stay."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _config(change: dict[str, Any]) -> Any:
    def apply(header: dict[str, Any]) -> None:
        metadata = header["__metadata__"]
        metadata["config"] = json.dumps({**json.loads(metadata["config"]), **change})

    return apply


# ---------------------------------------------------------------------- what is kept


def test_solver_and_adjoint_come_back(tmp_path: Path) -> None:
    solver = eq.BestIterate(eq.Anderson(memory=3, rtol=1e-2, max_steps=11, damping=0.9))
    adjoint = eq.Implicit(solver=eq.CG(rtol=1e-3))
    model = make("geq_digits", solver=solver, adjoint=adjoint, gamma=eq.LearnedGamma(0.4))
    loaded = models.load(models.save(model, tmp_path / "m"))
    layers = eq.nn.equilibrium_layers(loaded)
    assert len(layers) == 2
    for layer in layers.values():
        assert layer.solver == solver
        assert layer.adjoint == adjoint
        assert layer.gamma == eq.LearnedGamma(0.4)


def test_extra_travels_and_is_kept_on_the_next_save(model: models.Network, tmp_path: Path) -> None:
    extra = {"classes": ["é", "☂"], "mean": [0.1, 0.2], "metrics": {"accuracy": 0.5, "n": None}}
    loaded = models.load(models.save(model, tmp_path / "a", extra=extra))
    assert loaded.extra == extra
    again = models.load(models.save(loaded, tmp_path / "b"))
    assert again.extra == extra
    assert models.load(models.save(loaded, tmp_path / "c", extra={})).extra == {}


def test_extra_that_json_cannot_hold(model: models.Network, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"takes what JSON can hold.*Tensor"):
        models.save(model, tmp_path / "m", extra={"mean": torch.zeros(3)})
    assert list(tmp_path.iterdir()) == []


def test_a_loaded_network_trains_on(tmp_path: Path) -> None:
    model = make("geq_digits")
    loaded = models.load(models.save(model, tmp_path / "m")).train()
    before = {key: value.clone() for key, value in loaded.state_dict().items()}
    loaded(images(loaded)).square().sum().backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    assert all(not torch.equal(before[key], value) for key, value in loaded.named_parameters())
    fresh = models.load(tmp_path / "m")
    assert all(torch.equal(before[key], value) for key, value in fresh.named_parameters())
    # ... and weights are the network's own, not windows into the file.
    with (tmp_path / "m").open("r+b") as file:
        file.write(b"\0" * (tmp_path / "m").stat().st_size)
    assert all(torch.equal(before[key], value) for key, value in fresh.named_parameters())


@pytest.mark.slow
def test_compiled_and_channels_last_networks_are_saved_as_they_are(
    model: models.Network, tmp_path: Path
) -> None:
    x = images(model)
    with torch.no_grad():
        expected = model(x)
    wrapped = torch.compile(model.to(memory_format=torch.channels_last))
    loaded = models.load(models.save(wrapped, tmp_path / "m"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), expected)


def test_what_is_no_named_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"made by models\.create, got Linear without a config"):
        models.save(nn.Linear(2, 2), tmp_path / "m")


def test_places_that_are_no_place(model: models.Network, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is a folder; give a file"):
        models.save(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="lies in no folder"):
        models.save(model, tmp_path / "none" / "m.safetensors")


def test_safetensors_missing(
    model: models.Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    path = models.save(model, tmp_path / "m")
    monkeypatch.setattr(builtins, "__import__", without)
    for use in (
        lambda: models.save(model, path),
        lambda: models.load(path),
        lambda: models.read_header(path),
    ):
        with pytest.raises(ImportError, match=r'pip install "equilibria\[train\]"'):
            use()


# ---------------------------------------------------------------------- all or nothing


class _FullDisk:
    """A file on a disk that has room for ``room`` more bytes."""

    def __init__(self, file: Any, room: int, error: BaseException) -> None:
        self.file, self.room, self.error = file, room, error

    def __enter__(self) -> _FullDisk:
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        self.file.write(data[: self.room])
        if len(data) > self.room:
            raise self.error
        self.room -= len(data)
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
    ids=["full disk", "Ctrl-C"],
)
def test_a_full_disk_leaves_the_old_file(
    model: models.Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = models.save(model, tmp_path / "m.safetensors", extra={"run": 1})
    old = path.read_bytes()
    real = Path.open

    def limited(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = real(self, mode, *args, **kwargs)
        return _FullDisk(file, len(old) // 2, error) if mode == "wb" else file

    monkeypatch.setattr(files, "_CHUNK", 1000)
    monkeypatch.setattr(Path, "open", limited)
    with pytest.raises(type(error)):
        models.save(make("geq_digits", seed=9), path, extra={"run": 2})
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"], "a part was left behind"
    assert models.load(path).extra == {"run": 1}


def test_a_real_limit_on_file_sizes_leaves_the_old_file(
    model: models.Network, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    path = models.save(model, tmp_path / "m.safetensors")
    old = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            models.save(make("geq_digits", seed=9), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_failed_rename_leaves_the_old_file(
    model: models.Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.save(model, tmp_path / "m.safetensors")
    old = path.read_bytes()

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(SaveError, match="refused"):
        models.save(make("geq_digits", seed=9), path)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_the_bytes_are_on_the_disk_before_the_name_is(
    model: models.Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        happened.append("sync")
        sync(handle)

    def replaced(self: Path, target: Path) -> Path:
        happened.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    models.save(model, tmp_path / "m")
    assert happened[:2] == ["sync", "rename"]


# ---------------------------------------------------------------------- weights of another network


def test_missing_and_foreign_tensors(model: models.Network, tmp_path: Path) -> None:
    path = models.save(model, tmp_path / "m")

    def rename(header: dict[str, Any]) -> None:
        header["stam.weight"] = header.pop("stem.weight")

    _rewrite(path, rename)
    with pytest.raises(
        models.ModelFileError,
        match=r"1 missing \(stem.weight\) and 1 that the network does not have \(stam.weight\)",
    ):
        models.load(path)


def test_a_file_of_another_network(model: models.Network, tmp_path: Path) -> None:
    path = models.save(model, tmp_path / "m")
    options = make("explicit_digits").config.options
    _rewrite(path, _config({"name": "explicit_digits", "options": dict(options)}))
    with pytest.raises(models.ModelFileError, match=r"its network: tensors \d+ missing"):
        models.load(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_classes": 6}, r"head.4.weight is F32 of shape \(5, 16\), expected .* \(6, 16\)"),
        (
            {"in_channels": 2},
            r"shape \(8, 1, 3, 3\), expected .* \(8, 2, 3, 3\)",
        ),
        ({"num_classes": 0}, "num_classes=0, expected an integer"),
        ({"num_classes": 10**12}, "expected an integer in"),
        ({"image_size": 7}, "image_size=7 is no multiple of"),
        ({"name": "geq_digitz"}, "there is no model 'geq_digitz'. Did you mean geq_digits"),
        ({"name": "__main__"}, "there is no model '__main__'"),
        ({"options": {"depth": 10**9}}, "option depth=1000000000"),
        ({"options": {"num_classes": 3}}, "cannot build"),
        ({"options": {"name": "x"}}, "cannot build"),
        ({"options": {"novelty": 3}}, "has no option 'novelty'"),
        ({"options": {"solver": {"kind": "Popen", "args": "true"}}}, "kind='Popen' is not known"),
    ],
)
def test_configurations_that_do_not_fit(
    model: models.Network, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    path = models.save(model, tmp_path / "m")
    if "options" in change:
        change = {"options": {**model.config.options, **change["options"]}}
    _rewrite(path, _config(change))
    with pytest.raises(models.ModelFileError, match=match):
        models.load(path)


def test_dtypes_that_do_not_fit(model: models.Network, tmp_path: Path) -> None:
    path = models.save(model, tmp_path / "m")
    count = "stages.0.norm.num_batches_tracked"

    def as_float(header: dict[str, Any]) -> None:
        assert header[count]["dtype"] == "I64"
        header[count]["dtype"] = "F64"

    _rewrite(path, as_float)
    with pytest.raises(models.ModelFileError, match=rf"{count} is F64 of shape .*, expected I64"):
        models.load(path)

    path = models.save(model, tmp_path / "m")

    def as_integer(header: dict[str, Any]) -> None:
        header["stem.weight"]["dtype"] = "I32"

    _rewrite(path, as_integer)
    with pytest.raises(models.ModelFileError, match="mixes the precisions F32, I32"):
        models.load(path)


def test_mixed_precisions(model: models.Network, tmp_path: Path) -> None:
    model.stem.half()  # type: ignore[union-attr]
    path = models.save(model, tmp_path / "m")
    with pytest.raises(models.ModelFileError, match="mixes the precisions F16, F32"):
        models.load(path)


def test_half_precision_on_disk_full_precision_in_memory(tmp_path: Path) -> None:
    model = models.create("geq_digits")
    whole = models.save(model, tmp_path / "whole.safetensors")
    half = models.save(model, tmp_path / "half.safetensors", dtype=torch.float16)
    assert half.stat().st_size < 0.6 * whole.stat().st_size
    back = models.load(half, dtype=torch.float32)
    for (name, mine), theirs in zip(
        back.state_dict().items(), model.state_dict().values(), strict=True
    ):
        if theirs.is_floating_point():
            assert mine.dtype == torch.float32, name
            assert torch.equal(mine, theirs.half().float()), name
        else:
            assert torch.equal(mine, theirs), name
    assert next(models.load(half).parameters()).dtype == torch.float16
