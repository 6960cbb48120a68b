"""Checkpoints: whole on a full disk, refused when they belong elsewhere, never unpickled."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import resource
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equilibria.training import (
    CheckpointError,
    Interrupted,
    SaveError,
    TrainConfig,
    fit,
    read_checkpoint,
)
from equilibria.training.run_folder import random_state, restore_random_state, seed_all

from .small import RaiseAt, Tiny, config, digits, run, same_weights


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted in its second epoch."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.raises(Interrupted):
        run(config(folder, ema=0.9), callbacks=[RaiseAt(8, KeyboardInterrupt())])
    return folder


def test_a_run_begun_with_other_defaults_is_not_resumed(
    cut: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it would be another network's. A checkpoint without a revision is of the first."""
    assert TrainConfig(model="opteq_stack_cifar_3m", data="cifar10").model_revision == 1
    assert TrainConfig(model="geq_digits", data="digits").model_revision == 0
    monkeypatch.setattr(TrainConfig, "model_revision", 1)
    with pytest.raises(CheckpointError, match=r"other defaults .*revision 0, now 1.* new run"):
        run(config(cut, ema=0.9), resume=cut)


class AfterEpoch(pl.Callback):
    """Does something when the first epoch has been saved."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.act()


def test_a_checkpoint_needs_no_unpickling(cut: Path) -> None:
    found = torch.load(cut / "last.ckpt", weights_only=True)
    assert found["equilibria"]["progress"] == {"epoch": 1, "batch": 2, "step": 8}
    assert found["equilibria"]["config"]["epochs"] == 3
    assert "loops" not in found


def test_a_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept: list[bytes] = []

    def fill() -> None:
        kept.append((tmp_path / "last.ckpt").read_bytes())
        monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(SaveError, match="No space left") as caught:
        run(config(tmp_path), callbacks=[AfterEpoch(fill)])
    assert caught.value.errno == errno.ENOSPC
    assert "unchanged" in str(caught.value)
    assert (tmp_path / "last.ckpt").read_bytes() == kept[0]
    assert not list(tmp_path.glob(".*"))
    monkeypatch.undo()
    found = run(config(tmp_path), resume=tmp_path)
    expected = run(config(tmp_path / "other"))
    assert same_weights(found.model, expected.model)


def test_a_write_that_really_fails(tmp_path: Path) -> None:
    """The kernel refuses to let files grow: a checkpoint breaks off in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept: list[bytes] = []

    def limit() -> None:
        kept.append((tmp_path / "last.ckpt").read_bytes())
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))

    try:
        with pytest.raises(SaveError, match=r"last\.ckpt"):
            run(config(tmp_path, log_every=1000), callbacks=[AfterEpoch(limit)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(kept[0]) > 8192
    assert (tmp_path / "last.ckpt").read_bytes() == kept[0]
    assert not list(tmp_path.glob(".*"))


def test_full_at_the_very_end_resume_writes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(config(tmp_path / "whole", ema=0.9))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save", full)
        with pytest.raises(SaveError, match="resume from"):
            run(config(tmp_path / "full", ema=0.9))
    assert not (tmp_path / "full" / "model.safetensors").exists()
    found = run(config(tmp_path / "full", ema=0.9), resume=tmp_path / "full")
    assert same_weights(found.model, whole.model)
    assert found.weights.exists()
    assert (tmp_path / "full" / "result.json").exists()


def test_another_configuration_is_refused(cut: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lr: now 0\.2, then 0\.1") as caught:
        run(config(tmp_path, ema=0.9, lr=0.2, batch_size=16), resume=cut)
    assert "batch_size: now 16, then 32" in str(caught.value)
    assert "config.yaml" in str(caught.value)
    assert not (tmp_path / "config.yaml").exists()


def test_what_does_not_change_the_numbers_may_change(cut: Path, tmp_path: Path) -> None:
    found = run(config(tmp_path, ema=0.9, log_every=7, workers=1), resume=cut)
    expected = run(config(tmp_path / "whole", ema=0.9))
    assert same_weights(found.model, expected.model)


def test_another_model_is_refused(cut: Path, tmp_path: Path) -> None:
    place = config(tmp_path, ema=0.9)
    with pytest.raises(CheckpointError, match="another model") as caught:
        fit(place, resume=cut, data=digits(), model=Tiny(width=14), progress=False)
    assert "head.weight: (10, 12) in the checkpoint, (10, 14) in the model" in str(caught.value)
    with pytest.raises(CheckpointError, match="nothing in the checkpoint"):
        fit(place, resume=cut, data=digits(), model=torch.nn.Linear(3, 2), progress=False)


class Bomb:
    """Unpickling it would make a file."""

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
        (None, "cannot be read"),
        ({"state_dict": {}}, "lacks the entry"),
        ([1, 2], "lacks the entry"),
        ({"equilibria": {"format": 99, "version": "9"}, "state_dict": {}}, "format 99"),
    ],
)
def test_damaged_and_foreign_files(cut: Path, tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "last.ckpt"
    if content is None:  # cut short
        whole = (cut / "last.ckpt").read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=said):
        read_checkpoint(path)


@given(st.data())
@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
def test_damaged_bytes_are_an_error_of_ours_or_do_no_harm(cut: Path, data: st.DataObject) -> None:
    whole = bytearray((cut / "last.ckpt").read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        path.write_bytes(bytes(whole))
        with contextlib.suppress(CheckpointError):
            assert "state_dict" in read_checkpoint(path)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        run(config(tmp_path / "out"), resume=tmp_path)
    assert not (tmp_path / "out").exists()


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
