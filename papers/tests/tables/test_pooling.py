"""Trainings side by side: the same numbers, deaths that cost one row, times measured alone."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
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
    Choices,
    Experiment,
    Job,
    plan,
    pooling,
    reproduce,
    reproduce_all,
)
from equilibria_papers.tables.log import Log, read_log
from equilibria_papers.tables.planning import Planned, plan_of
from equilibria_papers.tables.pooling import Pool, Task, split
from equilibria_papers.tables.registry import EXPERIMENTS
from equilibria_papers.tables.working import START, order_of

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


def pid_in(text: str) -> int:
    found = re.search(r"process (\d+)", text)
    assert found is not None
    return int(found[1])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and ") Z " in state.read_text())


# ---------------------------------------------------------------------------- real trainings


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


def test_a_death_costs_one_row_and_times_are_measured_alone(tmp_path: Path) -> None:
    killed = tiny.job("killed", recipe=LONG)
    timed = tiny.job("timed", measures=("quality", "throughput"))
    broken = other("broken", 0.02, trained=False, measures=("no such measure",))
    choices = tiny.choices(tmp_path, parallel=3)
    (first,), (second,) = plan_of(killed, choices), plan_of(timed, choices)
    deaths: list[float] = []

    def tell(text: str) -> None:
        def kill() -> None:
            deaths.append(time.time())
            os.kill(pid_in(text), signal.SIGKILL)

        def both_are_far() -> bool:
            # Here a pool that measures everything at once would have gone on to the times.
            done = second.folder / "measured.json"
            return (first.folder / "last.ckpt").exists() and done.exists()

        if "killed" in text and "started" in text:
            soon(both_are_far, kill)

    result = reproduce(table("mixed", killed, timed, broken), choices, tell=tell)
    assert result.cells[0].why.startswith("failed: the process was killed by signal 9")
    assert result.cells[1].mean is not None
    assert result.cells[2].why == "failed: KeyError: 'no such measure'"
    assert result.status == "partly"
    made = json.loads((second.folder / "measured.json").read_text())["intervals"]
    assert made["quality"][1] < deaths[0] < made["throughput"][0]
    found = [(line["job"], line["outcome"]) for line in read_log(tmp_path / "results")]
    assert found[-1] == ("timed", "done")
    assert sorted(found) == [
        ("broken", "failed"),
        ("killed", "failed"),
        ("timed", "done"),
        ("timed", "done"),
    ]


def test_ctrl_c_reaches_a_worker_which_saves(tmp_path: Path) -> None:
    choices, told = tiny.choices(tmp_path, parallel=2), list[str]()
    job = tiny.job(recipe=LONG)
    saved = plan_of(job, choices)[0].folder / "last.ckpt"
    stops: list[float] = []

    def stop() -> None:
        stops.append(time.time())
        os.kill(os.getpid(), signal.SIGINT)

    soon(saved.exists, stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce(table("stopped", job), choices, tell=told.append)
    assert not alive(pid_in(told[0]))
    assert saved.stat().st_mtime >= stops[0]
    assert [line["outcome"] for line in read_log(tmp_path / "results")] == ["interrupted"]


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
        "from papers.tests.tables.test_pooling import LONG, table\n"
        "from equilibria_papers.tables import reproduce\n"
        "made = table('orphans', tiny.job('a', recipe=LONG))\n"
        "reproduce(made, tiny.choices(Path(sys.argv[1]), parallel=2), tell=lambda t:\n"
        "    print(t, flush=True))\n"
    )
    begun = plan_of(tiny.job("a", recipe=LONG), tiny.choices(tmp_path))[0].folder / "last.ckpt"
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    ) as parent:
        assert parent.stdout is not None
        pid = pid_in(parent.stdout.readline())
        soon(begun.exists, lambda: None).join()
        parent.kill()
        killed = time.time()
    soon(lambda: not alive(pid), lambda: None).join()
    assert not alive(pid)
    assert begun.stat().st_mtime >= killed


# ---------------------------------------------------------------------------- the pool by itself

_FAKE = """
import os, pickle, signal, sys, time
name, folder = pickle.load(sys.stdin.buffer)
caught = []
def catch(*_):
    caught.append(time.time())
    open(f"{folder}/{name}.caught{len(caught)}", "w").close()
