"""``equilibria theory landscape`` end to end on the digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria_papers.theory.landscapes import Surface
from tests.cli.running import Cli

COMMAND = ("theory", "landscape")


SMALL = ("--images", "16", "--points", "3")


def test_a_network_beside_its_weight_tied_twins(
    checkpoints: list[Path], tmp_path: Path, cli: Cli
) -> None:
    found = cli.json(checkpoints[-1], *SMALL, "--repeats", "1,6", "--out", tmp_path)
    assert [row["name"] for row in found] == ["epoch2", "epoch2 repeat-1", "epoch2 repeat-6"]
    assert found == json.loads((tmp_path / "landscape.json").read_text())
    surface = Surface.load(tmp_path / "epoch2.landscape.safetensors")
    assert surface.complete
    assert surface.loss.shape == (3, 3)
    assert found[0]["center_loss"] == surface.center_loss()
    assert found[0]["converged"] == 1.0
    assert "converged" not in found[1]
    assert "epoch2 repeat-6" in (tmp_path / "contours.svg").read_text()
    # The center is the network itself on these images.
    model = eq.models.load(checkpoints[-1])
    data = eq.data.load("digits", "train")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:16]
    part = data.subset(order)
    with torch.no_grad():
        logits = model(part.normalize(part.images))
    loss = float(torch.nn.functional.cross_entropy(logits, part.targets))
    assert abs(found[0]["center_loss"] - loss) < 1e-4


def test_the_tolerance_is_kept_whatever_a_run_is_called(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    from equilibria_papers.theory import landscapes

    named = tmp_path / "repeat-run.safetensors"
    named.write_bytes(checkpoints[0].read_bytes())
    plain, solvers = landscapes.measure_landscape, {}

    def watched(*arguments: Any, **options: Any) -> Any:
        solvers[options["name"]] = options["solver"]
        return plain(*arguments, **options)

    monkeypatch.setattr(landscapes, "measure_landscape", watched)
    out = ("--rtol", "0.5", "--repeats", "2", "--out", tmp_path / "out")
    assert cli(named, *SMALL, *out) == 0
    assert solvers["repeat-run"].rtol == 0.5
    assert solvers["repeat-run repeat-2"] is None


def test_an_interruption_keeps_rows_and_the_same_command_goes_on(
    checkpoints: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    from equilibria_papers.theory.landscapes import measuring

    plain, count = measuring._measure_row, 0

    def stopping(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(measuring, "_measure_row", stopping)
    command = (checkpoints[0], *SMALL, "--out", tmp_path)
    said = cli.err(*command, code=130)
    assert "the same command goes on from there" in said
    file = tmp_path / "epoch0.landscape.safetensors"
    assert int(Surface.load(file).done.sum()) == 1
    assert cli(*command) == 0
    assert count == 4
    assert Surface.load(file).complete


def test_other_settings_are_refused_until_told(
    checkpoints: list[Path], tmp_path: Path, cli: Cli
) -> None:
    assert cli(checkpoints[0], *SMALL, "--out", tmp_path) == 0
    said = cli.err(checkpoints[0], *SMALL, "--out", tmp_path, "--seed", "1")
    assert "holds another landscape" in said
    assert "--overwrite" in said
    assert cli(checkpoints[0], *SMALL, "--out", tmp_path, "--seed", "1", "--overwrite") == 0
