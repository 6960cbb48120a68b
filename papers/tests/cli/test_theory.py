"""``equilibria theory``: what is wrong is said, and nothing is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import Cli

COMMAND = ("theory",)
WRONG = {
    "landscape": [
        ("--points 4", "odd"),
        ("--repeats 6,0", "--repeats 6,0: expected positive numbers"),
        ("--repeats six", "--repeats six: expected positive numbers"),
        ("--radius 0", "radius"),
    ],
    "ntk": [
        ("", "--model"),
        ("nowhere --model geq_digits", "--model"),
        ("nowhere", "nowhere does not exist"),
        ("--model geq_digits --outputs some", "all, trace, sum"),
        ("--model geq_digitz", "geq_digits"),
        ("--model explicit_digits --samples 3 --parameters tail", "fits none"),
    ],
    "trajectory": [
        ("--init-scales 1,x", "--init-scales 1,x: expected positive numbers"),
        ("--init-scales -1", "--init-scales -1: expected positive numbers"),
        ("--solvers newton", "--solvers newton: expected some of picard"),
        ("--layer none", "no equilibrium layer 'none'"),
        ("--model resnet18_cifar", "has no equilibrium layer"),
        ("--model nothing", "there is no model 'nothing'"),
        ("weights --model geq_digits", "not both"),
        ("nowhere.safetensors", "nowhere.safetensors does not exist"),
    ],
    "bounds": [
        ("--data digits", "WEIGHTS"),
        ("none.safetensors", "none.safetensors does not exist"),
        ("--margin -1", "--margin -1: expected a positive number"),
        ("--margin nan", "--margin nan: expected a positive number"),
        ("--delta 2", "--delta 2: expected a probability between 0 and 1"),
        ("--delta 0", "--delta 0: expected a probability between 0 and 1"),
    ],
    "dynamics": [
        ("", "--all"),
        ("--scenario nope", "guaranteed-flow"),
    ],
}


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_wrong_usage_is_said(
    name: str,
    arguments: str,
    words: str,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(**_: object) -> None:
        raise AssertionError("it was trained first")

    monkeypatch.setattr("equilibria_papers.theory.bounds.demonstration_pair", trained)
    few = ("--images", 4) if name in ("landscape", "trajectory", "bounds") else ()
    assert words in cli.err(name, *arguments.split(), *few, "--out", tmp_path / "out")
    assert not list(tmp_path.rglob("*.*"))
