"""``equilibria reproduce``: listing, planning, running, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from equilibria_papers.tables import describe, names
from tests.cli.running import Cli

COMMAND = ("reproduce",)


def test_list_names_every_id(tmp_path: Path, cli: Cli) -> None:
    found = cli.json("list", "--out", tmp_path, "--data-root", tmp_path)
    assert [one["id"] for one in found] == names()
    assert {one["status"] for one in found} == {"not run"}
    assert all(one["gpu_minutes"] >= 1 for one in found)
    shown = cli.shown("list", "--out", tmp_path, "--data-root", tmp_path)
    assert all(name in shown for name in names())


def test_dry_run_prints_trainings_and_writes_nothing(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = cli.shown("kerdeq-table3", "--dry-run", "--seeds", "0,1", "--epochs", "3")
    assert "4 training(s)" in shown
    assert "cifar10-kerdeq_cifar_5m-one-branch, seed 1" in shown
    assert "epochs: 3" in shown
    (job,) = cli.json("kerdeq-table3", "--dry-run", "--only", "OptEq")["jobs"]
    assert job["classes"] == "first half"
    assert job["options"]["model_options"]["scales"] == [1]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def refused(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a call says that ends with this code; it leaves nothing behind."""

    def said(arguments: tuple[str, ...], code: int) -> str:
        monkeypatch.chdir(tmp_path)
        found = cli.err(*arguments, code=code)
        assert list(tmp_path.iterdir()) == []
        return " ".join(found.replace("│", " ").split())

    return said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("geq-tabel1",), "Did you mean geq-table1"),
        (("geq-table1", "--only", "GEQ 9M"), "no row 'GEQ 9M'"),
        (("geq-table1", "--seeds", "one"), "--seeds one"),
        (("geq-table1", "--seeds", "1,1"), "none of them twice"),
        (("geq-table1", "--set", "lrr=1"), "Did you mean 'lr'"),
        (("geq-table1", "--set", "data=x"), "the table decides it"),
        (("geq-table1", "--device", "cuda:99x"), "--device"),
        (("geq-table1", "geq-tabel2"), "Did you mean geq-table2"),
        (("geq-table1", "list"), "'list' stands alone; it was given with geq-table1"),
        (("geq-table1", "geq-table1"), "none of them twice"),
        (("geq-table1", "geq-table2", "--only", "GEQ 9M"), "none of these tables has a row"),
    ],
)
def test_wrong_values_are_said_and_cost_nothing(
    arguments: tuple[str, ...], words: str, refused: Callable[..., str]
) -> None:
    assert words in refused(arguments, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("geq-table1", "--gather", "--parallel", "4"), "leave out --parallel, or"),
        (("geq-table1", "--gather", "--parallel", "1"), "leave out --parallel, or"),
        (("geq-table1", "--gather", "--minutes", "9"), "leave out --minutes, or"),
        (("geq-table1", "--gather", "--device", "cpu"), "leave out --device, or"),
        (("geq-table1", "--gather", "--data-root", "."), "leave out --data-root, or"),
        (("geq-table1", "--dry-run", "--gather"), "leave out --dry-run, or"),
        (
            ("geq-table1", "--minutes", "9", "--gather", "--parallel", "4"),
            "leave out --minutes, --parallel, or leave out --gather to train",
        ),
        (("list", "--gather", "--seeds", "0"), "--json; leave out --seeds, --gather."),
        (("list", "--only", "GEQ", "--only", "b"), "--json; leave out --only."),
        (("list", "-q"), "--json; leave out --quiet."),
        (("list", "--smoke"), "leave out --smoke."),
        (("geq-table1", "--epochs", "3", "--set", "epochs=4"), "3, and --set epochs=4"),
    ],
)
def test_flags_that_would_do_nothing_are_wrong_usage(
    arguments: tuple[str, ...], words: str, refused: Callable[..., str]
) -> None:
    assert words in refused(arguments, 2)


