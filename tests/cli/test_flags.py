"""Flags from the declared options; errors of the library as the command line prints them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import equilibria as eq
from equilibria import training
from equilibria.cli.flags import as_flags
from equilibria.engine import OptionError
from equilibria.training.config import TrainConfig
from tests.cli.running import Cli


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": -1}, "--lr -1.0 is out of range: expected a number in (0, inf)."),
        ({"epochs": "many"}, "--epochs many: expected an integer in [1, inf), got str."),
        ({"schedule": "cosin"}, "--schedule cosin: did you mean 'cosine'?"),
        ({"model": ""}, "--model '': expected a non-empty text, got str."),
        ({"augment": ["flip", "corp"]}, "--augment flip,corp: "),
        ({"momentum": 0}, "--nesterov --momentum 0.0: Nesterov's form needs a momentum;"),
        ({"milestones": [2, 5]}, "--schedule onecycle --milestones 2,5 --epochs 10: "),
        ({"schedule": "step"}, "--schedule step --epochs 10: the schedule step needs milestones"),
        ({"cuda_graphs": True, "nodes": 2}, "--cuda-graphs --strategy auto --nodes 2: graphs "),
        (
            {"validation": 0, "select": "best"},
            "--validation 0.0 --select best: early stopping",  # early_stop is None: not given
        ),
    ],
)
def test_an_error_of_an_option_names_its_flag(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as wrong:
        TrainConfig(**given)
    assert as_flags(wrong.value).startswith(said)
    # The error comes back from another process with all it holds.
    assert as_flags(pickle.loads(pickle.dumps(wrong.value))) == as_flags(wrong.value)


def test_an_error_of_a_file_names_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: -1\n", "utf-8")
    with pytest.raises(OptionError, match=r"run.yaml: TrainConfig\(lr=-1.0\)") as wrong:
        TrainConfig.from_yaml(path)
    assert as_flags(wrong.value).startswith(f"{path}: --lr -1.0 is out of range")


def test_other_options_and_errors_are_left_as_they_are() -> None:
    with pytest.raises(OptionError) as wrong:
        eq.Picard(max_steps=-1)
    assert as_flags(wrong.value) == str(wrong.value)
    assert as_flags(ValueError("lr=3")) == "lr=3"


def test_the_commands_name_flags_and_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    train = ("train", "--quiet", "--accelerator", "cpu", "--out", tmp_path / "run")
    for arguments, words in (
        (("train", "--lr", "-1", "--dry-run"), ["error: --lr -1.0 is out of range"]),
        ((*train, "--samples", "99999"), ["error: --samples 99999: digits has"]),
        ((*train, "--model", "geq_digit"), ["`equilibria models`"]),
        (
            (*train, "--data", "cifar100", "--data-root", tmp_path),
            ["`equilibria data download cifar100`", "--data-root"],
        ),
        ((*train[:-1], tmp_path / "file" / "run"), ["cannot make the folder"]),
    ):
        text = cli.err(*arguments)
        assert all(word in text for word in words), text
        assert "Errno" not in text


@pytest.mark.parametrize("complete", [False, True])
def test_a_run_that_is_stopped_says_how_to_go_on(
    complete: bool, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    folder = Path("my run")
    stop = training.Interrupted(
        "Saved it.", folder / "last.ckpt", folder=None if complete else folder
    )

    def stopped(*_: object, **__: object) -> None:
        raise stop

    monkeypatch.setattr(training, "fit", stopped)
    assert cli("train", "--quiet") == 130
    again = " Go on with\n  equilibria train --resume 'my run'"
    assert cli.read().err == f"Saved it.{'' if complete else again}\n"
    assert ("resume='my run')" in str(stop)) != complete


def test_the_next_command_can_be_copied(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path("a run")
    found = training.TrainResult(place, place / "model", place / "last", {}, [], nn.Identity())
    monkeypatch.setattr(training, "fit", lambda *_, **__: found)
    assert cli("train", "--quiet", "--no-report") == 0
    assert cli.read().err.endswith("next: equilibria evaluate 'a run'\n")


def test_other_channels_are_named(tmp_path: Path, cli: Cli) -> None:
    model = eq.models.create("geq_digits", num_classes=10)
    extra = {"data": "digits", "mean": [0.5] * 3, "std": [0.5] * 3, "image_size": 8}
    path = eq.models.save(model, tmp_path / "m.safetensors", extra=extra)
    assert "3 channel(s)" in cli.err("certify", path, "--images", "2")
