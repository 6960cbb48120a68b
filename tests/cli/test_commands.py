"""The commands end to end on the digits: what they print, write, and exit with."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import yaml
from PIL import Image
from torch import Tensor, nn

import equilibria as eq
from equilibria.training import TrainConfig
from tests.cli.running import Cli, run
from tests.data.made_files import made, write_parquet


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    small = ("-o", "widths=[8, 16]", "-o", "hidden=16")
    flags = ("--samples", "256", "--epochs", "1", "--batch-size", "128", *small, "--quiet")
    assert run("train", *flags, "--out", folder) == 0
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    digits = eq.data.load("digits", "test")
    for i in range(3):
        Image.fromarray(digits.images[i, 0].numpy()).save(folder / f"{i}.png")
    return folder


# ---------------------------------------------------------------------- train


def test_flags_go_before_the_file_and_the_file_before_the_defaults(
    tmp_path: Path, cli: Cli
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 0.5\nepochs: 9\nmodel_options: {bound: 0.8}\n")
    flags = ("--epochs", "3", "--augment", "crop,flip", "--no-nesterov", "-o", "depth=2")
    flags += ("--devices", "0,2")
    assert cli("train", "--dry-run", "--config", file, *flags) == 0
    found = yaml.safe_load(cli.read().out)
    assert (found["lr"], found["epochs"], found["momentum"]) == (0.5, 3, 0.9)
    assert (found["augment"], found["devices"]) == (["crop", "flip"], [0, 2])
    assert found["nesterov"] is False
    assert found["model_options"] == {"bound": 0.8, "depth": 2}
    assert found["out"] == str(Path("runs") / "digits-geq_digits")


def test_every_option_of_a_run_is_a_flag(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # no text is broken into lines
    assert cli("train", "--help") == 0
    text = " ".join(cli.read().out.replace("│", " ").split())
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in text, field.name
        assert field.metadata["help"] in text, field.name
    assert "Learning rate at its highest. (default: 0.1)" in text
    panels = [text.index(f"─ {name} ─") for name in ("What", "Training", "Machine", "Other")]
    assert panels == sorted(panels)


def test_a_folder_with_a_run_is_not_overwritten_by_accident(trained: Path, cli: Cli) -> None:
    before = (trained / "model.safetensors").read_bytes()
    said = cli.err("train", "--epochs", "1", "--quiet", "--out", trained)
    assert "--resume" in said
    assert "--overwrite" in said
    assert (trained / "model.safetensors").read_bytes() == before


def test_resume_takes_the_runs_own_configuration(trained: Path, cli: Cli) -> None:
    for place in (trained, trained / "last.ckpt"):
        assert cli("train", "--resume", place, "--dry-run") == 0
        assert yaml.safe_load(cli.read().out)["batch_size"] == 128


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lr", "-1"], "lr"),
        (["--seed", "4294967296"], "4294967295]"),
        (["--model", "geq_digit"], "geq_digits"),
        (["--data", "no_such_data"], "no_such_data"),
        (["--schedule", "sometimes"], "onecycle"),
        (["--augment", "[crop"], "--augment"),
        (["--option", "bound"], "key=value"),
        (["--option", "bounds=1"], "bound"),
        (["--config", "no-such.yaml"], "no-such.yaml"),
        (["--resume", "no-such-run"], "no-such-run"),
        (["--epochs", "many"], "--epochs"),
        (["--learning-rate", "1"], "learning-rate"),
    ],
)
def test_wrong_options_say_what_is_wrong(
    arguments: list[str], said: str, tmp_path: Path, cli: Cli
) -> None:
    code = cli("train", "--quiet", "--out", tmp_path / "run", *arguments)
    assert code in (1, 2)
    text = cli.read().err
    assert said in text
    assert "Traceback" not in text
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("geq_stack_cifar_3m", "made for classification of images of 3 × 32 × 32"),
        ("geq_mnist", "made for classification of images of 1 × 28 × 28"),
        ("mdeq_seg", "made for segmentation of images of 3 × 180 × 180"),
    ],
)
def test_a_model_for_other_images_asks_for_data(
    model: str, said: str, tmp_path: Path, cli: Cli
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {model}\n")
    for flags in (("--model", model), ("--config", file)):
        text = cli.err("train", *flags, "--dry-run")
        assert said in text
        assert "Give --data: " in text
    file.write_text(f"model: {model}\ndata: digits\n")
    for flags in (("--model", model, "--data", "digits"), ("--config", file)):
        assert cli("train", *flags, "--dry-run") == 0
        assert yaml.safe_load(cli.read().out)["data"] == "digits"


# ---------------------------------------------------------------------- evaluate


def by_hand(trained: Path) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """The network, the first 64 test images as it takes them, and their classes."""
    model = eq.models.load(trained / "model.safetensors")
    digits = eq.data.load("digits", "test").subset(range(64))
    mean, std = (torch.tensor(model.extra[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    assert isinstance(digits.images, Tensor)
    return model, (digits.images.float() / 255 - mean) / std, digits.targets


def test_evaluate_agrees_with_a_count_by_hand(trained: Path, tmp_path: Path, cli: Cli) -> None:
    flags = ("--limit", "64", "--certify", "4")
    found = cli.json("evaluate", trained, *flags, "--out", tmp_path / "report")
    model, x, targets = by_hand(trained)
    with torch.no_grad():
        right = float((model(x).argmax(1) == targets).double().mean())
    assert found["metrics"]["accuracy"] == pytest.approx(right, abs=2 / len(x))
    assert (tmp_path / "report" / "report.json").exists()
    assert (tmp_path / "report" / "reliability.png").stat().st_size > 1000


def test_corruptions_of_large_images_are_refused_before_the_evaluation(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(*_: Any, **__: Any) -> Any:
        return None, dataclasses.replace(data, images=data.images.repeat(1, 1, 9, 9))

    data = eq.data.load("digits", "test").subset(range(2))
    monkeypatch.setattr("equilibria.cli.evaluate.prepared", large)
    assert "at most 64" in cli.err("evaluate", trained, "--corruptions")


def test_evaluate_at_the_converged_equilibrium_and_under_corruptions(
    trained: Path, cli: Cli
) -> None:
    flags = ("--limit", "16", "--certify", "0", "--corruptions", "--severities", "1")
    found = cli.json("evaluate", trained, *flags, "--converged", "1e-3")
    assert found["converged"] is not None
    assert found["metrics"]["samples"] == 16
    assert found["corruptions"]


def test_evaluate_reads_gray_image_files_as_predict_does(
    trained: Path, tmp_path: Path, cli: Cli
) -> None:
    digits = eq.data.load("digits", "test").subset(range(100))
    for k, (image, label) in enumerate(zip(digits.images, digits.targets.tolist(), strict=True)):
        (tmp_path / "test" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(tmp_path / "test" / str(label) / f"{k}.png")
    found = cli.json("evaluate", trained, "--data", tmp_path, "--certify", "0")
    answers = cli.json("predict", trained, tmp_path)
    right = [each["labels"][0]["label"] == Path(each["file"]).parent.name for each in answers]
    assert found["metrics"]["accuracy"] == pytest.approx(sum(right) / 100)


def test_evaluate_reports_the_flip_apart(trained: Path, tmp_path: Path, cli: Cli) -> None:
    flags = ("--certify", "0", "--limit", "64")
    plain = cli.json("evaluate", trained, *flags)
    found = cli.json("evaluate", trained, *flags, "--flip", "--out", tmp_path)
    assert plain["flip"] is None
    assert found["metrics"] == plain["metrics"]
    assert found["layers"] == plain["layers"]
    assert found["flip"]["nll"] != found["metrics"]["nll"]
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["flip"] == found["flip"]
    shown = cli.shown("evaluate", trained, *flags, "--flip", "--stop", "label")
    assert "with flip" in shown
    assert 'stop="label"' in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["nothing"], "equilibria train"),
        (
            ["", "--corruptions", "--severities", "9"],
            "--severities 9: expected numbers from 1 to 5",
        ),
        (["", "--device", "abacus"], "--device abacus: expected cpu"),
        (["", "--split", "tset"], "--split tset: expected train, val or test"),
        (["", "--converged", "-1"], "--converged -1: expected a number between 0 and 1"),
        (["", "--converged", "2"], "--converged 2: expected a number between 0 and 1"),
        (["", "--steps", "2"], "--steps 2: steps=2: layer "),
        (["", "--out", __file__], "--out "),
    ],
)
def test_evaluate_refuses_nonsense(flags: list[str], said: str, trained: Path, cli: Cli) -> None:
    assert said in cli.err("evaluate", trained / flags[0], *flags[1:], "--limit", "2")


def test_corruptions_of_maps_are_refused_before_the_evaluation(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = dataclasses.replace(made(masks=True), name="maps")
    monkeypatch.setattr("equilibria.cli.evaluate.prepared", lambda *_, **__: (None, maps))
    said = cli.err("evaluate", tmp_path, "--corruptions")
    assert "--corruptions is for classification; maps is for segmentation" in said


# ---------------------------------------------------------------------- certify


def test_certify_gives_the_numbers_of_the_layers(trained: Path, cli: Cli) -> None:
    found = cli.json("certify", trained, "--images", "3")
    assert found["unique"] is True
    model = eq.models.load(trained / "model.safetensors")
    assert len(found["layers"]) == len(eq.nn.equilibrium_layers(model))
    for layer in found["layers"]:
        assert layer["modulus"] > 0
        assert layer["error_bound"] >= layer["residual"] >= 0


def test_certify_exits_with_1_where_nothing_is_proven(tmp_path: Path, cli: Cli) -> None:
    small = {"widths": (8, 8), "hidden": 8}
    model = eq.models.create("geq_digits", **small, constraint=eq.nn.NormBounded(bound=20.0))
    with torch.no_grad():
        layers: list[Any] = list(eq.nn.equilibrium_layers(model).values())
        for layer in layers:
            layer.W.parametrizations.weight.original.mul_(40.0)
    digits = eq.data.load("digits")
    extra = {"data": "digits", "mean": digits.mean, "std": digits.std, "classes": digits.classes}
    eq.models.save(model, tmp_path / "wild.safetensors", extra=extra)
    assert cli("certify", tmp_path / "wild.safetensors", "--images", "2") == 1
    assert "no" in cli.read().out


# ---------------------------------------------------------------------- predict


def test_predict_names_the_class_of_a_file(trained: Path, pictures: Path, cli: Cli) -> None:
    found = cli.json("predict", trained, pictures, "--top", "3")
    assert [Path(each["file"]).name for each in found] == ["0.png", "1.png", "2.png"]
    model, x, _ = by_hand(trained)
    with torch.no_grad():
        expected = model(x[:3]).softmax(1)
    for each, truth in zip(found, expected, strict=True):
        assert len(each["labels"]) == 3
        best = each["labels"][0]
        assert best["label"] == str(int(truth.argmax()))
        assert best["confidence"] == pytest.approx(float(truth.max()), abs=5e-3)
        assert each["steps"] >= 1


def test_predict_answers_every_row_of_parquet_files(
    trained: Path, pictures: Path, tmp_path: Path, cli: Cli
) -> None:
    """Also of one part of several, and beside image files in a folder."""
    encoded = [file.read_bytes() for file in sorted(pictures.iterdir())]
    write_parquet(tmp_path / "test-00001-of-00002.parquet", {"image": encoded, "label": [0, 1, 2]})
    (tmp_path / "z.png").write_bytes(encoded[0])
    found = cli.json("predict", trained, tmp_path)
    names = [Path(each.pop("file")).name for each in found]
    assert names == [*(f"test-00001-of-00002.parquet row {i}" for i in range(3)), "z.png"]
    expected = cli.json("predict", trained, pictures)
    for each in expected:
        each.pop("file")
    assert found == [*expected, expected[0]]
    write_parquet(tmp_path / "bad.parquet", {"image": [encoded[0], b"no image"]})
    for name, words in {"bad.parquet": "bad.parquetrow1", "gone.parquet": "gone.parquet"}.items():
        said = cli.err("predict", trained, tmp_path / name)
        assert words in said.replace(" ", "")  # lines break anywhere in a long path


def test_a_corrupt_image_is_named_and_refused_or_skipped(
    trained: Path, pictures: Path, tmp_path: Path, cli: Cli
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes((pictures / "0.png").read_bytes()[:40])
    assert cli("predict", trained, pictures / "0.png", bad) == 1
    said = cli.read().err.replace("\n", "")
    assert "bad.png" in said
    assert "--on-corrupt skip" in said
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli("predict", trained, pictures / "0.png", bad, "--on-corrupt", "skip") == 0
    said = cli.read().err
    assert "warning: skipped 1 file" in said
    assert "bad.png" in said.replace("\n", "")
    assert "no such file" in cli.err("predict", trained, tmp_path / "none.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "._0.png").write_bytes(b"macOS's notes on 0.png")
    assert "no image" in cli.err("predict", trained, tmp_path / "empty")


@pytest.mark.parametrize("command", ["predict", "certify", "explain"])
def test_an_impossible_out_is_said_before_the_work(
    command: str, trained: Path, pictures: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eq.evaluation, "predict_files", pytest.fail)
    monkeypatch.setattr(eq.evaluation, "certify_dataset", pytest.fail)
    images = [] if command == "certify" else [pictures]
    folder, under_file = pictures, pictures / "0.png" / "answers.json"
    assert "this is a folder" in cli.err(command, trained, *images, "--out", folder)
    assert "this is a file" in cli.err(command, trained, *images, "--out", under_file)


def test_a_missing_file_is_said_before_others_are_answered(
    trained: Path, pictures: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eq.models.Network, "predict_normalized", pytest.fail)
    given = [pictures / "0.png", pictures / "none.png", "--batch-size", "1"]
    assert "none.png: no such file" in cli.err("predict", trained, *given)


def test_predict_reads_any_mode_and_size(trained: Path, tmp_path: Path) -> None:
    for mode in ("RGB", "RGBA", "P", "1", "I;16"):
        picture = Image.new("I;16" if mode == "I;16" else "L", (33, 20))
        picture.paste(60_000 if mode == "I;16" else 250, (5, 5, 20, 15))
        picture.convert(mode).save(tmp_path / f"{mode.replace(';', '')}.png")
    assert run("predict", trained, tmp_path, "--json") == 0


# ---------------------------------------------------------------------- the rest


def test_models_are_listed_with_their_sizes(cli: Cli) -> None:
    (found,) = cli.json("models", "geq_dig*")
    model = eq.models.create("geq_digits")
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert "resnet18_cifar" in cli.shown("models", "*", "--no-count")
    shown = cli.shown("models", "geq_digits", "--no-count")
    assert all(name in shown for name in eq.models.describe("geq_digits").options)
    assert "Did you mean" not in cli.err("models", "nothing*")
    assert "Did you mean geq_digits" in cli.err("models", "geq_digit")
    assert "'talking' is not one of 'classification', 'segm" in cli.err(
        "models", "--task", "talking", code=2
    )
    said = cli.err("models", "geq_digits", "--task", "segmentation")
    assert "no model for segmentation matches 'geq_digits'. `equil" in said


def test_data_is_listed_and_checked(cli: Cli) -> None:
    assert {"digits", "cifar10"} <= {card["name"] for card in cli.json("data", "list")}
    assert cli("data", "check", "digits") == 0
    assert cli("data", "check", "nowhere") == 1


def test_images_of_different_sizes_are_checked_at_one_size(tmp_path: Path, cli: Cli) -> None:
    for k, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        for side in (8, 9 + k):
            Image.new("L", (side, side), 9).save(tmp_path / name / f"{side}.png")
    assert "image_size" in cli.err("data", "check", tmp_path)
    assert cli("data", "check", tmp_path, "--image-size", "8") == 0


def test_info_names_the_versions(cli: Cli) -> None:
    found = cli.json("info")
    assert found["torch"] == torch.__version__
    assert found["equilibria"] == eq.__version__
    assert eq.__version__ in cli.shown("--version")


def test_debug_shows_the_traceback(cli: Cli) -> None:
    assert "Traceback" in cli.err("--debug", "train", "--lr", "-1", "--dry-run")


def test_without_a_command_there_is_help(cli: Cli) -> None:
    assert cli() in (0, 2)
    assert "train" in cli.read().out


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_help_and_version_import_no_torch(flag: str) -> None:
    """A terminal must not wait for torch to read a line of text."""
    program = (
        "import sys; from equilibria.cli.app import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, flag], capture_output=True, text=True, check=True
    )
    shown, loaded = done.stdout.strip().rsplit("\n", 1)
    assert "equilibria" in shown
    assert loaded == "False True"


def test_an_interrupted_run_says_how_to_resume_it(trained: Path, tmp_path: Path, cli: Cli) -> None:
    shutil.copy(trained / "last.ckpt", tmp_path / "last.ckpt")
    said = cli.err("evaluate", tmp_path)
    assert "has not ended" in said
    assert "equilibria train --resume" in said


def test_the_data_of_a_run_are_found_where_they_were_and_read_as_they_were(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equilibria.cli.loading import prepared

    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    written = yaml.safe_load((folder / "config.yaml").read_text())
    own = {"data_root": "there", "on_corrupt": "skip"}
    (folder / "config.yaml").write_text(yaml.safe_dump({**written, **own}))
    found, load = [], eq.data.load
    monkeypatch.setattr(
        eq.data,
        "load",
        lambda *a, root, **k: (found.append((root, k.get("on_corrupt"))), load(*a, **k))[1],
    )
    prepared(folder, None, None, "test", "cpu")
    prepared(folder, None, Path("here"), "test", "cpu")
    prepared(folder, "digits", None, "test", "cpu")
    assert found == [("there", "skip"), (Path("here"), "skip"), (None, None)]


def test_the_report_reads_the_test_images_as_the_training_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from equilibria.cli.train import _write_report

    asked, load = [], eq.data.load
    monkeypatch.setattr(
        eq.data, "load", lambda *a, **k: (asked.append((a[1], k["on_corrupt"])), load(*a, **k))[1]
    )
    monkeypatch.setattr(eq.evaluation, "write_training_report", lambda *_: None)
    result = SimpleNamespace(model=nn.Identity(), folder=tmp_path)
    _write_report(result, TrainConfig(validation=0.0, on_corrupt="skip"))
    assert asked == [("train", "skip"), ("test", "skip")]


@pytest.mark.parametrize("command", [[], ["train"], ["data", "list"]])
def test_help_shows_no_type_of_a_flag(command: list[str], cli: Cli) -> None:
    said = cli.shown(*command, "--help")
    assert "--help" in said
    assert "bool" not in said.lower()


def test_help_has_no_line_breaks_of_the_source(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line ends where the next word does not fit."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli.shown("models", "--help").splitlines()
    first = next(k for k, line in enumerate(lines) if "For a single one" in line)
    here, following = (line.split() for line in lines[first + 1 : first + 3])
    assert len(" ".join([*here, following[0]])) > 78


def test_the_list_of_commands_says_what_their_own_help_says() -> None:
    from equilibria.cli.app import COMMANDS, make_app

    whole = typer.main.get_command(make_app())
    listed = typer.main.get_command(make_app(""))
    assert sorted(whole.commands) == sorted(listed.commands)
    for name in COMMANDS:
        full, short = whole.commands[name].help, listed.commands[name].help
        assert " ".join(full.split("\n\n")[0].split()) == short, name


def test_small_images_train_on_one_thread_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from equilibria.cli.train import on_threads

    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def used(asked: int | None, data: str) -> int:
        with on_threads(asked, data):
            return torch.get_num_threads()

    assert used(None, "digits") == 1
    assert used(None, "cifar10") == before
    assert used(None, "/a/folder") == before
    assert used(2, "digits") == 2
    monkeypatch.setenv("OMP_NUM_THREADS", str(before))
    assert used(None, "digits") == before
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------- certified labels


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of a network made for certified radii."""
    folder = tmp_path_factory.mktemp("certified") / "run"
    small = ("--model", "geq_certified_digits", "-o", "widths=[8]", "-o", "depth=1")
    flags = ("--optimizer", "adamw", "--lr", "0.02", "--margin", "0.3", "--temperature", "0.1")
    length = ("--samples", "640", "--batch-size", "32", "--epochs", "3", "--no-report")
    assert run("train", *small, *flags, *length, "--quiet", "--out", folder) == 0
    return folder


