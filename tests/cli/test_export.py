"""``equilibria export``, ``predict --runtime onnx`` and the options of ``serve``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from equilibria import models
from tests.cli.running import Cli
from tests.models.small import make
from tests.models.test_export import written


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    pixels = torch.randint(120, 256, (10, 12), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_predict_by_onnxruntime_prints_what_torch_prints(
    tmp_path: Path, picture: Path, cli: Cli
) -> None:
    file = written(tmp_path / "m.onnx")
    (answer,) = cli.json("predict", file, picture, "--runtime", "onnx")
    assert answer["labels"][0]["label"] == "z"
    assert set(answer) == {"labels", "steps", "converged", "radius", "proven", "file"}
    assert answer["steps"] == 6
    assert answer["converged"] is None
    assert cli("predict", file, picture) == 0
    shown = cli.read()
    assert "6 steps" in shown.out
    assert "no certificates" in shown.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--runtime", "torch"], "--runtime torch: expected a model.safetensors"),
        (["--radius"], "--radius"),
    ],
)
def test_predict_names_what_an_onnx_file_cannot(
    tmp_path: Path, picture: Path, flags: list[str], said: str, cli: Cli
) -> None:
    assert said in cli.err("predict", written(tmp_path / "m.onnx"), picture, *flags)


def test_evaluate_says_nothing_of_layers_that_an_onnx_file_does_not_have(
    tmp_path: Path, cli: Cli
) -> None:
    file = written(tmp_path / "m.onnx")
    for name in "xyz":
        (tmp_path / "data" / "test" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 200).save(tmp_path / "data" / "test" / name / "0.png")
    found = cli.json("evaluate", file, "--data", tmp_path / "data")
    assert found["parameters"] is None
    assert found["certificates"] is None
    (layer,) = found["layers"].values()
    assert (layer["fixed_steps"], layer["mean_steps"], layer["solver"]) == (True, 6.0, "")
    assert layer["settled"] is None  # no residual was measured
    assert cli("evaluate", file, "--data", tmp_path / "data") == 0
    shown = cli.read()
    assert "no certificates" in shown.err
    assert "fixed steps" in shown.out
    assert "parameters" not in shown.out


@pytest.mark.parametrize(
    "command", ["certify", "bench", "explain", "explore", "export", "evaluate"]
)
def test_commands_that_need_layers_refuse_an_onnx_file(
    tmp_path: Path, picture: Path, command: str, cli: Cli
) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    rest = {"explain": [picture], "export": ["--out", tmp_path / "b.onnx"]}.get(command, [])
    rest += ["--converged", "1e-4"] if command == "evaluate" else []
    assert "an ONNX file has none" in cli.err(command, tmp_path / "m.onnx", *rest)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", "a.bin"], "--out a.bin"),
        (["--out", "a.onnx", "--format", "pt2"], "--format pt2"),
        (["--out", "m.safetensors/a.onnx"], "this is a file; expected a folder"),
        (["--out", "a.pt2", "--int8"], "--int8"),
        (["--out", "a.onnx"], "--steps N"),
    ],
)
def test_export_names_the_option(
    tmp_path: Path,
    flags: list[str],
    said: str,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = models.save(make("geq_digits"), tmp_path / "m.safetensors")
    monkeypatch.chdir(tmp_path)
    assert said in cli.err("export", file, *flags)


def test_serve_names_the_option(tmp_path: Path, cli: Cli) -> None:
    file = models.save(make("geq_digits"), tmp_path / "m.safetensors")
    assert "--queue 0 is out of range" in cli.err("serve", file, "--queue", "0")


@pytest.mark.slow
def test_export_prints_the_difference_and_what_eight_bits_cost(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "run"
    small = ("-o", "widths=[8]", "-o", "hidden=8")
    assert cli("train", "--epochs", "1", *small, "--quiet", "--out", folder) == 0
    cli.read()
    out = tmp_path / "m.onnx"
    flags = ("--steps", "4", "--int8", "--limit", "100")
    found = cli.json("export", folder, "--out", out, *flags)
    assert max(found["difference"].values()) <= 1e-5
    assert abs(found["accuracy"]["torch"] - found["accuracy"]["exported"]) <= 0.05
    assert models.load_onnx(out).classes == tuple("0123456789")
