"""``equilibria theory trajectory`` end to end on the digits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.cli.running import Cli

COMMAND = ("theory", "trajectory")


SMALL = ("--images", "12", "--steps", "12")


def test_scales_without_weights(tmp_path: Path, cli: Cli) -> None:
    code = cli(*SMALL, "--init-scales", "1,0.01", "--out", tmp_path / "out", "--json")
    assert code == 0
    printed = cli.read()
    assert "untrained" in printed.err
    assert "fresh weights" in " ".join(printed.err.split())
    found = json.loads(printed.out)
    assert found == json.loads((tmp_path / "out" / "trajectory.json").read_text())
    last = {(row["network"], row["solver"]): row["last_residual"] for row in found["rows"]}
    # The thesis' §4.1.1: at N(0, 0.01) the solver settles, at N(0, 1) it does not.
    for solver in ("picard", "anderson", "broyden"):
        assert last["std 0.01", solver] < 0.1 * last["std 1", solver]
    assert len(found["rows"][0]["mean_residual"]) == 12
    for name in ("residuals.png", "residuals.svg", "paths.png", "paths.svg"):
        assert "std 0.01" in (tmp_path / "out" / name).read_text()
    assert not (tmp_path / "out" / "classes.png").exists()


@pytest.mark.filterwarnings("default:std=1 was asked for")
def test_a_bounded_layer_is_named_by_the_scale_in_effect(
    checkpoints: list[Path], tmp_path: Path, cli: Cli
) -> None:
    arguments = ("--init-scales", "1,0.001", "--solvers", "picard", "--out", tmp_path, "--json")
    assert cli(checkpoints[0], *SMALL, *arguments) == 0
    printed = cli.read()
    assert "holds them at a smaller standard deviation" in " ".join(printed.err.split())
    first, second = (row["network"] for row in json.loads(printed.out)["rows"])
    assert first.startswith("std 1 (bounded: 0.")
    assert second == "std 0.001"
    assert first in (tmp_path / "residuals.svg").read_text("utf-8")


def test_checkpoints_are_drawn_by_class(checkpoints: list[Path], tmp_path: Path, cli: Cli) -> None:
    assert cli(*checkpoints[:2], *SMALL, "--solvers", "own,anderson", "--out", tmp_path) == 0
    printed = cli.read()
    assert "untrained" not in printed.err
    assert "epoch1" in printed.out
    found = json.loads((tmp_path / "trajectory.json").read_text())
    assert list(found["between_classes"]) == ["epoch0", "epoch1"]
    assert all(0 <= v <= 1 for v in found["between_classes"].values())
    assert {row["solver"] for row in found["rows"]} == {"own", "anderson"}
    assert all(math.isfinite(row["last_residual"]) for row in found["rows"])
    assert "epoch1" in (tmp_path / "classes.svg").read_text()