signal.signal(signal.SIGINT, catch)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
began = time.time()
def say(*message):
    sys.stdout.buffer.write(pickle.dumps(message))
    sys.stdout.buffer.flush()
if name == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "leaves":
    raise SystemExit(3)
if name == "chatters":
    sys.stdout.buffer.write(b"INFO: something")
    raise SystemExit(0)
if name == "mumbles":
    sys.stdout.buffer.write(pickle.dumps(("end", "done", ""))[:-4])
    raise SystemExit(0)
open(f"{folder}/{name}.ready", "w").close()
while name.startswith("meets") and time.time() - began < 60:
    if sum(file.endswith(".ready") for file in os.listdir(folder)) >= 3:
        break
    time.sleep(0.01)
long = name == "waits" or name.startswith("lingers")
while time.time() - began < (60 if long else 0.4) and not caught:
    time.sleep(0.01)
time.sleep(0.3 if caught else 0)
while name.startswith("lingers") and len(caught) < (2 if name == "lingers" else 9):
    time.sleep(0.01)
with open(f"{folder}/{name}", "w") as file:
    file.write(f"{began} {time.time()} {len(caught)}")
if name == "fails":
    say("end", "failed", "ValueError: no")
elif caught:
    say("end", "interrupted", "saved")
else:
    say("log", "done", 1.0, {"accuracy": 1.0}, {"device": "none"})
    say("end", "done", "")
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that start in no time and train nothing."""

    def order(planned: Planned, choices: Choices, at_once: int, until: float | None) -> bytes:
        return pickle.dumps((planned.job.name, str(choices.out)))

    monkeypatch.setattr(pooling, "START", _FAKE)
    monkeypatch.setattr(pooling, "order_of", order)


def tasks(names: list[str], choices: Choices) -> list[Task]:
    log = Log(choices.out, "fake", "")
    jobs = [other(name, 0.01 * (k + 1)) for k, name in enumerate(names)]
    return [Task(plan_of(job, choices)[0], job.name, log) for job in jobs]


def pool(choices: Choices, told: list[str], deadline: float | None = None) -> Pool:
    choices.out.mkdir(parents=True, exist_ok=True)
    return Pool(choices, deadline, told.append, 1, {})


@pytest.mark.usefixtures("fake")
def test_never_more_at_once_than_asked_for(tmp_path: Path) -> None:
    choices = tiny.choices(tmp_path)
    names = [f"meets{k}" for k in range(6)]  # none ends before three of them have begun
    pool(choices, []).run(tasks(names, choices), 3)
    found = [tuple(map(float, (choices.out / n).read_text().split()[:2])) for n in names]
    beside = [sum(a <= begin < b for a, b in found) for begin, _ in found]
    assert max(beside) == 3
    pool(choices, []).run(tasks(names[:3], choices), 1)
    found = [tuple(map(float, (choices.out / n).read_text().split()[:2])) for n in names[:3]]
    assert [sum(a <= begin < b for a, b in found) for begin, _ in found] == [1, 1, 1]


@pytest.mark.usefixtures("fake")
def test_every_kind_of_bad_end_is_told_and_logged(tmp_path: Path) -> None:
    choices, told = tiny.choices(tmp_path), list[str]()
    names = ["dies", "leaves", "mumbles", "chatters", "fails", "works"]
    given = tasks(names, choices)
    one = pool(choices, told)
    one.run(given, 2)
    assert [one.failures.get(task.planned.key, "") for task in given] == [
        "failed: the process was killed by signal 9 (Killed; out of memory?)",
        "failed: the process ended with code 3",
        "failed: the process ended with code 0",
        "failed: the process ended with code 0",
        "failed: ValueError: no",
        "",
    ]
    lines = {line["job"]: line for line in read_log(choices.out)}
    assert {name: line["outcome"] for name, line in lines.items()} == {
        **dict.fromkeys(names[:5], "failed"),
        "works": "done",
    }
    assert lines["works"]["result"] == {"accuracy": 1.0}
    assert any(text.startswith("works: done in ") for text in told)


@pytest.mark.usefixtures("fake")
def test_a_smoke_test_passes_nothing_over(tmp_path: Path) -> None:
    choices, told = tiny.choices(tmp_path, smoke=True), list[str]()
    with pytest.raises(RuntimeError, match="dies, seed 0: the process was killed"):
        pool(choices, told).run(tasks(["waits", "dies", "never"], choices), 2)
    assert not any(text.startswith("never") for text in told)
    assert {line["job"]: line["outcome"] for line in read_log(choices.out)} == {
        "dies": "failed",
        "waits": "interrupted",
    }


@pytest.mark.usefixtures("fake")
def test_ctrl_c_as_a_worker_ends_does_not_cost_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices, told = tiny.choices(tmp_path), list[str]()
    monkeypatch.setattr(pooling._Worker, "sweep", lambda _: signal.raise_signal(signal.SIGINT))
    one = pool(choices, told)
    (task,) = tasks(["dies"], choices)
    with pytest.raises(KeyboardInterrupt):
        one.run([task], 1)
    assert [line["outcome"] for line in read_log(choices.out)] == ["failed"]
    assert list(one.failures) == [task.planned.key]
    assert told[-1].startswith("dies: failed after")


@pytest.mark.usefixtures("fake")
def test_ctrl_c_is_passed_on_once(tmp_path: Path) -> None:
    choices, told = tiny.choices(tmp_path), list[str]()
    ready = choices.out / "waits.ready"
    soon(ready.exists, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        pool(choices, told).run(tasks(["waits", "never"], choices), 1)
    assert (choices.out / "waits").read_text().split()[2] == "1"
    assert told[1] == "stopping: 1 training(s) finish their step and save"
    assert told[2].startswith("waits: stopped after")
    assert len(told) == 3


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("name", "presses"), [("lingers", 2), ("lingers long", 3)])
def test_ctrl_c_again_asks_again_and_then_ends_it(name: str, presses: int, tmp_path: Path) -> None:
    choices, told = tiny.choices(tmp_path), list[str]()
    ready = choices.out / f"{name}.ready"
    (task, never) = tasks([name, "never"], choices)
    task.planned.folder.mkdir(parents=True)
    left: list[Path] = []

    def press() -> None:
        pid = pid_in(told[0])
        left.append(task.planned.folder / f".last.ckpt.{pid}.part")
        left.append(task.planned.folder / f".last.ckpt.{pid}1.part")  # of somebody else
        for path in left:
            path.touch()
        for number in range(presses):
            if number:  # the one before has reached it
                soon((choices.out / f"{name}.caught{number}").exists, lambda: None).join()
            os.kill(os.getpid(), signal.SIGINT)

    soon(ready.exists, press)
    with pytest.raises(KeyboardInterrupt):
        pool(choices, told).run([task, never], 1)
    assert not alive(pid_in(told[0]))
    assert told[-1].startswith(f"{name}: stopped after")
    assert [line["outcome"] for line in read_log(choices.out)] == ["interrupted"]
    assert [path.exists() for path in left] == [False, True]
    assert (choices.out / name).exists() == (presses == 2)  # the other was killed


@pytest.mark.usefixtures("fake")
def test_after_the_time_only_the_first_are_begun(tmp_path: Path) -> None:
    choices, told = tiny.choices(tmp_path, minutes=1e-9), list[str]()
    one = pool(choices, told, deadline=time.monotonic())
    with pytest.raises(KeyboardInterrupt, match=r"The 1e-09 minutes are over\."):
        one.run(tasks(["a", "b", "c"], choices), 2)
    assert sorted(line["job"] for line in read_log(choices.out)) == ["a", "b"]
    with pytest.raises(KeyboardInterrupt):  # the part that runs alone is not begun either
        one.run(tasks(["d"], choices), 1)
    assert not any(text.startswith("d") for text in told)


# ---------------------------------------------------------------------------- Ctrl-C in a worker

_WORK = """
import atexit, signal, sys, time
def say(text):
    sys.stderr.write(text + chr(10))
    sys.stderr.flush()
