"""Names of trainings: what changes them, and what does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria import models
from equilibria_papers.tables import Cell, Choices, cells_asked, describe, plan
from equilibria_papers.tables.plan import Planned, plan_of

from . import tiny


def _one(**changes: Any) -> Planned:
    given = {
        k: changes.pop(k) for k in ("recipe", "options", "classes", "measures") if k in changes
    }
    return plan_of(tiny.job(**given), Choices(**changes))[0]


def test_where_it_runs_does_not_change_what_it_is(tmp_path: Path) -> None:
    here = _one()
    there = _one(
        runs=tmp_path, out=tmp_path, device="cuda:1", minutes=3.0, progress=False, parallel=8
    )
    assert (here.key, here.group) == (there.key, there.group)
    assert here.key == _one(overrides={"compile": True}).key == _one(measures=("features",)).key
    assert there.folder == tmp_path / f"tiny-{here.key}"
    assert there.config.accelerator == "cuda"
    assert there.config.devices == (1,)


@pytest.mark.parametrize(
    "change",
    [
        {"overrides": {"lr": 0.01}},
        {"overrides": {"epochs": 3}},
        {"smoke": True},
        {"classes": "first half"},
        {"options": {"widths": [8], "depth": 1}},
        {"recipe": {**tiny.RECIPE, "batch_size": 32}},
    ],
)
def test_what_matters_changes_the_name(change: dict[str, Any]) -> None:
    assert _one(**change).key != _one().key
    assert _one(**change).group != _one().group


def test_seeds_share_a_group() -> None:
    first, second = plan_of(tiny.job(), Choices(seeds=(0, 1)))
    assert first.group == second.group
    assert first.key != second.key
    assert (first.config.seed, second.config.seed) == (0, 1)


def test_a_job_of_several_cells_is_one_training_with_all_measures() -> None:
    figure, tables = describe("geq-figure2"), describe("geq-table1")
    found = plan((*figure.cells, *tables.cells), Choices())
    one = [p for p in found if p.job.name == "cifar10-geq_cifar_8m"]
    assert len(one) == 1
    assert set(one[0].job.measures) == {"quality", "corruptions", "certificate"}


def test_equal_trainings_are_one_whatever_they_are_called() -> None:
    jobs = [tiny.job("a"), tiny.job("b", measures=("features", "quality")), tiny.job("a", data="x")]
    cells = [Cell(row=str(k), column="c", job=job) for k, job in enumerate(jobs)]
    first, second = plan(cells, Choices(seeds=(3,), stand_in=True))
    assert (first.job.name, first.job.measures) == ("a", ("quality", "features"))
    assert (second.job.data, second.missing) == ("x", "x")  # the same name is not the same training


def test_a_table_that_is_stopped_has_every_row() -> None:
    cells = describe("geq-table1").cells
    found = [one.seed for one in plan(cells, Choices(seeds=(2, 0)))]
    assert found == [2] * (len(found) // 2) + [0] * (len(found) // 2)


def test_cells_of_several_tables() -> None:
    one, two = describe("geq-table1"), describe("kerdeq-table1")
    both = cells_asked([one, two])
    assert [(e.id, len(c)) for e, c in both] == [(e.id, len(e.cells)) for e in (one, two)]
    ((found, cells),) = cells_asked([one, two], ("GEQ 5M",))
    assert found is one
    assert {cell.row for cell in cells} == {"GEQ 5M"}
    assert len(plan(cells, Choices())) == 2
    with pytest.raises(ValueError, match="none of these tables has a row 'GEQ 9M'"):
        cells_asked([one, two], ("GEQ 5M", "GEQ 9M"))
    with pytest.raises(ValueError, match="none of them twice"):
        cells_asked([one, one])
    with pytest.raises(ValueError, match="at least one"):
        cells_asked([])


def test_milestones_move_with_the_epochs() -> None:
    def milestones(**overrides: Any) -> tuple[int, ...]:
        cells = describe("opteq-table8").cells
        return plan(cells, Choices(overrides=overrides))[0].config.milestones

    assert milestones() == (30, 60, 90, 120, 150, 180)
    assert milestones(epochs=20) == (3, 6, 9, 12, 15, 18)
    assert milestones(schedule="onecycle") == ()
    assert milestones(epochs=20, milestones=[7]) == (7,)


def test_the_recipe_as_printed_takes_steps_and_random_augmentation() -> None:
    """GEQ A.7.1; the length is ours, so that both recipes are compared at one length."""
    cells = describe("geq-table1").cells_of(("GEQ 8M",))
    asked = {"epochs": 80, "validation": 0.0}
    ours, printed = (
        plan(cells, Choices(recipe=name, overrides=asked))[0] for name in ("ours", "printed")
    )
    found = printed.config
    assert (found.schedule, found.milestones, found.epochs) == ("step", (40, 60), 80)
    assert list(found.augment) == ["crop", "flip", "rand_augment"]
    assert found.label_smoothing == 0.0
    assert ours.key != printed.key
    choices = Choices(recipe="printed", overrides=asked)
    assert choices.change == "recipe=printed, epochs=80, validation=0"
    with pytest.raises(ValueError, match="these tables have one recipe"):
        plan(describe("opteq-table3").cells, Choices(recipe="printed"))
    with pytest.raises(ValueError, match="expected one of ours, randaugment, printed"):
        Choices(recipe="paper")


def test_the_recipe_with_randaugment_is_ours_but_for_augmentation_length_and_images() -> None:
    cells = describe("geq-table1").cells_of(("GEQ 8M",))
    ours, other = (plan(cells, Choices(recipe=name))[0] for name in ("ours", "randaugment"))
    changed = set(other.config.differences(ours.config)) - {"out"}
    assert changed == {"augment", "epochs", "validation"}
    assert list(other.config.augment)[:3] == ["crop", "flip", "rand_augment"]
    assert (other.config.epochs, other.config.validation) == (120, 0.0)


@pytest.mark.parametrize("recipe", ["ours", "randaugment", "printed"])
def test_a_row_of_a_study_is_what_it_says_by_every_recipe(recipe: str) -> None:
    """Its own change counts, and images are held out for its column of them."""
    said = {
        "rate 0.4": ("lr", 0.4),
        "no label smoothing (0.1)": ("label_smoothing", 0.0),
        "cutmix for cutout": ("augment", ("crop", "flip", "cutmix")),
        "GEQ stack 3M": ("validation", 0.1),
    }
    for row, (option, value) in said.items():
        (one,) = plan(describe("ours-stack").cells_of((row,)), Choices(recipe=recipe))
        assert getattr(one.config, option) == value, row
        assert one.config.validation == 0.1


@settings(deadline=None, max_examples=20)
@given(epochs=st.integers(1, 400))
def test_any_number_of_epochs_can_be_asked_for(epochs: int) -> None:
    job = describe("opteq-table8").jobs[0]
    found = plan_of(job, Choices(overrides={"epochs": epochs}, smoke=False))[0].config
    assert found.epochs == epochs
    assert all(1 <= m < epochs for m in found.milestones)


def test_a_row_judged_by_held_out_images_is_not_trained_without() -> None:
    """Hours of training would end in an error of the measure."""
    with pytest.raises(ValueError, match=r"validation=0: .*held out; .*leave it out"):
        plan(describe("ours-kernels").cells, Choices(overrides={"validation": 0}))


def test_missing_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "cache"))
    job = describe("opteq-table10").jobs[0]
    assert plan_of(job, Choices(data_root=tmp_path))[0].missing == "cityscapes"
    asked = plan_of(job, Choices(data_root=tmp_path, stand_in=True))[0]
    assert (asked.stands_in, asked.missing) == ("camvid", "cityscapes")  # neither is there


def test_recipes_are_those_of_the_papers_where_it_matters() -> None:
    for job in describe("opteq-table10").jobs:  # §7.5: 40,000 steps of 8 images
        for images, epochs in ((2975 * 0.9, job.recipe["epochs"]), (367, job.stand_in["epochs"])):
            assert int(images / 8) * epochs == pytest.approx(40_000, rel=0.01)
        assert job.recipe["schedule"] == "poly"
    for one in plan(describe("kerdeq-table3").cells, Choices()):
        assert one.config.label_smoothing == 0.0  # it would change the divergence


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"seeds": ()}, "at least one"),
        ({"seeds": (1, 1)}, "none of them twice"),
        ({"seeds": (-1,)}, "whole numbers"),
        ({"minutes": 0.0}, "out of range"),
        ({"parallel": 0}, "out of range"),
        ({"parallel": 1.5}, "expected an integer"),
        ({"overrides": {"model": "x"}}, "the table decides"),
        ({"overrides": {"lrr": 1}}, "Did you mean 'lr'"),
        ({"overrides": {"epochs": 0}}, r"epochs=0\) is out of range"),
        ({"overrides": {"epochs": 1.5}}, r"epochs=1.5\): expected an integer"),
        ({"gather": True, "minutes": 9.0}, r"gather=True, .*minutes=9.0.*leave them out"),
        ({"gather": True, "parallel": 4}, r"gather=True, .*parallel=4.*leave them out"),
    ],
)
def test_choices_are_checked(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        Choices(**wrong)


def test_what_stands_in_is_the_training_of_the_tables_on_those_data(tmp_path: Path) -> None:
    """CIFAR-10 for CIFAR-100: one folder, whichever table asked for it."""
    named = tiny.job("cifar100-tiny", data="cifar100", stand_in={"data": "digits"})
    (found,) = plan_of(named, tiny.choices(tmp_path, stand_in=True))
    assert found.stands_in == "digits"
    assert found.folder.name == f"digits-tiny-{found.key}"


def _as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of models in their first revision, by which the published runs are named."""
    known = models.describe
    monkeypatch.setattr(
        models, "describe", lambda name: dataclasses.replace(known(name), revision=0)
    )


