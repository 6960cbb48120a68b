"""``equilibria reproduce``: listing, planning, running, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equilibria.cli.app import main
from equilibria.experiments import names


def run(*arguments: str | Path) -> int:
    """The exit code of ``equilibria reproduce ARGUMENTS``."""
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *[str(a) for a in arguments]])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_list_names_every_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--out", tmp_path, "--data-root", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found] == names()
    assert {one["status"] for one in found} == {"not run"}
    assert all(one["gpu_minutes"] >= 1 for one in found)
    assert run("list", "--out", tmp_path, "--data-root", tmp_path) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names())


def test_dry_run_prints_trainings_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("kerdeq-table3", "--dry-run", "--seeds", "0,1", "--epochs", "3") == 0
    shown = capsys.readouterr().out
    assert "4 training(s)" in shown
    assert "cifar10-kerdeq_cifar_5m-one-branch, seed 1" in shown
    assert "epochs: 3" in shown
    assert run("kerdeq-table3", "--dry-run", "--json", "--only", "OptEq") == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert job["classes"] == "first half"
    assert job["options"]["model_options"]["scales"] == [1]
    assert list(tmp_path.iterdir()) == []


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
def test_wrong_usage_is_said_and_costs_nothing(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 1
    assert words in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_several_ids_are_planned_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("geq-table1", "kerdeq-table1", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found] == ["geq-table1", "kerdeq-table1"]
    keys = [{job["key"] for job in one["jobs"]} for one in found]
    assert len(keys[0] & keys[1]) == 8
    assert run("geq-table1", "kerdeq-table1", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert f"together: {len(keys[0] | keys[1])} training(s), shared ones once" in shown
    assert run("geq-table1", "kerdeq-table1", "--only", "GEQ 5M", "--dry-run", "--json") == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only["id"] == "geq-table1"
    assert run("geq-table1", "--parallel", "0", "--dry-run") == 2
    assert list(tmp_path.iterdir()) == []


def test_two_ids_in_one_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs", "--device", "cpu")
    assert run("thesis-figure4.2", "thesis-figure4.1", "--smoke", "--json", *places) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found] == ["thesis-figure4.2", "thesis-figure4.1"]
    assert {one["status"] for one in found} == {"smoke only"}
    for one in found:
        kept = json.loads((tmp_path / "out" / "smoke" / f"{one['id']}.json").read_text())
        assert kept["cells"] == one["cells"]
    assert run("thesis-figure4.2", "thesis-figure4.1", "--smoke", *places) == 0
    shown = capsys.readouterr()
    assert shown.out.index("thesis-figure4.2") < shown.out.index("thesis-figure4.1")
    assert "done before" in shown.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs", "--device", "cpu")
    ids = ("opteq-table9", "kerdeq-table3")
    assert run(*ids, "--smoke", "--parallel", "2", *places) == 0
    shown = capsys.readouterr()
    assert "opteq-table9" in shown.out
    assert "kerdeq-table3" in shown.out
    lines = [line for line in shown.err.splitlines() if "seed 0" in line]
    # Table 9 is times alone: its jobs come last and one by one.
    kinds = ["times" if ", times:" in line else "train" for line in lines]
    assert kinds == sorted(kinds, key=("train", "times").index)
    after = [line.split(": ")[1].split()[0] for line in lines if ", times:" in line]
    assert after == ["started", "done"] * (len(after) // 2)
    assert run(*ids, "--smoke", "--json", *places) == 0
    for one in json.loads(capsys.readouterr().out):
        assert one["status"] == "smoke only"
        assert all(cell["n"] == 1 for cell in one["cells"] if cell["status"] != "quoted")


def test_nothing_at_hand_is_a_failure_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "cache"))
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs", "--data-root", tmp_path)
    assert run("geq-table3", *places) == 1
    shown = capsys.readouterr()
    assert "cifar100 is not at hand" in shown.err
    assert "nothing was run" in shown.err


def test_smoke_writes_a_table_that_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs", "--device", "cpu")
    assert run("thesis-figure4.2", "--smoke", *places) == 0
    assert "SMOKE TEST" in capsys.readouterr().out
    kept = json.loads((tmp_path / "out" / "smoke" / "thesis-figure4.2.json").read_text())
    assert kept["status"] == "smoke only"
    assert all(cell["n"] == 1 for cell in kept["cells"])
    assert not (tmp_path / "out" / "thesis-figure4.2.json").exists()
    assert run("list", "--out", tmp_path / "out", "--json") == 0
    states = {one["id"]: one["status"] for one in json.loads(capsys.readouterr().out)}
    assert states["thesis-figure4.2"] == "smoke only"
    assert states["thesis-figure4.1"] == "not run"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", names())
def test_every_id_smokes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ("--out", tmp_path / "out", "--runs", tmp_path / "runs", "--device", "cpu")
    assert run(name, "--smoke", "--json", *places) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "smoke only"
    for cell in found["cells"]:
        if cell["status"] != "quoted":
            assert cell["n"] == 1, cell
            assert isinstance(cell["mean"], float), cell
