"""What reaches the terminal: names as they are, and no escape codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import equilibria as eq
from equilibria.cli.console import complain, fail, output, print_table, printable, say
from equilibria.evaluation.rich_output import make_table
from tests.cli.running import Cli

NAMES = ["photo [old].png", "[/x]", "[bold]b[/bold]", ":smile:", "[link=http://x]y[/link]"]
EVIL = "a\x1b[31mred\x1b[0m\x9b2J\x07\x00\u202eb"


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_they_are(name: str, cli: Cli) -> None:
    print_table(f"{name} head", rows=[(name,)], title=f"{name} title")
    output().print(make_table(name, [name], [(name,)]))
    output().print(f"wrote {name}")
    shown = cli.read().out
    assert shown.count(name) >= 6
    say(name)
    complain("error:", name, "bold red")
    fail(name, name)
    assert cli.read().err.count(name) == 4


def test_no_control_character_reaches_the_terminal(cli: Cli) -> None:
    print_table(EVIL, rows=[(EVIL,)], title=EVIL)
    output().print(make_table(EVIL, [EVIL], [(EVIL,)]))
    output().print(EVIL)
    say(EVIL)
    complain("warning:", EVIL, "yellow")
    fail(EVIL, EVIL)
    shown = cli.read()
    for text in (shown.out, shown.err):
        assert not set(EVIL) & set(text) - set("a[31mred0m2Jb")
        assert r"\x1b[31mred\x1b[0m\x9b2J\x07\x00\u202eb" in text


@given(st.text())
@settings(deadline=None)
def test_text_without_control_characters_stays(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert all(c in "\t\n" or not (c < " " or "\x7f" <= c <= "\x9f") for c in shown)
    if text.isprintable():
        assert shown == text


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained network with names of classes that look like markup."""
    digits = eq.data.load("digits")
    names = [NAMES[1], EVIL, *map(str, range(8))]
    extra = {"mean": list(digits.mean), "std": list(digits.std), "classes": names, "data": "digits"}
    model = eq.models.create("explicit_digits", widths=(8,), depth=1)
    file = tmp_path_factory.mktemp("weights [new]") / "[x].safetensors"
    return eq.models.save(model, file, extra=extra)


def test_predict_prints_odd_names_of_files_and_classes(
    weights: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    digits = eq.data.load("digits", "test")
    for name in ("photo [old].png", "[x].png", "evil \x1b[31m.png"):
        Image.fromarray(digits.images[0, 0].numpy()).save(tmp_path / name)
    shown = cli.shown("predict", weights, tmp_path, "--top", "10")
    assert "photo [old].png" in shown
    assert "[x].png" in shown
    assert r"evil \x1b[31m.png" in shown
    assert "[/x]" in shown
    assert "\x1b" not in shown
    bad = tmp_path / "bad [x] \x1b[31m.png"
    bad.write_bytes(b"no image")
    said = cli.err("predict", weights, bad)  # it may be wrapped there
    assert r"bad [x] \x1b[31m.png" in said
    assert "\x1b" not in said


def test_predict_doubts_a_plain_picture(weights: Path, tmp_path: Path, cli: Cli) -> None:
    Image.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    with pytest.warns(eq.models.InputWarning, match=r"red\.png: almost no contrast"):
        eq.evaluation.predict_files(eq.models.load(weights), [tmp_path])
