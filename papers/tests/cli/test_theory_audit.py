"""``equilibria theory audit``: what it prints and writes, resuming, and Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equilibria_papers.claims import audit as running
from tests.cli.running import Cli

QUICK = ("--trials", "10", "--seconds", "0.5", "--quiet")
FEW = ("--paper", "OptEq", "--only", "opteq.lemma3", "--only", "opteq.eq13")


COMMAND = ("theory", "audit")


def test_it_writes_a_record_and_a_page(tmp_path: Path, cli: Cli) -> None:
    assert cli("--out", tmp_path / "found", *FEW, *QUICK) == 0
    said = cli.read()
    assert "opteq.lemma3" in said.out
    assert "holds under" in said.out
    record = json.loads((tmp_path / "found" / "audit.json").read_text())
    verdicts = {claim["id"]: claim["verdict"] for claim in record["claims"]}
    assert verdicts == {"opteq.lemma3": "holds under", "opteq.eq13": "holds"}
    page = (tmp_path / "found" / "audit.md").read_text()
    assert "equilibria theory audit --out found --trials 10 --seconds 0.5" in page
    assert "Counterexample" in page


def test_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    real, calls = running.run_claim, []

    def stopping(claim: Any, *rest: Any) -> Any:
        calls.append(claim.id)
        if claim.id == "opteq.eq13":
            raise KeyboardInterrupt
        return real(claim, *rest)

    monkeypatch.setattr(running, "run_claim", stopping)
    said = cli.err("--out", tmp_path, *FEW, *QUICK, code=130)
    assert "keeps the claims that are done" in said
    assert [c["id"] for c in json.loads((tmp_path / "audit.json").read_text())["claims"]] == [
        "opteq.lemma3"
    ]
    assert "opteq.lemma3" in (tmp_path / "audit.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["audit.json", "audit.md"]
    calls.clear()
    monkeypatch.setattr(
        running, "run_claim", lambda claim, *rest: calls.append(claim.id) or real(claim, *rest)
    )
    assert cli("--out", tmp_path, *FEW, *QUICK) == 0
    assert calls == ["opteq.eq13"]
    calls.clear()
    assert cli("--out", tmp_path, *FEW, *QUICK, "--fresh") == 0
    assert len(calls) == 2


def test_json_and_one_claim(cli: Cli) -> None:
    found = cli.json(*FEW, *QUICK)
    assert [each["id"] for each in found] == ["opteq.lemma3", "opteq.eq13"]
    assert found[0]["outcomes"][0]["violations"] > 0
    said = cli.shown("--show", "opteq.table2.incay", "--paper", "opteq", *QUICK)
    assert "Table 2, row 3" in said
    assert "Counterexample" in said
    assert "violated" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "opteq.lemma9", "--paper", "OptEq"], "opteq.lemma3"),
        (["--paper", "nobody"], "KerDEQ"),
        (["--trials", "0"], "--trials"),
        (["--seconds", "-1", "--paper", "OptEq"], "seconds"),
    ],
)
def test_wrong_options_say_what_is_wrong(
    arguments: list[str], said: str, cli: Cli, tmp_path: Path
) -> None:
    assert cli(*arguments, "--out", tmp_path / "no") in (1, 2)
    assert said in cli.read().err
    assert not (tmp_path / "no").exists()
