"""Checkpoints: whole on a full disk, refused when they belong elsewhere, never unpickled."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import random
import resource
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

from equilibria.training import (
    CheckpointError,
    Interrupted,
    RunExistsError,
    SaveError,
    TrainConfig,
    TrainResult,
    read_checkpoint,
    run_folder,
)
from equilibria.training.lock import FolderLock
from equilibria.training.run_folder import random_state, restore_random_state, seed_all

from .small import At, RaiseAt, Tiny, assert_same_run, config, run


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted in its second epoch."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.raises(Interrupted):
        run(config(folder, ema=0.9), callbacks=[RaiseAt(8)])
    return folder


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def limit_files() -> None:
    """The kernel refuses to let files grow: a checkpoint breaks off in the middle."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("fault", ["fsync", "write"])
def test_a_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, whole_run: TrainResult
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept: list[bytes] = []

    def fill() -> None:
        kept.append((tmp_path / "last.ckpt").read_bytes())
        limit_files() if fault == "write" else monkeypatch.setattr(os, "fsync", full)

    settings = config(tmp_path)
    try:
        with pytest.raises(SaveError, match=r"could not write .*unchanged") as caught:
            run(settings, callbacks=[At(2, fill, "on_train_epoch_start")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        monkeypatch.undo()
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert len(kept[0]) > 8192
    assert (tmp_path / "last.ckpt").read_bytes() == kept[0]
    assert not list(tmp_path.glob(".*"))
    assert_same_run(run(settings, resume=tmp_path), whole_run)


def test_full_at_the_very_end_resume_writes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"epochs": 1, "ema": 0.9}
    place = config(tmp_path / "full", **options)
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save", full)
        with pytest.raises(SaveError, match="resume from"):
            run(place)
    assert not (place.folder / "model.safetensors").exists()
    found = run(place, resume=place.folder)
    assert_same_run(found, run(config(tmp_path / "whole", **options)))
    names = ("result.json", "history.csv")
    kept = [(place.folder / name).read_bytes() for name in names]
    (place.folder / "history.csv").unlink()
    run(place, resume=place.folder)  # once more: nothing is trained, nor are its seconds anew
    assert [(place.folder / name).read_bytes() for name in names] == kept
    copied = run(config(tmp_path / "copy", **options), resume=place.folder)
    assert copied.checkpoint.parent == tmp_path / "copy"
    assert_same_run(run(config(copied.folder, **options), resume=copied.folder), found)


@pytest.mark.parametrize("select", ["last", "best"])
@pytest.mark.parametrize("kill", [False, True])
def test_ended_before_the_first_checkpoint_it_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: bool, select: str
) -> None:
    """By a full disk or by kill -9, which leaves parts of files too."""
    options: dict[str, Any] = {"epochs": 1, "select": select, "keep_every": 1}
    place = config(tmp_path / "run", **options, loggers=["tensorboard"])
    with monkeypatch.context() as patch:
        patch.setattr("equilibria.training.run_folder.write_bytes", full)
        if kill:
            let_go = FolderLock.release
            patch.setattr(FolderLock, "release", lambda self, keep: let_go(self, keep=True))
        with pytest.raises(SaveError if select == "best" or kill else OSError) as caught:
            run(place)
    assert "checkpoint" not in str(caught.value) or "No checkpoint was written" in str(caught.value)
    assert not (place.folder / "last.ckpt").exists()
    for name in (".last.ckpt.1-2.part", "epochs/.epoch_0001.safetensors.3-4.part"):
        (place.folder / name).parent.mkdir(exist_ok=True)
        (place.folder / name).write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"no checkpoint yet.*without resume"):
        run(place, resume=place.folder)
    assert_same_run(run(place), run(config(tmp_path / "whole", **options)))
    assert not [*place.folder.rglob("*.part"), *place.folder.glob("*.lock")]