def test_gathering_takes_what_decides_the_table(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ("--stand-in", "--epochs", "2", "--seeds", "0,1", "--only", "GEQ", "--set", "lr=0.1")
    assert cli("geq-table3", "--gather", *chosen) == 1  # there is nothing
    assert "nothing was run of geq-table3" in cli.read().err
    # What was asked for in vain leaves no page behind.
    assert not list((tmp_path / "results" / "reproduce").iterdir())


def test_rows_of_nothing_are_a_sentence_and_notes_stand_once(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs")
    ids = ("geq-table1", "kerdeq-table1")
    assert cli(*ids, "--gather", *places) == 1
    shown = cli.read()
    assert len(shown.out.splitlines()) < 15  # 92 cells
    assert "no run folder has it" in " ".join(shown.out.split())
    notes = [note for name in ids for note in describe(name).notes]
    assert len(set(notes)) < len(notes)
    for note in notes:
        assert shown.err.count(note) == 1
    assert "written:" not in shown.err
    assert cli(*ids, "--gather", "-q", *places) == 1
    quiet = cli.read()
    assert quiet.out == shown.out
    assert quiet.err.startswith("error: nothing was run of geq-table1, kerdeq-table1.")


_PROCESS = """
import atexit, os, signal, sys, time
from equilibria_papers import tables as experiments
from equilibria.cli.app import main

try:
    main(["reproduce", "list"])
except SystemExit as ended:
    assert ended.code == 0, ended.code
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process that has just begun

def again():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)

def stopped(*_, **__):
    raise KeyboardInterrupt("The 9 minutes are over.")

atexit.register(again)
experiments.reproduce_all = stopped
main(["reproduce", "geq-table3", "--out", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[bytes]:
    """One process for two tests: its imports take seconds."""
    return subprocess.run(
        [sys.executable, "-c", _PROCESS, str(tmp_path_factory.mktemp("ended"))],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
        timeout=120,
    )


def test_ctrl_c_as_the_interpreter_ends_is_not_heard(
    ended: subprocess.CompletedProcess[bytes],
) -> None:
    said = b"The 9 minutes are over.\nThe same command goes on from there.\n"
    assert ended.stderr == said
    assert ended.returncode == 130


def test_a_terminal_without_the_signs_gets_question_marks(
    ended: subprocess.CompletedProcess[bytes],
) -> None:
    assert b"cifar10 ?" in ended.stdout, ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pause", [0.05, 0.4])
def test_ctrl_c_twice_is_quiet_and_leaves_nothing_half_written(
    pause: float, tmp_path: Path
) -> None:
    program = "from equilibria.cli.app import main; main()"
    flags = ("--smoke", "--epochs", "100000", "--parallel", "2", "--device", "cpu")
    places = ("--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs"))
    command = [sys.executable, "-c", program, "reproduce", "kerdeq-table3", *flags, *places]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        while len(list(tmp_path.rglob("last.ckpt"))) < 2 and started.poll() is None:
            time.sleep(0.02)
        started.send_signal(signal.SIGINT)
        time.sleep(pause)
        started.send_signal(signal.SIGINT)
        said = started.communicate(timeout=120)[1]
    assert started.returncode == 130
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert said.endswith("interrupted.\nThe same command goes on from there.\n")
    assert said.count("stopped after") == 2  # both have saved and ended
    assert list(tmp_path.rglob(".*")) == []


def test_several_ids_are_planned_together(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = cli.json("geq-table1", "kerdeq-table1", "--dry-run")
    assert [one["id"] for one in found] == ["geq-table1", "kerdeq-table1"]
    keys = [{job["key"] for job in one["jobs"]} for one in found]
    assert len(keys[0] & keys[1]) == 8
    shown = cli.shown("geq-table1", "kerdeq-table1", "--dry-run")
    assert f"together: {len(keys[0] | keys[1])} training(s), shared ones once" in shown
    (only,) = cli.json("geq-table1", "kerdeq-table1", "--only", "GEQ 5M", "--dry-run")
    assert only["id"] == "geq-table1"
    assert cli("geq-table1", "--parallel", "0", "--dry-run") == 2
    assert list(tmp_path.iterdir()) == []


def test_two_ids_in_one_call(tmp_path: Path, cli: Cli) -> None:
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs", "--device", "cpu")
    found = cli.json("thesis-figure4.2", "thesis-figure4.1", "--smoke", *places)
    assert [one["id"] for one in found] == ["thesis-figure4.2", "thesis-figure4.1"]
    assert {one["status"] for one in found} == {"smoke only"}
    for one in found:
        kept = json.loads((tmp_path / "out" / "smoke" / f"{one['id']}.json").read_text())
        assert kept["cells"] == one["cells"]
        assert all(cell["n"] == 1 for cell in kept["cells"])
    assert cli("thesis-figure4.2", "thesis-figure4.1", "--smoke", *places) == 0
    shown = cli.read()
    assert shown.out.index("thesis-figure4.2") < shown.out.index("thesis-figure4.1")
    assert shown.out.count("SMOKE TEST") == 2
    assert "done before" in shown.err
    assert not list((tmp_path / "out").glob("*.json"))  # a test takes no result's place
    states = {one["id"]: one["status"] for one in cli.json("list", "--out", tmp_path / "out")}
    assert states["thesis-figure4.2"] == "smoke only"
    assert states["thesis-figure4.3"] == "not run"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_side_by_side(tmp_path: Path, cli: Cli) -> None:
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs", "--device", "cpu")
    ids = ("opteq-table9", "kerdeq-table3")
    assert cli(*ids, "--smoke", "--parallel", "2", *places) == 0
    shown = cli.read()
    assert "opteq-table9" in shown.out
    assert "kerdeq-table3" in shown.out
    lines = [line for line in shown.err.splitlines() if "seed 0" in line]
    # Table 9 is times alone: its jobs come last and one by one.
    kinds = ["times" if ", times:" in line else "train" for line in lines]
    assert kinds == sorted(kinds, key=("train", "times").index)
    after = [line.split(": ")[1].split()[0] for line in lines if ", times:" in line]
    assert set(after) == {"in"}
    for one in cli.json(*ids, "--smoke", *places):
        assert one["status"] == "smoke only"
        assert all(cell["n"] == 1 for cell in one["cells"] if cell["status"] != "quoted")


def test_nothing_at_hand_is_a_failure_that_says_why(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "cache"))
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs", "--data-root", tmp_path)
    assert cli("geq-table3", *places) == 1
    shown = cli.read()
    assert "cifar100 is not at hand" in shown.err
    assert "nothing was run" in shown.err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:the layers are not at their equilibrium")  # a row of few steps
@pytest.mark.parametrize("name", names())
def test_every_id_smokes(name: str, tmp_path: Path, cli: Cli) -> None:
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs", "--device", "cpu")
    found = cli.json(name, "--smoke", *places)
    assert found["status"] == "smoke only"
    for cell in found["cells"]:
        if cell["status"] != "quoted":
            assert cell["n"] == 1, cell
            assert isinstance(cell["mean"], float), cell
