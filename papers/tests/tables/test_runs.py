"""A tiny table from start to end: trained once, measured once, logged, taken up again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equilibria import training
from equilibria.training import Interrupted, Run, read_checkpoint
from equilibria_papers import tables
from equilibria_papers.tables import reproduce, runs
from equilibria_papers.tables.measures import MEASURES, Scene
from equilibria_papers.tables.provenance import read_log
from equilibria_papers.tables.runs import Stop, StopWhenAsked
from tests.training.small import SignalAt, config, run

from . import tiny


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often networks were trained and judged."""
    counts = {"fit": 0, "quality": 0}
    fit, quality = training.fit, MEASURES["quality"]

    def counting_fit(*arguments: Any, **options: Any) -> Any:
        counts["fit"] += 1
        return fit(*arguments, **options)

    def counting_quality(scene: Scene) -> dict[str, float]:
        counts["quality"] += 1
        return quality(scene)

    monkeypatch.setattr(training, "fit", counting_fit)
    monkeypatch.setattr(runs, "MEASURES", {**MEASURES, "quality": counting_quality})
    return counts


def test_trains_and_judges_once(
    tmp_path: Path, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reproduce(tiny.table(), tiny.choices(tmp_path))
    assert first.status == "measured"
    assert counted == {"fit": 1, "quality": 1}
    again = reproduce(tiny.table(), tiny.choices(tmp_path))
    assert counted == {"fit": 1, "quality": 1}
    assert [c.mean for c in again.cells] == [c.mean for c in first.cells]
    assert first.cells[0].mean is not None
    assert 10.0 < first.cells[0].mean <= 100.0
    # widths [4]: by hand 4·9 (stem) + BN 8 + two 3×3 of 4×4 (288) + BN 8 + head BN 8 + 50.
    assert first.cells[1].mean == pytest.approx((36 + 8 + 288 + 8 + 8 + 50) / 1000)
    # Another table takes the training and measures what is new.
    monkeypatch.setattr(runs, "MEASURES", {**runs.MEASURES, "new": lambda scene: {"answer": 42.0}})
    other = _second(tiny.job(measures=("quality", "new")), "answer")
    assert reproduce(other, tiny.choices(tmp_path)).cells[0].mean == 42.0
    assert counted == {"fit": 1, "quality": 1}


def _second(job: tables.Job, metric: str, **changes: Any) -> tables.Experiment:
    cell = tables.Cell(row="r", column="c", job=job, metric=metric)
    return dataclasses.replace(tiny.table(), id="other", cells=(cell,), **changes)


def test_several_tables_share_a_training_and_unite_what_they_measure(
    tmp_path: Path, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    new = {**runs.MEASURES, "new": lambda scene: {"answer": 42.0}}
    network = runs._network

    def counting(planned: Any, *rest: Any) -> Any:
        loaded.append(planned.job.name)
        return network(planned, *rest)

    monkeypatch.setattr(runs, "MEASURES", new)
    monkeypatch.setattr(runs, "_network", counting)
    # The same training by another name: one folder, one model.
    other = _second(tiny.job("alias", measures=("new",)), "answer")
    told: list[str] = []
    found = tables.reproduce_all([tiny.table(), other], tiny.choices(tmp_path), tell=told.append)
    assert [result.experiment.id for result in found] == ["tiny-table", "other"]
    assert [result.status for result in found] == ["measured", "measured"]
    assert found[1].cells[0].mean == 42.0
    assert counted == {"fit": 1, "quality": 1}
    assert loaded == ["tiny"]
    assert [text.split(":")[0] for text in told] == ["1/1 tiny, seed 0"]
    (line,) = read_log(tmp_path / "results")
    assert line["id"] == "tiny-table, other"
    assert line["result"]["answer"] == 42.0
    assert {path.name for path in (tmp_path / "results").glob("*.json")} == {
        "tiny-table.json",
        "other.json",
    }


def test_a_measure_that_fails_for_one_table_leaves_the_other_its_number(tmp_path: Path) -> None:
    bad = _second(tiny.job(measures=("quality", "no such measure")), "answer")
    found = tables.reproduce_all([tiny.table(), bad], tiny.choices(tmp_path))
    assert [result.status for result in found] == ["measured", "not run"]
    assert found[1].cells[0].why == "failed: KeyError: 'no such measure'"


def test_a_failure_is_logged_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(scene: Scene) -> dict[str, float]:
        raise RuntimeError("the measure broke")

    monkeypatch.setattr(runs, "MEASURES", {**MEASURES, "broken": broken})
    bad = tiny.job("bad", measures=("broken",), recipe={**tiny.RECIPE, "lr": 0.04})
    table = tiny.table()
    mixed = dataclasses.replace(
        table,
        cells=(tables.Cell(row="bad", column="accuracy in %", job=bad), *table.cells),
    )
    result = reproduce(mixed, tiny.choices(tmp_path))
    assert result.cells[0].why == "failed: RuntimeError: the measure broke"
    assert result.cells[1].mean is not None
    assert result.status == "partly"
    assert [line["outcome"] for line in read_log(tmp_path / "results")] == ["failed", "done"]
    with pytest.raises(RuntimeError, match="the measure broke"):
        reproduce(mixed, tiny.choices(tmp_path, smoke=True))


def test_a_limit_of_time_saves_and_the_next_call_goes_on(tmp_path: Path) -> None:
    whole = reproduce(tiny.table(), tiny.choices(tmp_path / "whole"))
    parts = tiny.choices(tmp_path / "parts", minutes=1e-9)
    for _ in range(2):  # a step or more each, then stopped
        with pytest.raises(KeyboardInterrupt):
            reproduce(tiny.table(), parts)
    outcomes = [line["outcome"] for line in read_log(tmp_path / "parts" / "results")]
    assert outcomes == ["interrupted", "interrupted"]
    result = reproduce(tiny.table(), tiny.choices(tmp_path / "parts"))
    # On one CPU an interrupted training repeats the uninterrupted one bit for bit.
    assert result.cells[0].mean == whole.cells[0].mean


def test_ctrl_c_as_a_training_ends_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Run.save

    def pressed(self: Run, *given: Any) -> None:
        if self.finished:
            signal.raise_signal(signal.SIGINT)
        save(self, *given)

    asked, told = tiny.choices(tmp_path, seeds=(0, 1)), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", pressed)
        with pytest.raises(KeyboardInterrupt, match="training is complete"):
            reproduce(tiny.table(), asked, tell=told.append)
    assert len(told) == 1  # the second seed is not begun
    (run,) = (tmp_path / "runs").iterdir()
    weights = run / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert runs.is_trained(run)
    assert reproduce(tiny.table(), asked).cells[0].mean is not None
    assert weights.stat().st_mtime_ns == made  # measured, not trained again
    outcomes = [line["outcome"] for line in read_log(tmp_path / "results")]
    assert outcomes == ["interrupted", "done", "done"]


def test_no_training_is_begun_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equilibria_papers.tables import reproduction

    begun: list[int] = []

    def instant(planned: Any, *_: Any, **__: Any) -> None:
        begun.append(planned.seed)
        quality = {"accuracy": 1.0, "parameters_k": 1.0}
        kept = {"measures": {"quality": quality}, "seconds": 0.0, "made_by": {}}
        planned.folder.mkdir(parents=True)
        (planned.folder / "measured.json").write_text(json.dumps(kept))

    monkeypatch.setattr(reproduction, "run_job", instant)
    with pytest.raises(KeyboardInterrupt, match="minutes are over"):
        reproduce(tiny.table(), tiny.choices(tmp_path, seeds=(0, 1), minutes=1e-9))
    assert begun == [0]
    kept = json.loads((tmp_path / "results" / "tiny-table.json").read_text())
    assert kept["cells"][0]["n"] == 1  # what was done is in the table


def test_seeds_are_averaged_over_calls_and_the_log_has_every_run(tmp_path: Path) -> None:
    faster = {"overrides": {"lr": 0.1}}
    reproduce(tiny.table(), tiny.choices(tmp_path, **faster))
    result = reproduce(tiny.table(), tiny.choices(tmp_path, seeds=(1,), **faster))
    assert [s.seed for s in result.cells[0].samples] == [0, 1]
    assert result.cells[0].std is not None
    assert result.seeds == (0, 1)
    lines = read_log(tmp_path / "results")
    assert [line["seed"] for line in lines] == [0, 1]
    for line in lines:
        assert (line["id"], line["job"], line["change"]) == ("tiny-table", "tiny", "lr=0.1")
        assert line["outcome"] == "done"
        assert line["result"]["accuracy"] > 0
        assert line["seconds"] > 0
        assert {"commit", "device", "command", "date", "key"} <= set(line)
    kept = json.loads((tmp_path / "results" / "tiny-table--lr=0.1.json").read_text())
    assert (kept["status"], kept["change"]) == ("measured", "lr=0.1")


def test_missing_data_leave_a_row_out(tmp_path: Path) -> None:
    table = tiny.table(data="nowhere")
    told: list[str] = []
    result = reproduce(table, tiny.choices(tmp_path, data_root=tmp_path), tell=told.append)
    assert result.status == "not run"
    assert result.cells[0].why == "nowhere is not at hand"
    assert told == ["1/1 tiny, seed 0: left out, nowhere is not at hand"]


def test_stand_in_is_said(tmp_path: Path) -> None:
    table = tiny.table(data="nowhere", stand_in={"data": "digits", "epochs": 1})
    result = reproduce(table, tiny.choices(tmp_path, data_root=tmp_path, stand_in=True))
    assert result.status == "stand-in data"
    assert "stand-in data: digits" in tables.markdown(result)


def test_listing_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from equilibria_papers.tables import reproduction as standing

    out = tmp_path / "results"
    monkeypatch.setattr(standing, "EXPERIMENTS", {"tiny-table": tiny.table()})

    def state() -> tuple[str, int]:
        (found,) = tables.listing(out, None)
        return found.status, len(found.longest)

    assert state() == ("not run", 0)
    reproduce(tiny.table(), tiny.choices(tmp_path, smoke=True, overrides={"epochs": 1}))
    assert state() == ("smoke only", 0)
    reproduce(tiny.table(), tiny.choices(tmp_path, smoke=True))
    assert state() == ("smoke only", 0)
    assert not read_log(out)  # a smoke test is no line of the log
    assert {line["smoke"] for line in read_log(out / "smoke")} == {True}
    reproduce(tiny.table(), tiny.choices(tmp_path, overrides={"epochs": 1}))
    assert state() == ("measured (epochs=1)", 2)
    reproduce(tiny.table(), tiny.choices(tmp_path))
    assert state() == ("measured; measured (epochs=1)", 2)
    earlier = tiny.table(recipe={**tiny.RECIPE, "lr": 0.01})  # what was measured is of another one
    monkeypatch.setattr(standing, "EXPERIMENTS", {"tiny-table": earlier})
    assert state()[0].startswith("partly")


def test_gathering_trains_nothing_and_takes_a_part(tmp_path: Path, counted: dict[str, int]) -> None:
    """Another machine measured the quality and not the rest: the table has what there is."""
    reproduce(tiny.table(), tiny.choices(tmp_path))
    before = dict(counted)
    job = tiny.job(measures=("quality", "new"))
    cells = (
        tables.Cell(row="r", column="accuracy", job=job),
        tables.Cell(row="r", column="answer", job=job, metric="answer"),
        tables.Cell(row="s", column="accuracy", job=tiny.job("else", options={"depth": 2})),
    )
    other = dataclasses.replace(tiny.table(), id="other", cells=cells)
    found = reproduce(other, tiny.choices(tmp_path, gather=True))
    assert [cell.status for cell in found.cells] == ["measured", "not run", "not run"]
    assert found.status == "partly"
    assert counted == before
    assert len(read_log(tmp_path / "results")) == 1


def test_a_smoke_test_of_one_recipe_is_none_of_another(tmp_path: Path) -> None:
    reproduce(tiny.table(), tiny.choices(tmp_path, smoke=True))
    other = tiny.choices(tmp_path, smoke=True, gather=True, overrides={"lr": 0.07})
    assert reproduce(tiny.table(), other).status == "not run"


@pytest.mark.parametrize(
    ("graphs", "overrides", "device", "expected"),
    [
        (True, {}, "cuda", True),
        (True, {}, "cpu", False),
        (True, {"compile": True}, "cuda", False),
        (True, {"cuda_graphs": False}, "cuda", False),
        (True, {"jacobian_weight": 0.1}, "cuda", False),
        (False, {}, "cuda", False),
    ],
)
def test_graphs_where_they_fit(
    tmp_path: Path, graphs: bool, overrides: dict[str, Any], device: str, expected: bool
) -> None:
    asked = tiny.choices(tmp_path, device=device, overrides=overrides)
    (one,) = tables.plan([tiny.table(graphs=graphs).cells[0]], asked)
    assert runs._made_fast(one, asked).cuda_graphs is expected


def test_a_number_that_is_none_costs_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"nan": math.nan, "inf": math.inf}
    monkeypatch.setattr(runs, "MEASURES", {**MEASURES, "odd": lambda scene: numbers})
    job = tiny.job(measures=("quality", "odd"))
    metrics = (*numbers, "accuracy")
    cells = tuple(tables.Cell(row="r", column=m, job=job, metric=m) for m in metrics)
    odd = dataclasses.replace(tiny.table(), id="odd", cells=cells)
    for _ in range(2):  # the second reads the files
        found = [cell.values[0] for cell in reproduce(odd, tiny.choices(tmp_path)).cells]
        assert not any(map(math.isfinite, found[:2]))
        assert found[2] > 0


def test_a_damaged_file_of_numbers_is_measured_anew(
    tmp_path: Path, counted: dict[str, int]
) -> None:
    reproduce(tiny.table(), tiny.choices(tmp_path))
    (kept,) = (tmp_path / "runs").glob("*/measured.json")
    kept.write_text(kept.read_text()[:40])
    found = reproduce(tiny.table(), tiny.choices(tmp_path, gather=True, out=tmp_path / "other"))
    assert found.status == "not run"
    assert found.cells[0].why == "no run folder has it"
    assert reproduce(tiny.table(), tiny.choices(tmp_path)).status == "measured"
    assert counted == {"fit": 1, "quality": 2}


def test_gathering_takes_the_papers_data_before_what_stands_in(tmp_path: Path) -> None:
    """The data are not on this machine; the run on them is."""
    job = tiny.job("cifar100-tiny", data="cifar100", stand_in={"data": "digits"})
    table = dataclasses.replace(
        tiny.table(), cells=(tables.Cell(row="r", column="accuracy", job=job),)
    )
    asked = tiny.choices(tmp_path, gather=True, stand_in=True, data_root=tmp_path / "nothing")
    assert tables.plan(table.cells, asked)[0].stands_in == "digits"
    (real,) = tables.plan(table.cells, tiny.choices(tmp_path, gather=True))
    real.folder.mkdir(parents=True)
    kept = {"measures": {"quality": {"accuracy": 77.0}}, "seconds": 1.0, "made_by": {}}
    (real.folder / "measured.json").write_text(json.dumps(kept))
    (cell,) = reproduce(table, asked).cells
    assert (cell.status, cell.values) == ("measured", [77.0])


@pytest.mark.slow
def test_figure_4_3_has_the_weights_of_its_epochs(tmp_path: Path) -> None:
    choices = tiny.choices(tmp_path, smoke=True)
    (planned,) = tables.plan(tables.describe("thesis-figure4.3").cells, choices)
    found = runs.run_job(planned, choices, runs.Log(tmp_path, "thesis-figure4.3", ""))
    kept = sorted(path.name for path in (planned.folder / "epochs").iterdir())
    assert kept == [f"epoch_{epoch:04d}.safetensors" for epoch in range(planned.config.epochs + 1)]
    assert found.values["stage.at the end.steps"] >= 1
    assert (planned.folder / "training_paths.png").exists()


# Callbacks: a limit of time, and copies of the weights on the way.


def _progress(folder: Path) -> dict[str, float]:
    found: dict[str, float] = read_checkpoint(folder / "last.ckpt")["equilibria"]["progress"]
    return found


def test_it_stops_after_a_step_without_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", sent.append)
    with pytest.raises(Interrupted, match="Go on with"):
        run(config(tmp_path), callbacks=[StopWhenAsked(Stop(time.time()))])
    assert _progress(tmp_path).items() >= {"epoch": 0, "batch": 1, "step": 1}.items()
    assert not sent


def test_outside_the_main_thread_it_stops_the_training_and_nothing_else(tmp_path: Path) -> None:
    caught: list[Any] = []
    reached: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: reached.append(number))

    def work() -> None:
        try:
            caught.append(run(config(tmp_path), callbacks=[StopWhenAsked(Stop(time.time()))]))
        except Interrupted as stopped:
            caught.append(stopped)

    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(caught[0], Interrupted)
    assert _progress(tmp_path)["step"] == 1
    assert reached == []


def test_ctrl_c_in_the_same_step_does_not_cut_it(tmp_path: Path) -> None:
    """The limit is no second Ctrl-C, nor is a Ctrl-C after it."""
    late = StopWhenAsked(Stop(time.time()))
    for folder, own in (("a", [SignalAt(1), late]), ("b", [late, SignalAt(1)])):
        with pytest.raises(Interrupted) as caught:
            run(config(tmp_path / folder), callbacks=own)
        assert caught.value.exact
        assert _progress(tmp_path / folder)["step"] == 1


def test_a_file_or_a_parent_that_is_gone_ask_too(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    assert not Stop(file=file, parent=os.getppid()).asked()
    assert Stop(parent=1_000_000_000).asked()
    file.touch()
    assert Stop(file=file).asked()


def test_a_trainer_of_somebody_else_is_refused() -> None:
    other: Any = SimpleNamespace(callbacks=[])
    with pytest.raises(RuntimeError, match=r"equilibria\.training\.fit"):
        StopWhenAsked(Stop(0.0)).on_train_batch_end(other)