def test_what_was_saved_is_not_started_over(tmp_path: Path) -> None:
    """A configuration of the user's own, weights from elsewhere, a report: none is replaced."""
    for name in ("config.yaml", "model.safetensors", "nonfinite.json"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(RunExistsError, match=r"already holds a run\. Replace it"):
            run(config(folder))
        assert [(p.name, p.read_text()) for p in folder.iterdir()] == [(name, "mine")]


def test_another_configuration_is_refused(cut: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lr: now 0\.2, then 0\.1") as caught:
        run(config(tmp_path, ema=0.9, lr=0.2, batch_size=16, epochs=5), resume=cut)
    assert "batch_size: now 16, then 32" in str(caught.value)
    assert "epochs: now 5, then 3" in str(caught.value)
    assert "config.yaml" in str(caught.value)
    assert not (tmp_path / "config.yaml").exists()


def test_what_does_not_change_the_numbers_may_change(cut: Path, tmp_path: Path) -> None:
    found = run(config(tmp_path, ema=0.9, log_every=7, workers=1, loggers=["csv"]), resume=cut)
    assert (tmp_path / "csv" / "version_0" / "metrics.csv").exists()
    expected = run(config(tmp_path / "whole", ema=0.9, log_every=7))
    for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_begun_with_other_defaults_is_not_resumed(
    cut: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it would be another network's. A checkpoint without a revision is of the first."""
    assert TrainConfig(model="opteq_stack_cifar_3m", data="cifar10").model_revision == 1
    assert TrainConfig(model="opteq_digits", data="digits").model_revision == 0
    now = config(cut).model_revision
    monkeypatch.setattr(TrainConfig, "model_revision", now + 1)
    told = rf"other defaults .*revision {now}, now {now + 1}.* new run"
    with pytest.raises(CheckpointError, match=told):
        run(config(cut, ema=0.9), resume=cut)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Tiny(width=14), r"geq.U.weight \(12, 64\): in the checkpoint only"),
        (torch.nn.Linear(3, 2), r"bias \(2,\): in the model only"),
    ],
)
def test_another_model_is_refused(cut: Path, tmp_path: Path, model: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match="another model") as caught:
        run(config(tmp_path, ema=0.9), resume=cut, model=model)
    assert caught.match(said)


class Bomb:
    """Unpickling it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_a_file_of_anothers_making_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"equilibria": Bomb(mark), "state_dict": {}}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        run(config(tmp_path / "out"), resume=tmp_path / "last.ckpt")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"not a checkpoint at all", "cannot be read"),
        ({"state_dict": {}}, "lacks the entry"),
        ([1, 2], "lacks the entry"),
        ({"equilibria": {"format": 1, "version": "0.1"}, "state_dict": {}}, "equilibria 0.1"),
    ],
)
def test_foreign_and_older_files(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(CheckpointError, match=said):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        run(config(tmp_path / "out"), resume=tmp_path / "none")
    assert not (tmp_path / "out").exists()


def plain(found: Any) -> Any:
    """Tensors as arrays, which numpy compares inside mappings and lists."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.numpy(), found)