def test_keys_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published results are found by these. An option that TrainConfig gains goes to _NEWER."""
    _as_published(monkeypatch)
    cell = next(c for c in describe("geq-table1").cells if c.row == "GEQ stack 5M (ours)")
    assert [one.key for one in plan([cell], Choices())] == ["970f00be4c"]
    (few,) = plan([cell], Choices(overrides={"samples": 100}))
    assert few.key != "970f00be4c"


def test_a_model_with_new_defaults_is_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration does not spell defaults out, so that the revision has to be in the key."""
    cells = [
        next(c for c in describe("geq-table1").cells if c.row == "GEQ stack 5M (ours)"),
        next(c for c in describe("ours-ablation").cells if "linear" in c.row),
    ]
    now = [plan([cell], Choices(overrides={"epochs": 10}))[0].key for cell in cells]
    _as_published(monkeypatch)
    then = [plan([cell], Choices(overrides={"epochs": 10}))[0].key for cell in cells]
    assert then[1] == "a3c9bd2792"  # four steps of the certificate's size
    assert not set(now) & set(then)


@pytest.mark.parametrize("name", ["ours-ablation", "ours-kernels"])
def test_rows_that_say_a_number_of_steps_take_it(name: str) -> None:
    numbers = {"one step": 1, "two steps": 2, "four steps": 4, "eight steps": 8}
    found = {}
    for cell in describe(name).cells:
        for words, steps in numbers.items():
            if words in cell.row and cell.job is not None:
                tiny = {k: v for k, v in cell.job.smoke.items() if k != "image_size"}
                model = models.create(cell.job.model, 10, **{**cell.job.options, **tiny})
                solver = next(m.solver for m in model.modules() if hasattr(m, "solver"))
                found[cell.row] = (solver.max_steps, steps)
    assert len(found) == (4 if name == "ours-ablation" else 8)
    assert all(taken == said for taken, said in found.values()), found


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ("ours-kernels", ("stack, linear, equal", "stack, Gaussian, equal")),
        ("ours-kernels", ("chain, linear, equal", "chain, Gaussian, equal")),
        ("geq-table5", ("MOptEqs (Polynomial)", "MOptEqs (Sigmoid)")),
    ],
)
def test_rows_that_say_equal_differ_in_the_kernel_alone(table: str, rows: tuple[str, ...]) -> None:
    """Steps, gradient, bound, biases and, within 1%, size."""
    found, sizes = [], []
    for row in rows:
        job = next(cell.job for cell in describe(table).cells if cell.row == row)
        assert job is not None
        model = models.create(job.model, **job.options)
        layers = [m for m in model.modules() if hasattr(m, "solver")]
        found.append([(m.solver, m.adjoint, m.constraint, m.U.bias is None) for m in layers])
        sizes.append(models.count_parameters(model))
    assert found[0] == found[1]
    assert len(found[0]) == 6
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    taken = found[0][0][0]
    assert (type(taken).__name__, taken.tau, taken.rtol) == ("ProximalGradient", 1.0, 0.0)


