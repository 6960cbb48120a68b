"""Messages of the library as the command line says them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import equilibria as eq
from equilibria.cli.app import main
from equilibria.cli.flags import described
from equilibria.cli.train import _next
from equilibria.cli.wording import as_flags, help_text
from equilibria.training.config import TrainConfig


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("TrainConfig(lr=-1.0) is out of range: x.", "--lr -1.0 is out of range: x."),
        ("TrainConfig(augment=...): no 'foo'.", "--augment: no 'foo'."),
        (
            "Resume it (resume='my run'), or (overwrite=True).",
            "Resume it (--resume 'my run'), or (--overwrite).",
        ),
        ("set another folder (out=...).", "set another folder (--out ...)."),
        ("pass on_corrupt='skip' to go on", "pass --on-corrupt skip to go on"),
        (
            "a lower lr, clip=1.0, precision='32-true'",
            "a lower lr, --clip 1.0, --precision 32-true",
        ),
        ("names() lists all 53.", "`equilibria models` lists all 53."),
        ("[Errno 13] cannot make it", "cannot make it"),
        ("Auto(rtol=-1.0) is out of range", "--converged -1.0 is out of range"),
        ("GMRES(max_steps=3), layer.out=3", "GMRES(max_steps=3), layer.out=3"),
        (
            "Saved a/last.ckpt. Go on with fit(TrainConfig.from_yaml('a b/config.yaml'), "
            "resume='a b').",
            "Saved a/last.ckpt. Go on with\n  equilibria train --resume 'a b'",
        ),
    ],
)
def test_keywords_become_flags(said: str, expected: str) -> None:
    assert as_flags(said) == expected


def test_the_librarys_own_errors_name_flags() -> None:
    with pytest.raises(ValueError, match="lr") as wrong:
        TrainConfig(lr=-1)
    assert as_flags(str(wrong.value)).startswith("--lr -1.0 is out of range")
    with pytest.raises(ValueError, match="geq_digits") as unknown:
        eq.models.create("geq_digit")
    assert "`equilibria models` lists" in as_flags(str(unknown.value))


def test_no_help_speaks_python() -> None:
    for name, text in described(TrainConfig).items():
        said = help_text(text)
        assert "None" not in said, name
        assert not re.search(r"names\(\)|'[a-z]+_[a-z]+'", said), (name, said)


def test_a_run_that_is_stopped_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from equilibria import training

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt(
            "Interrupted. Go on with fit(TrainConfig.from_yaml('r/config.yaml'), resume='r')."
        )

    monkeypatch.setattr(training, "fit", stopped)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--quiet"])
    assert ended.value.code == 130
    assert "equilibria train --resume r\n" in capsys.readouterr().err


def test_the_next_command_can_be_copied() -> None:
    settings = TrainConfig(data="mnist", data_root="my data")
    assert _next(Path("a run"), settings) == "equilibria evaluate 'a run' --root 'my data'"
    assert _next(Path("run"), TrainConfig()) == "equilibria evaluate run"


def test_a_single_model_shows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "geq_digits", "--no-count"])
    shown = capsys.readouterr().out
    for name in eq.models.describe("geq_digits").options:
        assert name in shown


def test_wrong_flags_are_found_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for flags in (["--corruptions", "--severities", "9"], ["--out", str(tmp_path / "file")]):
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", str(tmp_path / "no-run"), *flags])
        assert ended.value.code == 1
        assert flags[-2] in capsys.readouterr().err


def test_other_channels_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = eq.models.create("geq_digits", num_classes=10)
    extra = {"data": "digits", "mean": [0.5] * 3, "std": [0.5] * 3, "image_size": 8}
    path = eq.models.save(model, tmp_path / "m.safetensors", extra=extra)
    with pytest.raises(SystemExit):
        main(["certify", str(path), "--images", "2"])
    assert "3 channel(s)" in capsys.readouterr().err
