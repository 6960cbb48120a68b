"""Trainings side by side: the same numbers, deaths that cost one row, times measured alone."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from equilibria_papers.tables import (
    Cell,
    Experiment,
    Job,
    reproduce,
    reproduce_all,
)
from equilibria_papers.tables.parallel import split
from equilibria_papers.tables.plan import plan_of
from equilibria_papers.tables.provenance import read_log
from equilibria_papers.tables.reproduction import held

from . import tiny

LONG = {**tiny.RECIPE, "epochs": 100_000}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are in one order, in this process and in a worker of any number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def table(name: str, *jobs: Job, metric: str = "accuracy") -> Experiment:
    cells = tuple(Cell(row=job.name, column=metric, job=job, metric=metric) for job in jobs)
    return dataclasses.replace(tiny.table(), id=name, cells=cells)


def other(name: str, lr: float, **changes: Any) -> Job:
    return tiny.job(name, recipe={**tiny.RECIPE, "lr": lr}, **changes)


def soon(found: Callable[[], bool], then: Callable[[], Any]) -> threading.Thread:
    """Do something as soon as something is there; at last after a minute."""

    def wait() -> None:
        end = time.monotonic() + 60.0
        while not found() and time.monotonic() < end:
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_the_same_numbers_as_one_after_another_and_what_is_shared_once(tmp_path: Path) -> None:
    shared = tiny.job()
    first = table("first", shared, other("slow", 0.01))
    second = table("second", dataclasses.replace(shared, measures=("saliency",)), metric="focus")
    told: list[str] = []
    many = tiny.choices(tmp_path / "many", parallel=2)
    found = reproduce_all([first, second], many, tell=told.append)
    serial = tiny.choices(tmp_path / "one")
    expected = [reproduce(first, serial), reproduce(second, serial)]
    for one, two in zip(found, expected, strict=True):
        assert one.status == "measured"
        assert [c.mean for c in one.cells] == [c.mean for c in two.cells]
    for folder in (tmp_path / "one" / "runs").iterdir():
        twin = tmp_path / "many" / "runs" / folder.name
        ours, theirs = (load_file(at / "model.safetensors") for at in (twin, folder))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lines = read_log(tmp_path / "many" / "results")
    assert sorted((line["id"], line["job"], line["outcome"]) for line in lines) == [
        ("first", "slow", "done"),
        ("first, second", "tiny", "done"),
    ]
    (both,) = [line for line in lines if line["job"] == "tiny"]
    assert {"accuracy", "focus"} <= set(both["result"])  # united: measured in one go
    assert sum("started" in text for text in told) == 2
    assert sum(re.search(r": done in \d+ s$", text) is not None for text in told) == 2
    assert (tmp_path / "many" / "results" / "second.json").exists()


class Deadly:
    """What unpickles it is killed."""

    def __reduce__(self) -> Any:
        return exec, ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)",)


@pytest.mark.slow
def test_a_death_costs_one_row_and_times_are_measured_alone(tmp_path: Path) -> None:
    killed = tiny.job("killed", stand_in={"data": Deadly()})
    timed = other("timed", 0.03, measures=("quality", "throughput"))
    broken = other("broken", 0.02, trained=False, measures=("no such measure",))
    choices = tiny.choices(tmp_path, parallel=2)
    result = reproduce(table("mixed", killed, timed, other("last", 0.01), broken), choices)
    assert result.cells[0].why == "failed: its process was killed (out of memory?)"
    assert result.cells[1].mean is not None
    assert result.cells[2].mean is not None
    assert result.cells[3].why == "failed: KeyError: 'no such measure'"
    assert result.status == "partly"

    def made(job: Job) -> dict[str, list[float]]:
        kept = json.loads((plan_of(job, choices)[0].folder / "measured.json").read_text())
        return kept["intervals"]  # type: ignore[no-any-return]

    ends = [made(job)["quality"][1] for job in (timed, other("last", 0.01))]
    assert max(ends) < made(timed)["throughput"][0]
    found = [(line["job"], line["outcome"]) for line in read_log(tmp_path / "results")]
    assert found[-1] == ("timed", "done")
    assert sorted(found) == [
        *(("broken", "failed"), ("killed", "failed"), ("last", "done")),
        *(("timed", "done"), ("timed", "done")),
    ]


@pytest.mark.slow
def test_a_smoke_test_passes_nothing_over(tmp_path: Path) -> None:
    broken = tiny.job("broken", trained=False, measures=("no such measure",))
    choices = tiny.choices(tmp_path, smoke=True, parallel=2)
    with pytest.raises(RuntimeError, match="broken, seed 0: KeyError"):
        reproduce(table("smoke", broken), choices)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_limit_of_time_saves_and_the_next_call_goes_on(tmp_path: Path) -> None:
    made = table("parts", tiny.job("a"), other("b", 0.04), other("c", 0.03))
    whole = reproduce(made, tiny.choices(tmp_path / "whole"))
    told: list[str] = []
    short = tiny.choices(tmp_path / "parts", parallel=2, minutes=1e-9)
    with pytest.raises(KeyboardInterrupt, match="minutes are over"):
        reproduce(made, short, tell=told.append)
    assert sum("started" in text for text in told) == 2  # the third is not begun
    lines = read_log(tmp_path / "parts" / "results")
    assert [line["outcome"] for line in lines] == ["interrupted", "interrupted"]
    result = reproduce(made, tiny.choices(tmp_path / "parts", parallel=2))
    assert [c.mean for c in result.cells] == [c.mean for c in whole.cells]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_save_and_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # not guarded by __name__: a worker does not import it
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from papers.tests.tables import tiny\n"
        "from papers.tests.tables.test_parallel import LONG, table\n"
        "from equilibria_papers.tables import reproduce\n"
        "made = table('orphans', tiny.job('a', recipe=LONG))\n"
        "reproduce(made, tiny.choices(Path(sys.argv[1]), parallel=2), tell=lambda t:\n"
        "    print(t, flush=True))\n"
    )
    begun = plan_of(tiny.job("a", recipe=LONG), tiny.choices(tmp_path))[0].folder / "last.ckpt"
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    ) as parent:
        soon(begun.exists, lambda: None).join()
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        workers = children.read_text().split() if children.exists() else []
        parent.kill()
        killed = time.time()
    soon(lambda: begun.stat().st_mtime >= killed, lambda: None).join()
    assert begun.stat().st_mtime >= killed
    soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), lambda: None).join()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_what_runs_alone_is_split_off(tmp_path: Path) -> None:
    def parts(*measures: str, **changes: Any) -> list[tuple[str, ...] | None]:
        job = tiny.job(measures=measures, **changes)
        found = split(plan_of(job, tiny.choices(tmp_path))[0])
        return [None if part is None else part.job.measures for part in found]

    assert parts("quality", "times", "features") == [("quality", "features"), ("times",)]
    assert parts("quality") == [("quality",), None]
    assert parts("throughput", trained=False) == [None, ("throughput",)]
    assert parts("times") == [(), ("times",)]  # trained first, beside others
    folder = plan_of(tiny.job(), tiny.choices(tmp_path))[0].folder
    folder.mkdir(parents=True)
    kept = {"measures": {"quality": {}, "times": {}}, "seconds": 1.0, "made_by": {}}
    (folder / "measured.json").write_text(json.dumps(kept))
    assert parts("quality", "times") == [None, None]
    assert parts("quality", "throughput") == [None, ("throughput",)]


def test_ctrl_c_waits_for_the_end_of_the_outermost_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[str]()

    def write() -> None:
        with held():
            with held():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["inner", "outer"]
    with pytest.raises(ValueError, match="own"), held():  # errors pass
        raise ValueError("own")
    thread = threading.Thread(target=lambda: done.append(held().__enter__() or "other thread"))
    thread.start()
    thread.join()
    assert done[-1] == "other thread"
    assert signal.getsignal(signal.SIGINT) is before