def test_certify_radius_states_what_is_proven_and_what_an_attack_leaves(
    certified: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "radii.json"
    asked = ("--radius", "0.02,36/255", "--attack", "--images", "16", "--out", out)
    found = cli.json("certify", certified, *asked)
    assert found == json.loads(out.read_text())
    assert out.with_suffix(".png").stat().st_size > 1000
    small, large = found["certified"]
    assert large["radius"] == pytest.approx(36 / 255)
    assert found["accuracy"] >= small["accuracy"] >= large["accuracy"]
    assert small["accuracy"] > 0.3
    for each in (small, large):
        assert found["accuracy"] >= each["attacked"] >= each["accuracy"]
    assert found["lipschitz"] == pytest.approx(1.0 / 0.3759, rel=0.02)


@pytest.mark.parametrize("given", ["0", "a", "1/0", "36/255,-1", "1e400", ""])
def test_a_radius_that_is_none_is_refused(given: str, certified: Path, cli: Cli) -> None:
    assert "expected positive numbers" in cli.err("certify", certified, "--radius", given)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("certify --attack", "go with --radius"),
        ("certify --norm inf", "go with --radius"),
        ("certify --radius 0.1 --full", "--full prints the certificates of layers"),
        ("certify --radius 0.1 --out a.png", "give one for the numbers (.json)"),
        ("export --out a.onnx --limit 9", "--limit go with --data or --int8"),
        ("bench --data-root .", "--data-root goes with --data"),
        ("evaluate --severities 1", "--severities goes with --corruptions"),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused(
    line: str, said: str, certified: Path, cli: Cli
) -> None:
    command, *flags = line.split()
    assert said in cli.err(command, certified, *flags)


def test_predict_tells_the_radius(certified: Path, pictures: Path, cli: Cli) -> None:
    radii = [a["radius"] for a in cli.json("predict", certified, pictures, "--radius")]
    assert len(radii) == 3
    assert max(radii) > 0.01
    assert all(a["radius"] is None for a in cli.json("predict", certified, pictures))
