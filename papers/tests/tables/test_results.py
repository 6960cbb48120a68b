"""Means, states and files of reproduced tables."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from equilibria_papers.tables import Cell, Published
from equilibria_papers.tables.pages import copy_pictures, markdown, rich_table
from equilibria_papers.tables.reproduction import EXPERIMENTS
from equilibria_papers.tables.results import (
    CellResult,
    Result,
    Sample,
    earlier_samples,
    merged,
    read_result,
    result_path,
    status_of,
)

from . import tiny

# Printed numbers are read as a reader would.


@pytest.mark.parametrize(
    ("text", "value", "spread", "limit"),
    [
        ("94.8 ± 0.1%", 94.8, 0.1, ""),
        ("> 5", 5.0, None, ">"),
        ("1.22e-02", 0.0122, None, ""),
        ("1.3s", 1.3, None, ""),
        ("4597/s", 4597.0, None, ""),
        ("1.4 M", 1.4, None, ""),
        ("162 k", 162.0, None, ""),
    ],
)
def test_reads(text: str, value: float, spread: float | None, limit: str) -> None:
    found = Published.read(text)
    assert (found.text, found.value, found.spread, found.limit) == (text, value, spread, limit)


@pytest.mark.parametrize("text", ["", "about 94", "94.8 ±", "94.8 0.1", "95 %%", "1,000"])
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="no printed number"):
        Published.read(text)


def _sample(seed: int, value: float = 90.0, group: str = "a", stands_in: str = "") -> Sample:
    return Sample(seed, value, group, 10.0, {"device": "cpu"}, stands_in)


def _result(samples: tuple[Sample, ...], **changes: Any) -> Result:
    table = tiny.table()
    cells = tuple(
        CellResult(cell, samples if cell.job is not None else (), group="a") for cell in table.cells
    )
    made: dict[str, Any] = {"smoke": False, "change": "", "made_by": {}, **changes}
    return Result(table, cells, **made)


def test_mean_and_standard_deviation_over_seeds() -> None:
    values = [94.1, 94.9, 95.0]
    found = CellResult(tiny.table().cells[0], tuple(_sample(i, v) for i, v in enumerate(values)))
    assert found.mean == pytest.approx(sum(values) / 3)
    assert found.std == pytest.approx(statistics.stdev(values))
    assert found.ours == "94.67 ± 0.49 (3)"
    assert CellResult(tiny.table().cells[0], (_sample(0),)).std is None


@pytest.mark.parametrize(
    ("cells", "smoke", "expected"),
    [
        (["measured", "measured"], False, "measured"),
        (["measured", "quoted"], False, "measured"),
        (["measured", "not run"], False, "partly"),
        (["measured", "stand-in data"], False, "stand-in data"),
        (["not run", "quoted"], False, "not run"),
        (["measured"], True, "smoke only"),
        (["partly", "measured"], False, "partly"),
    ],
)
def test_state_of_a_table(cells: list[str], smoke: bool, expected: str) -> None:
    assert status_of(cells, smoke) == expected


def test_seeds_of_earlier_calls_are_kept() -> None:
    kept = merged([_sample(1, 5.0)], [_sample(0, 1.0), _sample(1, 2.0)], "a")
    assert [(s.seed, s.value) for s in kept] == [(0, 1.0), (1, 5.0)]
    kept = merged(
        [_sample(1, 5.0, "new")], [_sample(0, 1.0, "old")], "new"
    )  # settings are not mixed
    assert [(s.seed, s.value) for s in kept] == [(1, 5.0)]
    assert _result((_sample(0), _sample(1))).seconds == 20.0  # two cells, two runs
    kept = merged([], [_sample(0, 1.0, "old")], "new")  # they stay until there are new ones
    found = CellResult(tiny.table().cells[0], kept, group="new")
    assert (found.outdated, found.status) == (True, "partly")
    # Real data are not replaced by what stands in.
    real, instead = _sample(0, 1.0), _sample(0, 5.0, "b", "digits")
    for new, earlier, group in (([instead], [real], "b"), ([real], [instead], "a")):
        assert [s.value for s in merged(new, earlier, group)] == [1.0]


def test_a_smoke_test_or_a_changed_recipe_never_takes_the_place_of_a_result(tmp_path: Path) -> None:
    paths = {
        result_path(tmp_path, "x", smoke=False),
        result_path(tmp_path, "x", smoke=True),
        result_path(tmp_path, "x", smoke=False, change="epochs=2"),
        result_path(tmp_path, "x", smoke=False, change="epochs=3"),
        result_path(tmp_path, "x", smoke=True, change="epochs=3"),
    }
    assert len(paths) == 5


def test_files_and_back(tmp_path: Path) -> None:
    result = _result((_sample(0, 91.25), _sample(2, 92.25)))
    paths = result.save(tmp_path)
    assert [p.name for p in paths] == ["tiny-table.json", "tiny-table.md"]
    kept = json.loads(paths[0].read_text())
    assert kept["status"] == "measured"
    assert kept["cells"][0]["published"] == {"text": "90 ± 1%", "value": 90.0, "spread": 1.0}
    assert kept["cells"][0]["mean"] == 91.75
    back = earlier_samples(paths[0])
    assert back[("net", "accuracy in %")] == list(result.cells[0].samples)
    page = paths[1].read_text()
    assert "| | accuracy in % | size in k |" in page
    assert "| net | 91.75 ± 0.71 (2) / 90 ± 1% | " in page
    assert "| other | – / 95% |  |" in page
    assert "- quoted: other, accuracy in %." in page


def shown(result: Result, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(rich_table(result))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_smoke_says_so_everywhere(tmp_path: Path) -> None:
    result = _result((_sample(0),), smoke=True)
    assert "SMOKE TEST, NO RESULT" in markdown(result)
    assert "SMOKE TEST, NO RESULT" in shown(result, 100)[0]
    assert result.save(tmp_path)[0].parent.name == "smoke"
    assert result.to_dict()["warning"]


def test_a_damaged_file_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        assert read_result(path) is None
    assert read_result(tmp_path / "nothing.json") is None


def test_pictures_of_the_measures_stand_beside_the_table(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "paths.png").write_bytes(b"a picture")
    (run / "corruptions.png").write_bytes(b"not this one")
    result = copy_pictures(_result((_sample(0),)), [("job", run)], tmp_path / "out")
    assert result.files == ("tiny-table--job--paths.png",)
    assert (tmp_path / "out" / result.files[0]).read_bytes() == b"a picture"
    assert f"]({result.files[0]})" in markdown(result)


@pytest.mark.parametrize("residual", [None, 0.02, 0.1, 0.9, math.nan])
@pytest.mark.parametrize("order", [1, -1])
def test_a_network_that_is_not_at_its_equilibrium_is_named(
    residual: float | None, order: int
) -> None:
    """Above a tenth, or NaN; the worst seed counts, and a smoke test has nothing to say."""
    near = dataclasses.replace(_sample(0), residual=None if residual is None else 0.01)
    samples = (near, dataclasses.replace(_sample(1), residual=residual))[::order]
    far = residual is not None and not residual <= 0.1
    made = _result(samples)
    for text in (markdown(made), "\n".join(shown(made, 300))):
        assert ("not at their equilibrium" in text) is far
        assert (f"{tiny.job().name} ({residual})" in text) is far
    assert "not at their" not in markdown(_result(samples, smoke=True))


def test_files_from_before_residuals_were_kept_are_read(tmp_path: Path) -> None:
    kept = dataclasses.replace(_sample(0), residual=0.5)
    path, _ = _result((kept,)).save(tmp_path)
    assert {s.residual for found in earlier_samples(path).values() for s in found} == {0.5}
    old = json.loads(path.read_text())
    for cell in old["cells"]:
        for sample in cell["samples"]:
            del sample["residual"]
    path.write_text(json.dumps(old))
    assert {s.residual for found in earlier_samples(path).values() for s in found} == {None}
    unknown = _result((dataclasses.replace(kept, residual=math.nan),))
    unknown.save(tmp_path)  # JSON has no word for it
    assert all(
        s.residual is not None and math.isnan(s.residual)
        for found in earlier_samples(path).values()
        for s in found
    )


# The table in the terminal: every number in it is whole, and what has none has a reason.


def _cell(row: str, value: float | None, why: str = "", stands_in: str = "") -> CellResult:
    made = Cell(row=row, column="[x]", published=Published.read("94.8 ± 0.1%"), job=tiny.job())
    return CellResult(made, () if value is None else (_sample(0, value, "a", stands_in),), why, "a")


def test_numbers_and_reasons_are_shown() -> None:
    """Names are text, also where they look like markup or end a column."""
    shot, far = _cell("[red] |z|", 91.5), _cell("far", None, "not at hand")
    cells = (shot, far, _cell("own", 1.5, "", "mnist"))
    table = dataclasses.replace(tiny.table(), cells=tuple(one.cell for one in cells))
    result = Result(table, cells, False, "", {})
    lines = shown(result, 120)
    inside = [[p.strip() for p in line.split("│")[1:-1]] for line in lines if line[0] == "│"]
    assert inside[0] == ["[red] |z|, [x]", "94.8 ± 0.1%", "91.50"]
    assert "| [red] \\|z\\| | 91.50 / 94.8 ± 0.1% |" in markdown(result)
    for said in ("- not run: not at hand: far, [x].", "- stand-in data: mnist: own, [x]."):
        assert said in lines
        assert said in markdown(result)


@pytest.mark.parametrize("width", [40, 80])
def test_no_number_is_cut_in_any_table(width: int) -> None:
    """Three seeds in every second row. In a narrow terminal a number may be wrapped, not cut."""
    seeds = tuple(_sample(seed, 94.25 + seed) for seed in range(3))
    for experiment in EXPERIMENTS.values():
        kept = experiment.rows[::2]
        cells = tuple(CellResult(c, seeds if c.row in kept else ()) for c in experiment.cells)
        lines = shown(Result(experiment, cells, False, "epochs=10", {}), width)
        text = "\n".join(lines)
        assert max(map(len, lines)) <= width
        drawn = [line for line in lines if line and line[0] in "┃│"]
        assert {(len(line), line[-1]) for line in drawn} <= {(len(drawn[0]), end) for end in "┃│"}
        assert "…" not in text
        whole = "95.25 ± 1.00 (3)" if width == 80 else "95.25"
        assert text.count(whole) == sum(bool(c.samples) for c in cells)
