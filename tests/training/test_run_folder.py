"""The folder of a run: what is in it, and that nobody's run is lost."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria.training import RunExistsError, TrainConfig
from equilibria.training.run_folder import RunFolder, provenance

from .small import config, run


def test_a_second_run_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run(config(tmp_path, epochs=1))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(RunExistsError, match="already holds a run") as caught:
        run(config(tmp_path, epochs=1))
    assert "overwrite=True" in str(caught.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_overwrite_replaces_a_run_and_spares_the_rest(tmp_path: Path) -> None:
    run(config(tmp_path, epochs=2))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "nonfinite.json").write_text("{}")
    found = run(config(tmp_path, epochs=1, seed=1), overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "nonfinite.json").exists()
    assert len(found.history) == 1
    assert TrainConfig.from_yaml(tmp_path / "config.yaml").seed == 1


def test_a_mistake_does_not_cost_the_old_run(tmp_path: Path) -> None:
    run(config(tmp_path, epochs=1))
    before = (tmp_path / "last.ckpt").read_bytes()
    with pytest.raises(ValueError, match="there is no model"):
        eq.training.fit(
            config(tmp_path, model="geq_digts", epochs=1), overwrite=True, progress=False
        )
    assert (tmp_path / "last.ckpt").read_bytes() == before


def test_a_folder_with_other_things_is_welcome(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    run(config(tmp_path, epochs=1))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(NotADirectoryError, match="needs a folder"):
        run(config(tmp_path / "run", epochs=1))
    with pytest.raises(OSError, match=r"cannot make the folder|is a file"):
        run(config(tmp_path / "run" / "deeper", epochs=1))


def test_what_a_run_leaves(tmp_path: Path) -> None:
    result = run(config(tmp_path, epochs=2))
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[1]["val_accuracy"]) == result.history[1]["val_accuracy"]
    assert float(rows[1]["train_loss"]) == result.history[1]["train_loss"]
    found = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert found["metrics"] == result.metrics
    assert found["seed"] == 0
    assert found["version"] == eq.__version__
    assert found["torch"] == torch.__version__
    assert found["data"] == {"name": "digits", "train": 192, "validation": 64, "classes": 10}
    assert found["parameters"] == sum(p.numel() for p in result.model.parameters())
    assert found["command"]
    assert found["seconds"] > 0
    assert datetime.fromisoformat(found["started"]) <= datetime.fromisoformat(found["finished"])
    saved = TrainConfig.from_yaml(tmp_path / "config.yaml")
    assert saved == config(tmp_path, epochs=2).resolved()


def test_provenance_names_no_user_and_no_host() -> None:
    import getpass
    import platform

    made = provenance(datetime.now(UTC), torch.device("cpu"), 3)
    text = json.dumps({k: v for k, v in made.items() if k != "command"})
    assert platform.node() not in text or not platform.node()
    assert f'"{getpass.getuser()}"' not in text


def test_history_with_uneven_rows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_history([{"epoch": 1, "a": 0.1}, {"epoch": 2, "b": float("nan")}])
    text = (tmp_path / "history.csv").read_text()
    assert text == "epoch,a,b\n1,0.1,\n2,,nan\n"