@pytest.mark.parametrize(("size", "name"), [("5M", "5m"), ("8M", "8m")])
def test_rows_that_say_norm_after_train_it(
    size: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their folders were those of the runs in results/cifar10_geq_stack_*_after."""
    _as_published(monkeypatch)
    cells = describe("geq-table1").cells_of((f"GEQ stack {size}, norm after (ours)",))
    jobs = [cell.job for cell in cells if cell.job is not None]
    assert len(jobs) == 6
    assert {(job.model, str(job.options)) for job in jobs} == {
        (f"geq_stack_cifar_{name}", "{'norm': 'after'}")
    }
    changed = {"epochs": 100, "validation": 0.0} if size == "8M" else {}
    keys = {"5M": "a15a962ee1", "8M": "ccb6cb8c7a"}
    planned = plan(cells, Choices(overrides=changed))
    assert keys[size] in {one.key for one in planned if one.job.data == "cifar10"}


def test_one_training_has_one_word_for_its_change() -> None:
    """0 and 0.0 have one key, so they name one table."""
    words = [Choices(overrides={"validation": v, "lr": 1e-05}).change for v in (0, 0.0)]
    assert words == ["lr=1e-05, validation=0"] * 2
    assert Choices(overrides={"lr": 0.1234567891}).change == "lr=0.1234567891"
    assert Choices(overrides={"lr": "1e-3", "precision": "32"}).change == "lr=0.001, precision=32"
    machine = {"compile": True, "cuda_graphs": False}  # no change of the recipe
    assert Choices(overrides={**machine, "lr": 0.1}).change == "lr=0.1"
