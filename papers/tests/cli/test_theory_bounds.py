"""``equilibria theory bounds``: the pair on the digits, a trained network, and what it refuses."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria_papers.theory import bounds as module
from tests.cli.running import Cli

SMALL = ("--width", "6", "--epochs", "1", "--images", "6", "--pairs", "2", "--draws", "4")


COMMAND = ("theory", "bounds")


@pytest.mark.slow
def test_the_pair_on_the_digits(tmp_path: Path, cli: Cli) -> None:
    assert cli(*SMALL, "--out", tmp_path / "made") == 0
    shown = cli.read()
    text = " ".join(shown.out.split())
    for part in ("GEQ", "OptEq", "Eq 11/12", "Eq 14/15", "ours", "heuristic", "wrote"):
        assert part in text, part
    names = {p.name for p in (tmp_path / "made").iterdir()}
    pictures = {f"{s}.{e}" for s in ("lipschitz", "similarity", "margin") for e in ("png", "svg")}
    assert names == {"bounds.json", *pictures}
    found = json.loads((tmp_path / "made" / "bounds.json").read_text())
    assert {r["layer"] for r in found["reports"]} == {"GEQ", "OptEq"}
    assert set(found["curves"]) == {"lipschitz", "similarity", "margin"}


def test_json_only(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    few = functools.partial(module.demonstration_pair, samples=64)
    monkeypatch.setattr(module, "demonstration_pair", few)
    assert cli(*SMALL, "--json") == 0
    shown = cli.read()
    found = json.loads(shown.out)
    assert len(found["reports"]) == 7
    assert shown.err == ""


def test_a_network(tmp_path: Path, cli: Cli) -> None:
    model = eq.models.create("geq_digits", widths=(8, 8), hidden=8)
    file = tmp_path / "model.safetensors"
    eq.models.save(model, file, extra={"data": "digits"})
    code = cli(
        file, "--images", "4", "--pairs", "1", "--draws", "2", "--full", "--out", tmp_path / "o"
    )
    assert code == 0
    text = cli.read().out
    assert "Proposition 3, Lipschitz constant of x → z*" in text
    assert "Proposition 2 is about one layer" in text
    assert [p.name for p in (tmp_path / "o").iterdir()] == ["bounds.json"]


def test_fewer_images_than_asked_for_are_told(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = eq.data.load("digits", "test").subset(range(3))
    monkeypatch.setattr("equilibria.data.load", lambda *_, **__: digits)
    model = eq.models.create("geq_digits", widths=(8, 8), hidden=8)
    file = eq.models.save(model, tmp_path / "model.safetensors", extra={"data": "digits"})
    seen: list[int] = []

    def bounds(model: object, x: torch.Tensor, **_: object) -> module.Comparison:
        seen.append(len(x))
        return module.Comparison(())

    monkeypatch.setattr(module, "network_bounds", bounds)
    said = cli.err(file, "--images", "100000", "--pairs", "4", code=0)
    assert "--images 100000: digits (test) has 3; all of them are taken" in said
    assert "--pairs 4: 3 images make 1" in said
    assert seen == [3]
