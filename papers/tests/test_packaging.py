"""Two distributions, one version; the commands of one plug into the other."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import equilibria
from equilibria.cli import app as module

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))


def test_the_version_is_that_of_the_library() -> None:
    assert PROJECT["project"]["version"] == equilibria.__version__
    assert (
        f"equilibria[train,analysis]=={equilibria.__version__}"
        in (PROJECT["project"]["dependencies"])
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("theory", "equilibria_papers.theory"),
        ("theory.audit", "equilibria_papers.claims"),
        ("experiments", "equilibria_papers.tables"),
    ],
)
def test_old_paths_name_the_new_ones(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=new):
        importlib.import_module(f"equilibria.{old}")
    with pytest.raises(AttributeError, match="pip install equilibria-papers"):
        getattr(equilibria, old.split(".")[0])


def test_without_the_papers_their_commands_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "entry_points", lambda group: ())
    bare = module.make_app()
    for command in (["theory", "audit", "--only", "x"], ["reproduce", "list"], ["theory", "-h"]):
        found = CliRunner().invoke(bare, command)
        assert found.exit_code == 1
        assert "pip install equilibria-papers" in found.output
