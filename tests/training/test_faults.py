"""Faults of the data and of the folder in the middle of a run: a message, and nothing is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.data import CorruptImageError
from equilibria.data.decoding import LazyImages
from equilibria.training import SaveError, TrainResult
from tests.data.made_files import write_class_folders

from .small import At, assert_same_run, config, run


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_class_folders(tmp_path / "images", {"a": 30, "b": 30}, size=8)
    return tmp_path / "images"


def lazy(images: Path) -> dict[str, Any]:
    """Read from the files batch by batch, as a set is that does not fit into memory."""
    data = eq.data.load(str(images), "train", lazy=True, progress=False)
    return {"data": (data, None), "model": classifier()}


def test_a_file_that_turns_bad_in_the_middle_of_a_run(tmp_path: Path, images: Path) -> None:
    whole = run(config(tmp_path / "whole", batch_size=8), **lazy(images))
    victim = sorted((images / "a").iterdir())[3]
    content = victim.read_bytes()
    damage = At(7, lambda: victim.write_bytes(content[:40]))  # in the second epoch
    place = config(tmp_path / "run", batch_size=8)
    with pytest.raises(CorruptImageError, match=victim.name):
        run(place, callbacks=[damage], **lazy(images))
    victim.write_bytes(content)  # restored from a copy: the run goes on as if nothing had happened
    assert_same_run(run(place, resume=place.folder, **lazy(images)), whole)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error")])
def test_a_worker_that_dies_ends_the_run_and_does_not_hang(
    tmp_path: Path, images: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, decoded, calls = config(tmp_path / "run", batch_size=8), LazyImages.decoded, []

    def dies(self: LazyImages, *given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 9:  # in the thread that makes batches ready, in the second epoch
            raise error
        return decoded(self, *given, **more)

    whole = run(config(tmp_path / "whole", batch_size=8), **lazy(images))
    with monkeypatch.context() as patch:
        patch.setattr(LazyImages, "decoded", dies)
        with pytest.raises(type(error)):
            run(place, **lazy(images))
    assert_same_run(run(place, resume=place.folder, **lazy(images)), whole)


def test_a_folder_that_becomes_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_run: TrainResult
) -> None:
    place, replace = config(tmp_path / "run"), Path.replace

    def refused(self: Path, target: Any) -> Any:
        if Path(target).name == "last.ckpt" and (tmp_path / "run" / "last.ckpt").exists():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refused)
        with pytest.raises(SaveError, match=r"last\.ckpt.*Read-only file system"):
            run(place)
    assert_same_run(run(place, resume=place.folder), whole_run)
