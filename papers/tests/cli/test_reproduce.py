"""``equilibria reproduce``: listing, planning, running, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from equilibria_papers import tables
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


def test_list_of_an_id_shows_the_numbers_of_its_longest_training(tmp_path: Path, cli: Cli) -> None:
    def result(value: float, epochs: int, recipe: str) -> None:
        sample = {"seed": 0, "value": value, "group": "?", "seconds": 1.0, "made_by": {}}
        cell = {"row": "OptEq", "column": "accuracy in %", "samples": [sample]}
        change = f"{recipe}-{epochs}"
        kept = {"cells": [cell], "overrides": {"epochs": epochs}, "change": change}
        (tmp_path / f"kerdeq-table3--{change}.json").write_text(
            json.dumps({**kept, "recipe": recipe}), encoding="utf-8"
        )

    result(84.5, 30, "ours")
    result(71.3, 10, "ours")
    result(80.2, 40, "printed")
    shown = cli.shown("list", "kerdeq-table3", "--out", tmp_path, "--data-root", tmp_path)
    (row,) = [line for line in shown.splitlines() if "84.50 (earlier recipe)" in line]
    assert [text.strip() for text in row.split("│")[1:-1]] == [
        *("OptEq, accuracy", "90.56%", "84.50 (earlier recipe)", "30", "1")
    ]
    assert "71.3" not in shown
    assert describe("kerdeq-table3").verdict in shown
    (found,) = cli.json("list", "kerdeq-table3", "--out", tmp_path)
    number, printed = found["numbers"]
    assert (printed["mean"], printed["epochs"], printed["recipe"]) == (80.2, 40, "printed")
    assert (number["mean"], number["epochs"], number["outdated"]) == (84.5, 30, True)
    assert number["published"]["value"] == 90.56


def test_list_has_the_epochs_of_the_recipe_that_made_a_number(tmp_path: Path, cli: Cli) -> None:
    """recipes.toml: 110 epochs, 120 with RandAugment, as printed none of its own."""
    sample = {"seed": 0, "value": 90.0, "group": "?", "seconds": 1.0, "made_by": {}}
    cells = [{"row": "GEQ 5M", "column": "CIFAR-10, accuracy in %", "samples": [sample]}]
    for recipe in ("randaugment", "printed"):
        kept = {"cells": cells, "change": f"recipe={recipe}", "recipe": recipe}
        (tmp_path / f"geq-table1--recipe={recipe}.json").write_text(json.dumps(kept), "utf-8")
    (found,) = cli.json("list", "geq-table1", "--out", tmp_path)
    epochs = {number["recipe"]: number["epochs"] for number in found["numbers"]}
    assert epochs == {"randaugment": 120, "printed": 110}


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
        (("geq-table1", "--seeds", "one"), "--seeds one"),
        (("geq-table1", "--set", "lrr=1"), "Did you mean 'lr'"),
        (("geq-table1", "--device", "cuda:99x"), "--device"),
        (("geq-table1", "list"), "'list' comes first, and once; given: geq-table1 list."),
        (("list", "geq-tabel1"), "no experiment 'geq-tabel1'. Did you mean geq-table1"),
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
        (("geq-table1", "--gather", "--device", "cpu"), "leave out --device, or"),
        (("geq-table1", "--gather", "--data-root", "."), "leave out --data-root, or"),
        (("geq-table1", "--dry-run", "--gather"), "leave out --dry-run, or"),
        (
            ("geq-table1", "--minutes", "9", "--gather", "--parallel", "4"),
            "leave out --minutes, --parallel, or leave out --gather to train",
        ),
        (("list", "--gather", "--seeds", "0"), "--json; leave out --seeds, --gather."),
        (("geq-table1", "--epochs", "3", "--set", "epochs=4"), "3, and --set epochs=4"),
    ],
)
def test_flags_that_would_do_nothing_are_wrong_usage(
    arguments: tuple[str, ...], words: str, refused: Callable[..., str]
) -> None:
    assert words in refused(arguments, 2)


def test_rows_of_nothing_are_a_sentence_and_notes_stand_once(tmp_path: Path, cli: Cli) -> None:
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs")
    places += ("--stand-in", "--epochs", "2", "--seeds", "0,1", "--set", "lr=0.1")
    ids = ("geq-table1", "kerdeq-table1")
    assert cli(*ids, "--gather", *places) == 1
    shown = cli.read()
    assert "no run folder has it" in " ".join(shown.out.split())
    assert not list((tmp_path / "out").iterdir())  # asked for in vain: no page is left behind
    notes = [note for name in ids for note in describe(name).notes]
    assert len(set(notes)) < len(notes)
    for note in notes:
        assert shown.err.count(note) == 1
    assert cli(*ids, "--gather", "-q", *places) == 1
    quiet = cli.read()
    assert quiet.out == shown.out
    assert quiet.err.startswith("error: nothing was run of geq-table1, kerdeq-table1.")


def test_after_an_interruption_ctrl_c_is_not_heard_as_the_interpreter_ends(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("The 9 minutes are over.")

    at_exit: list[object] = []
    monkeypatch.setattr(tables, "reproduce_all", stopped)
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    assert cli("geq-table3", "--out", tmp_path) == 130
    assert cli.read().err == "The 9 minutes are over.\nThe same command goes on from there.\n"
    assert at_exit == [(signal.signal, signal.SIGINT, signal.SIG_IGN)]


def test_a_terminal_without_the_signs_gets_question_marks(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    assert cli("list", "--out", tmp_path, "--data-root", tmp_path) == 0
    assert b"?: data not at hand" in out.buffer.getvalue()  # type: ignore[attr-defined]


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
