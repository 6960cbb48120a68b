"""``equilibria theory dynamics``: what it prints, writes and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import Cli

COMMAND = ("theory", "dynamics")


def test_pictures_and_numbers(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "new" / "folder"
    assert cli("--scenario", "counterexample", "--quiet", "--out", out) == 0
    names = sorted(path.name for path in out.iterdir())
    assert names == ["counterexample.png", "counterexample.svg", "dynamics.json"]
    (found,) = json.loads((out / "dynamics.json").read_text("utf-8"))
    assert found["condition_holds"]
    assert not found["rate_kept"]
    assert found["run"]["loss"][1] == pytest.approx(4.5)
    # The guaranteed curve is zero from its first step on, which the picture says.
    assert "0 from step 1" in (out / "counterexample.svg").read_text("utf-8")
    printed = cli.read().out
    assert "counterexample" in printed
    assert "theorem is" in printed


def test_json_alone_on_stdout(cli: Cli) -> None:
    found = cli.json("--scenario", "counterexample", "--scenario", "counterexample")
    assert len(found) == 1
    assert found[0]["report"]["holds"]


def test_wrong_use(tmp_path: Path, cli: Cli) -> None:
    assert "--seed" in cli.err("--scenario", "counterexample", "--seed", "-1", code=2)
    file = tmp_path / "file"
    file.write_text("x")
    assert "expected a folder" in cli.err("--scenario", "counterexample", "--out", file)


def test_nothing_half_written_when_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("equilibria_papers.theory.monotone_ntk.draw_outcome", interrupted)
    assert cli("--scenario", "counterexample", "--quiet", "--out", tmp_path) == 130
    assert list(tmp_path.iterdir()) == []
