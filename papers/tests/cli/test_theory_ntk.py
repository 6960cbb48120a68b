"""``equilibria theory ntk`` end to end on the digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import equilibria as eq
from equilibria_papers.theory import empirical_ntk
from tests.cli.running import Cli

COMMAND = ("theory", "ntk")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two networks of one architecture, the second with its head scaled."""
    folder = tmp_path_factory.mktemp("ntk")
    torch.manual_seed(0)
    model = eq.models.create("explicit_digits")
    digits = eq.data.load("digits", "train", progress=False)
    extra = {"data": "digits", "image_size": 8, "mean": list(digits.mean), "std": list(digits.std)}
    paths = []
    for name in ("before", "after"):
        paths.append(eq.models.save(model, folder / f"{name}.safetensors", extra=extra))
        with torch.no_grad():
            model.head[-1].weight.mul_(2)  # type: ignore[index, operator, union-attr]
    return paths


def test_the_drift_between_two_checkpoints(
    checkpoints: list[Path], tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "new" / "out"
    said = cli.shown(*checkpoints, "--samples", "5", "--outputs", "0,1", "--out", out)
    assert "effective" in said
    assert "head.4" in said
    assert "layers of after, the last" in said
    assert "wrote" in said
    found = json.loads((out / "ntk.json").read_text())
    assert [row["network"] for row in found["networks"]] == ["before", "after"]
    saved = load_file(out / "ntk.safetensors")
    before, after = (saved[f"{name}/kernel"] for name in ("before", "after"))
    assert before.shape == (10, 10)
    drift = float((after - before).norm() / before.norm())
    assert found["networks"][1]["drift"] == pytest.approx(drift, rel=1e-4)
    assert drift > 0.01
    # The kernel is that of the images of the seed.
    digits = eq.data.load("digits", "train", progress=False)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))[:5]
    x = digits.normalize(digits.images[order])  # type: ignore[arg-type]
    kernel = empirical_ntk(eq.models.load(checkpoints[0]), x, outputs=[0, 1]).matrix
    torch.testing.assert_close(before, kernel, rtol=1e-3, atol=1e-4)
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["ntk.json", "ntk.safetensors", "spectrum.png", "spectrum.svg"]
    )


def test_a_named_network_as_json(cli: Cli) -> None:
    few = ("--samples", "4", "--outputs", "sum", "--json", "--no-layers")
    assert cli("--model", "explicit_digits", *few) == 0
    found = json.loads(cli.read().out)
    assert found["samples"] == 4
    assert found["parameters"] == 77162
    (row,) = found["networks"]
    assert "shares" not in row


def test_the_kernel_of_the_equilibrium_itself(cli: Cli) -> None:
    options = ("--model", "geq_digits", "--samples", "2", "--outputs", "3", "--json")
    assert cli(*options) == 0
    own = json.loads(cli.read().out)["networks"][0]
    assert cli(*options, "--implicit", "1e-5") == 0
    exact = json.loads(cli.read().out)["networks"][0]
    assert exact["trace"] != own["trace"]
    assert exact["trace"] == pytest.approx(own["trace"], rel=0.2)
