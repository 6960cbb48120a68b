"""The tutorials of docs/tutorials.md: each compares itself with code that is not ours."""

from __future__ import annotations

import importlib.util
import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

for package in ("cvxpy", "matplotlib", "scipy", "sklearn"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).parents[1] / "examples"
# What may lie between ours and theirs at most, at the size of --quick.
LIMITS = {
    "bratu": {"misfit": 1e-8, "gradient": 1e-6, "recovered p": 1e-4},
    "nmf": {"W": 1e-6, "H": 1e-6, "derivative": 1e-5},
    "pagerank": {"rank": 1e-7, "in damping": 1e-6, "in links": 1e-6},
    "sinkhorn": {"plan": 1e-9, "gradient": 1e-6, "mean gaps": 1e-6},
    "sparse_coding": {"codes": 1e-6, "derivative": 1e-6},
    "tv_denoising": {"image": 1e-5, "derivative": 1e-3},
}
SLOW = {"bratu", "nmf", "sparse_coding", "tv_denoising"}


def tutorial(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module(name)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LIMITS]
)
def test_a_tutorial_agrees_with_code_that_is_not_ours(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = tmp_path / "picture.svg"
    found = tutorial(name, monkeypatch).main(quick=True, out=str(picture))
    assert "<svg" in picture.read_text("utf-8")
    printed = capsys.readouterr().out
    for key, limit in LIMITS[name].items():
        assert found[key] < limit, key
        assert f"{key} {found[key]:.1e}" in printed
    match name:
        case "bratu":
            assert found["from the truth"] < 0.5
        case "sinkhorn":  # three numbers from 20,000 matches
            assert found["from the truth"] < 0.15
        case "sparse_coding":  # trained for the task, it is better at it
            assert found["ours"] < 0.9 * found["usual"] < 0.9 * found["noisy"]
        case "tv_denoising":  # near the best of the fixed weights, though learned on other images
            assert found["gain"] > 0.9


def test_a_wrong_map_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pagerank = tutorial("pagerank", monkeypatch)
    right = pagerank.step

    def wrong(rank: Tensor, damping: Tensor, links: Tensor) -> Tensor:
        changed: Tensor = right(rank, 0.99 * damping, links)
        return changed

    monkeypatch.setattr(pagerank, "step", wrong)
    found = pagerank.main(quick=True, out=str(tmp_path / "picture.svg"))
    assert all(found[key] > 100 * limit for key, limit in LIMITS["pagerank"].items())


def test_the_notebooks_are_those_of_the_scripts_and_ran_to_their_end() -> None:
    spec = importlib.util.spec_from_file_location(
        "books", EXAMPLES.parent / "docs/make_notebooks.py"
    )
    assert spec is not None
    assert spec.loader is not None
    books = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(books)
    assert {file.stem for file in books.OUT.iterdir()} == set(books.NAMES)
    for name in books.NAMES:
        cells = json.loads((books.OUT / f"{name}.ipynb").read_text("utf-8"))["cells"]
        shown = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
        assert shown == books.cells(name), f"run: python docs/make_notebooks.py {name}"
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        kinds = [output["output_type"] for output in outputs]
        assert "error" not in kinds
        assert "display_data" in kinds or name not in LIMITS
        assert all(cell.get("execution_count", 1) for cell in cells)
