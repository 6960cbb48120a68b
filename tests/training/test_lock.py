"""Two trainings never write to one folder; a lock whose holder died holds nothing up."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equilibria.training import RunExistsError, RunInUseError, read_checkpoint
from equilibria.training import lock as lock_module
from equilibria.training.lock import FolderLock

from .small import At, config, run

# By its path, which needs no import of torch.
TAKE = f"""
import runpy, sys
from pathlib import Path
found = runpy.run_path({lock_module.__file__!r})
FolderLock, RunInUseError = found["FolderLock"], found["RunInUseError"]
folder = Path(sys.argv[1])
"""
HOLD = """
FolderLock(folder / "run.lock").take()
print("held", flush=True)
sys.stdin.read()
"""
COUNT = """
number, done = folder / "number", 0
while done < 50:
    lock = FolderLock(folder / "run.lock")
    try:
        lock.take()
    except RunInUseError:
        continue
    number.write_text(str(int(number.read_text()) + 1))
    lock.release()
    done += 1
"""


def start(script: str, folder: Path, **options: Any) -> Any:
    return subprocess.Popen([sys.executable, "-c", TAKE + script, str(folder)], **options)


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """Another process that holds the lock of ``tmp_path``."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start(HOLD, tmp_path, **pipes, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("options", [{}, {"overwrite": True}])
def test_the_error_names_the_holder_and_nothing_is_touched(
    tmp_path: Path, holder: Any, options: dict[str, Any]
) -> None:
    (tmp_path / "history.csv").write_text("theirs")
    before = (tmp_path / "run.lock").read_bytes()
    with pytest.raises(RunInUseError, match=r"in use by another training.*out=") as caught:
        run(config(tmp_path, epochs=1), **options)
    assert f"process {holder.pid} on {platform.node()}, since 20" in str(caught.value)
    assert (tmp_path / "run.lock").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["history.csv", "run.lock"]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_lock_ends_with_its_holder_and_is_then_stale(tmp_path: Path, holder: Any) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = FolderLock(tmp_path / "run.lock")
    lock.take()
    assert lock.stale
    assert f"process {os.getpid()} on " in lock.path.read_text()
    lock.release()
    assert not lock.path.exists()


def test_two_runs_of_one_process(tmp_path: Path) -> None:
    """Also of threads, which share the process: it is the file that is locked, not the process."""
    seen: list[BaseException] = []

    def second() -> None:
        for options in ({}, {"overwrite": True}, {"resume": tmp_path}):
            try:
                run(config(tmp_path), **options)
            except (RunInUseError, RunExistsError) as error:
                seen.append(error)

    run(config(tmp_path), callbacks=[At(8, second)])  # in its second epoch
    assert [type(error) for error in seen] == [RunInUseError] * 3
    assert not (tmp_path / "run.lock").exists()
    with pytest.raises(RunExistsError):
        run(config(tmp_path))
    assert not (tmp_path / "run.lock").exists()


def test_no_two_processes_hold_it_at_once(tmp_path: Path) -> None:
    """Each adds to a number in a file, which loses counts wherever two are inside."""
    (tmp_path / "number").write_text("0")
    group = [start(COUNT, tmp_path) for _ in range(3)]
    assert [process.wait() for process in group] == [0, 0, 0]
    assert (tmp_path / "number").read_text() == "150"


def test_the_next_holder_keeps_the_file(tmp_path: Path) -> None:
    first, second = (FolderLock(tmp_path / "run.lock") for _ in range(2))
    first.take()
    first.path.unlink()  # the folder was removed, and another run began there
    assert not first.held()
    second.take()
    first.release()
    assert second.held()
    second.release(keep=True)
    first.take()
    assert first.stale
    first.release()


def test_a_lock_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    found = run(config(tmp_path), callbacks=[At(8, (tmp_path / "run.lock").unlink)])
    assert len(found.history) == 3
    assert not (tmp_path / "run.lock").exists()


def test_a_run_that_came_in_between_is_not_written_over(tmp_path: Path) -> None:
    """The folder was removed under the run, and another training ran there."""
    other: list[Any] = []

    def replaced() -> None:
        shutil.rmtree(tmp_path / "a")
        other.append(run(config(tmp_path / "a", epochs=1, seed=1)))

    with pytest.raises(RunExistsError):
        run(config(tmp_path / "a"), callbacks=[At(8, replaced)])
    assert read_checkpoint(other[0].checkpoint)["equilibria"]["config"]["seed"] == 1
    assert not (tmp_path / "a" / "run.lock").exists()
