"""``equilibria bench`` end to end on small networks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import equilibria as eq
from tests.cli.running import Cli

SMALL = ("-o", "widths=[8, 8]", "--batch-size", "8", "--budget", "0", "--device", "cpu")


def test_a_network_by_name(tmp_path: Path, cli: Cli) -> None:
    said = cli.shown("bench", "--model", "geq_digits", *SMALL, "--out", tmp_path / "b")
    for word in ("images per second", "layers", "rest", "backward", "steps", "help"):
        assert word in said
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["bench.json"]
    found = json.loads((tmp_path / "b" / "bench.json").read_text())
    assert found["shape"] == [8, 1, 8, 8]
    assert list(found["train"]["parts"]) == ["layers", "rest", "backward"]


def test_trained_weights_on_their_data_as_json(tmp_path: Path, cli: Cli) -> None:
    model = eq.models.create("geq_digits", widths=[8, 8])
    file = tmp_path / "model.safetensors"
    eq.models.save(model, file)
    found = cli.json(
        *("bench", file, "--data", "digits", "--batch-size", "8", "--budget", "0"),
        *("--device", "cpu", "--no-train"),
    )
    assert found["train"] is None
    assert found["shape"][0] == 8
    assert all(layer["mean_steps"] > 0 for layer in found["inference"]["layers"].values())


def test_a_shape_lays_the_network_out(cli: Cli) -> None:
    flags = ("--shape", "3,16,16", "--no-train")
    found = cli.json("bench", "--model", "geq_digits", *SMALL, *flags)
    assert found["shape"] == [8, 3, 16, 16]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "weights or --model"),
        (("somewhere", "--model", "geq_digits"), "weights or --model"),
        (("--model", "geq_digit"), "Did you mean geq_digits"),
        (("--model", "geq_digits", "--shape", "3,x"), "channels,height,width"),
        (("--model", "geq_digits", "--shape", "1,8,16"), "square"),
        (("--model", "geq_digits", "--shape", "1,8,8", "--data", "digits"), "one of them"),
        (("--model", "geq_digits", "--precision", "fp4"), "--precision fp4"),
        (("nowhere",), "nowhere"),
        (("nowhere", "-o", "depth=2"), "--option is for --model"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: tuple[str, ...], said: str, cli: Cli) -> None:
    assert said in cli.err("bench", *arguments, "--device", "cpu")