@given(st.data())
@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
def test_damaged_bytes_are_found_or_do_no_harm(cut: Path, data: st.DataObject) -> None:
    """Every changed byte of every tensor is an error; one between the records changes nothing."""
    whole = bytearray((cut / "last.ckpt").read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = cut / "damaged.ckpt"
    path.write_bytes(bytes(whole[: data.draw(st.just(len(whole)) | st.integers(1, len(whole)))]))
    with contextlib.suppress(CheckpointError):
        expected = torch.load(cut / "last.ckpt", weights_only=True)
        np.testing.assert_equal(plain(read_checkpoint(path)), plain(expected))


def test_the_error_of_a_flipped_bit_names_the_record(cut: Path, tmp_path: Path) -> None:
    whole = bytearray((cut / "last.ckpt").read_bytes())
    weight = torch.load(cut / "last.ckpt", weights_only=True)["state_dict"]["model.head.weight"]
    whole[whole.index(weight.numpy().tobytes()) + 5] ^= 1
    path = tmp_path / "last.ckpt"
    path.write_bytes(whole)
    torch.load(path, weights_only=True)  # which does not look
    said = rf"{path} .*checksum of .*data/\d+ does not match.*delete it and start the run again"
    with pytest.raises(CheckpointError, match=said):
        run(config(tmp_path / "out", ema=0.9), resume=path)


def test_checksums_that_somebody_turned_off_are_written(cut: Path, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        run(config(tmp_path, epochs=1))
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_checkpoint(tmp_path / "last.ckpt")["equilibria"]["finished"]


@pytest.mark.parametrize("how", ["deflated", "overlapping"])
def test_a_checkpoint_that_expands_is_refused_before_it_is_read(tmp_path: Path, how: str) -> None:
    path, plain = tmp_path / "last.ckpt", tmp_path / "plain.pt"
    torch.save({"equilibria": {"format": 2}, "state_dict": {"a": torch.zeros(2**20)}}, plain)
    kind = zipfile.ZIP_DEFLATED if how == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(plain) as read, zipfile.ZipFile(path, "w", kind) as made:
        for name in read.namelist():
            made.writestr(name, read.read(name) if kind == zipfile.ZIP_DEFLATED else b"x" * 64)
        if how == "overlapping":  # a thousand names of one record
            first = made.filelist[0]
            for k in range(1000):
                again = copy.copy(first)
                again.filename = f"{first.filename}{k}"
                made.filelist.append(again)
                made.NameToInfo[again.filename] = again
            made._didModify = True
    assert path.stat().st_size < 2**18
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="compressed or overlap"):
        read_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 2**21  # less than the values that it promises
    tracemalloc.stop()


def replaced_pickle(path: Path, content: bytes) -> None:
    """A checkpoint of torch's own making with another pickle inside."""
    torch.save({"a": torch.zeros(2)}, path.with_suffix(".pt"))
    with zipfile.ZipFile(path.with_suffix(".pt")) as read, zipfile.ZipFile(path, "w") as made:
        for name in read.namelist():
            made.writestr(name, content if name.endswith("data.pkl") else read.read(name))


@pytest.mark.parametrize("name", ["__builtin__\nbytearray", "torch\nFloatTensor", "torch\nTensor"])
@pytest.mark.parametrize("parts", [False, True])
def test_a_pickle_that_asks_for_gigabytes_is_refused(
    tmp_path: Path, name: str, parts: bool
) -> None:
    """weights_only lets it have a bytearray or a tensor of any size."""
    words = name.split("\n")
    named = b"c" + name.encode() + b"\n"
    if parts:
        named = b"".join(b"X" + len(w).to_bytes(4, "little") + w.encode() for w in words) + b"\x93"
    size = (2**40).to_bytes(6, "little")
    replaced_pickle(tmp_path / "last.ckpt", b"\x80\x02" + named + b"\x8a\x06" + size + b"\x85R.")
    with pytest.raises(CheckpointError, match="ask for any size"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_values_that_are_more_than_what_is_stored_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MOST_VALUES", 2**16)
    laughs: list[Any] = [1]
    for _ in range(40):
        laughs = [laughs, laughs]
    path = tmp_path / "last.ckpt"
    for wide, said in (
        (torch.zeros(1).expand(2**40), "fewer stored values"),
        (torch.empty(2**40, device="meta"), "fewer stored values"),
        (laughs, "MOST_VALUES"),
    ):
        content = {"equilibria": {"format": 2}, "state_dict": {}, "callbacks": {"a": [wide]}}
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=said):
            read_checkpoint(path)


@pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        run(config(tmp_path / "out"), resume=tmp_path)


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand()]  # noqa: NPY002


def test_random_numbers_are_seeded_stored_and_put_back() -> None:
    before = random_state()
    seed_all(3)
    random.gauss(0, 1)  # leaves a second number behind
    file = io.BytesIO()
    torch.save(random_state(), file)
    expected = [draw() for _ in range(3)]
    seed_all(99)
    assert all(a != b for a, b in zip(draw(), expected[0], strict=True))
    file.seek(0)
    restore_random_state(torch.load(file, weights_only=True))
    assert [draw() for _ in range(3)] == expected
    restore_random_state(before)