def work(answers):
    atexit.register(lambda: (say("ending"), time.sleep(0.4)))
    {before}
    try:
        say("working")
        time.sleep({seconds})
    finally:
        say("saving")
        time.sleep(0.4)
        say("saved")
"""


_LOST = """
    class Unlucky:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)
    sys.unraisablehook = lambda what: say("lost " + what.exc_type.__name__)
    Unlucky()
    time.sleep(1.1)
"""


def _worker(
    folder: Path, seconds: float, *, before: str = "", start: str = START
) -> subprocess.Popen[bytes]:
    """START with a room of its own: no torch, and work that only waits."""
    room = folder / "equilibria" / "experiments"
    room.mkdir(parents=True)
    for package in (room.parent, room):
        (package / "__init__.py").touch()
    (room / "working.py").write_text(_WORK.format(seconds=seconds, before=before))
    with pooling._blocked(signal.SIGINT):
        worker = subprocess.Popen(
            [sys.executable, "-P", "-c", start],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    assert worker.stdin is not None
    worker.stdin.write(pickle.dumps(([str(folder), *sys.path], ["equilibria"])))
    worker.stdin.flush()
    return worker


def _told(worker: subprocess.Popen[bytes], *heeded: str) -> list[str]:
    """What it says; a Ctrl-C is sent at each of these lines."""
    assert worker.stderr is not None
    found = []
    for line in worker.stderr:
        found.append(line.decode().strip())
        if found[-1] in heeded:
            time.sleep(0.05)
            worker.send_signal(signal.SIGINT)
    worker.wait()
    worker.stderr.close()
    assert worker.stdin is not None
    worker.stdin.close()
    return found


def test_a_worker_ends_in_silence_however_often_it_is_asked(tmp_path: Path) -> None:
    patient = START.replace("PAUSE = 1.0", "PAUSE = 60.0")  # a busy machine may take its time
    assert patient != START
    worker = _worker(tmp_path, 60, start=patient)
    assert _told(worker, "working", "saving", "ending") == ["working", "saving", "saved", "ending"]
    assert worker.returncode == 130


def test_a_worker_whose_interrupt_was_lost_heeds_the_next(tmp_path: Path) -> None:
    worker = _worker(tmp_path, 20, before=_LOST)
    expected = ["lost KeyboardInterrupt", "working", "saving", "saved", "ending"]
    assert _told(worker, "working") == expected
    assert worker.returncode == 130


def test_a_worker_that_is_done_is_not_interrupted(tmp_path: Path) -> None:
    worker = _worker(tmp_path, 0)
    assert _told(worker, "ending") == ["working", "saving", "saved", "ending"]
    assert worker.returncode == 0


def test_a_worker_that_is_asked_as_it_starts_ends_in_silence(tmp_path: Path) -> None:
    worker = _worker(tmp_path, 60)
    worker.send_signal(signal.SIGINT)
    assert not set(_told(worker)) - {"working", "saving", "saved", "ending"}
    assert worker.returncode == 130


# ---------------------------------------------------------------------------- orders


def test_every_declared_job_can_be_sent(tmp_path: Path) -> None:
    choices = Choices(data_root=tmp_path, device="cpu", overrides={"epochs": 7})
    for experiment in EXPERIMENTS.values():
        for one in plan(experiment.cells, choices):
            sent = order_of(one, choices, 2, None)
            paths = pickle.loads(sent)
            order = pickle.loads(sent[len(pickle.dumps(paths)) :])
            assert paths == (sys.path, sys.argv)
            assert (order.planned.key, order.planned.folder) == (one.key, one.folder)
            assert order.planned.config == one.config
            assert dict(order.planned.job.recipe) == dict(one.job.recipe)
            assert not order.choices.progress
            assert order.choices.parallel == 1


@pytest.mark.parametrize(("threads", "at_once", "share"), [(8, 3, 2), (2, 4, 1), (8, 1, 8)])
def test_threads_are_shared(
    threads: int, at_once: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    choices = Choices(device="cpu")
    sent = order_of(plan_of(tiny.job(), choices)[0], choices, at_once, None)
    order = pickle.loads(sent[len(pickle.dumps((sys.path, sys.argv))) :])
    assert order.threads == share


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
