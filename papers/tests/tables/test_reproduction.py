"""The declared tables against the papers: numbers typed here by hand from their text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equilibria import data, models
from equilibria.models.registry import find
from equilibria_papers.tables import Choices, Experiment, Job, describe, names, plan
from equilibria_papers.tables.measures import MEASURES
from equilibria_papers.tables.reproduction import EXPERIMENTS
from equilibria_papers.tables.thesis import NETWORKS

IDS = (
    *("geq-table1", "geq-table2", "geq-table3", "geq-table5"),
    *("geq-figure2", "geq-figure3", "geq-figure4"),
    *("kerdeq-table1", "kerdeq-table2", "kerdeq-table3"),
    *("kerdeq-figure2", "kerdeq-figure3", "kerdeq-figure4"),
    *("opteq-table3", "opteq-table4", "opteq-table5", "opteq-table7", "opteq-table8"),
    *("opteq-table9", "opteq-table10"),
    *("thesis-figure4.1", "thesis-figure4.2", "thesis-figure4.3", "thesis-figure4.4"),
    "thesis-figure4.5",
    *("ours-ablation", "ours-kernels", "ours-stack"),
)

# The numbers of the papers, a row after another, each from left to right. Table 5 of OptEq has a
# row for each column of the paper.
PRINTED = {
    "geq-table1": """
        10 93.5 10 74.5 | 23 95.2 23 77.9 | 10 94.2 10 74.7 | 8 94.6 8 75.6 | 5 94.8 5 76.4 |
        8 95.6 8 78.2
    """,
    "geq-table2": """
        11 92.3 11 80.9 | 23 93 23 81.7 | 10 91.5 10 81.3 | 10 92.4 13 81.5 | 6 92.9 6 82.2 |
        13 93.2 13 83.9
    """,
    "geq-table3": "80.1 77.4 | 80.9 80.1",
    "geq-table5": "8 75.6 | 8 75.1 | 8 76.1 | 8 78.2",
    "kerdeq-table1": """
        10 93.5 10 74.5 | 10 94.2 10 74.7 | 8 94.6 8 75.6 | 5 94.7 5 76.5 | 8 95.3 8 77.8
    """,
    "kerdeq-table2": """
        12 92.3 11 80.9 | 23 81.7 | 10 91.5 10 81.3 | 10 92.4 13 81.5 | 6 92.9 6 82.2 |
        13 93.2 13 83.9
    """,
    "kerdeq-table3": "90.56 0.38 1.51 | 92.42 0.306 1.21",
    "opteq-table3": """
        58.4 56.8 86.9 87.4 87.2 | 72.7 61.5 86.5 87 87.7 | 72.6 60 88 87.6 87.5 | 82.7 |
        5 86.4 | 0.81 87.7 | 0.34 86.9 | 10 87.3 | 1.56 87.6 | 0.82 86.7
    """,
    "opteq-table4": """
        1.4 91 | 162 86 | 162 87.4 | 162 85.7 | 172 53.7 | 172 60.6 | 172 74.1 | 854 82.5
    """,
    "opteq-table5": """
        58.4 56.8 86.9 87.4 87.2 | 69.4 61.9 87.3 87.3 87.4 | 75 63.2 78.4 87.3 87 |
        64.9 64.7 87.7 87.5 87.6 | 72.7 61.5 86.5 87 87.7 | 72.6 60 88 87.6 87.5 |
        70.6 66.1 85.1 87.6 88.1 | 72.2 64.5 85.5 87.5 87.9
    """,
    "opteq-table7": """
        70.2 89.9 13 | 74.8 91.1 21 | 74.8 92.2 12 | 75.1 92.5 26 | 71.2 89.5 11 |
        76.8 93.4 21 | 72.9 91 18 | 75.5 92.7 18 | 76.7 93.1 18 | 76.9 93.1 18 |
        77.1 93.5 52 | 78.1 93.9 69 | 73.4 90.9 27 | 77.5 93.6 63 | 75.9 93 63 | 78.3 94 40
    """,
    "opteq-table8": """
        83.52 1.3 1.8 0.0122 | 87.28 2.2 3.3 0.00488 | 87.71 3.9 6.4 0.000481 |
        87.83 7.5 12.7 1.2e-05 | 87.63 16.3 6.7 0.000733 | 85.95 15.6 1.3 0.00952
    """,
    "opteq-table9": "4597 | 257 | 1057 | 1835 | 200 | 1137",
    "opteq-table10": "71.47 79.23 95.56 | 74.47 81.91 95.93",
}
# ± of the accuracies, for the tables that print them.
SPREADS = {
    "geq-table1": "0.2 0.2 | 0.2 0.1 | 0.3 0.3 | 0.2 0.2 | 0.1 0.3 | 0.2 0.2",
    "geq-table2": "0.1 0.3 | 0.2 0.2 | 0.2 0.2 | 0.2 0.4 | 0.2 0.2 | 0.1 0.3",
    "geq-table3": "0.3 0.5 | 0.2 0.6",
    "geq-table5": "0.2 | 0.4 | 0.3 | 0.2",
    "kerdeq-table1": "0.2 0.2 | 0.3 0.3 | 0.2 0.2 | 0.1 0.3 | 0.2 0.2",
    "kerdeq-table2": "0.1 | 0.2 | 0.2 | 0.2 | 0.1",
}


def _typed(text: str) -> list[list[float]]:
    return [[float(number) for number in row.split()] for row in text.split("|")]


def _printed(experiment: Experiment) -> list[list[float]]:
    found = []
    for row in experiment.rows:
        cells = [c for c in experiment.cells if c.row == row and c.published is not None]
        if cells:
            found.append([c.published.value for c in cells if c.published is not None])
    return found


def test_every_id_is_there() -> None:
    assert tuple(names()) == IDS
    assert all(describe(name).id == name for name in names())


@pytest.mark.parametrize("name", PRINTED)
def test_published_numbers_are_the_papers(name: str) -> None:
    found, typed = _printed(describe(name)), _typed(PRINTED[name])
    if name in ("geq-table1", "opteq-table8"):
        assert found == typed
    # Rows of two data sets in one table: the order of the first, then what the second adds.
    assert sorted(found) == sorted(typed)


@pytest.mark.parametrize("name", SPREADS)
def test_published_spreads_are_the_papers(name: str) -> None:
    experiment = describe(name)
    found = []
    for row in experiment.rows:
        cells = [c.published for c in experiment.cells if c.row == row and c.published is not None]
        spreads = [p.spread for p in cells if p.spread is not None]
        if spreads:
            found.append(spreads)
    assert found == _typed(SPREADS[name])


@pytest.mark.parametrize("name", [n for n in IDS if n not in PRINTED])
def test_pictures_have_no_printed_number(name: str) -> None:
    experiment = describe(name)
    assert "no number is printed" in experiment.source
    assert not _printed(experiment)


def test_an_unknown_id_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean geq-table1"):
        describe("geq-tabel1")


def _jobs() -> list[Job]:
    return [job for experiment in EXPERIMENTS.values() for job in experiment.jobs]


def test_a_name_stands_for_one_training() -> None:
    seen: dict[str, tuple[object, ...]] = {}
    for job in _jobs():
        settings = (job.model, dict(job.options), job.data, dict(job.recipe), job.classes)
        assert seen.setdefault(job.name, settings) == settings, job.name


@pytest.mark.parametrize("name", IDS)
def test_jobs_are_made_of_what_there_is(name: str) -> None:
    for job in describe(name).jobs:
        assert set(job.measures) <= set(MEASURES)
        assert job.minutes > 0
        for options in (job.options, {**job.options, **job.smoke}):
            given = {k: v for k, v in options.items() if k != "image_size"}
            if job.model not in NETWORKS:
                find(job.model).parse(given)


@pytest.mark.parametrize("smoke", [False, True])
def test_every_job_has_a_configuration(tmp_path: Path, smoke: bool) -> None:
    """And equal trainings have one name: they would be trained once and listed twice."""
    keys: dict[str, str] = {}
    for experiment in EXPERIMENTS.values():
        for one in plan(experiment.cells, Choices(smoke=smoke, data_root=tmp_path)):
            assert one.config.seed == 0
            assert one.folder.parent == Path("runs/reproduce")
            assert (one.config.data == "digits") == (smoke or one.job.data == "digits")
            assert smoke or keys.setdefault(one.key, one.job.name) == one.job.name


def test_hours_are_of_the_images_that_are_trained_on() -> None:
    """Without those held out and, in GEQ Table 3 and KerDEQ Table 3, without unseen classes."""
    learned = {"all": 1.0, "superclass": 4 / 5, "first half": 1 / 2}
    for job in _jobs():
        if job.trained and job.data in data.names():
            whole = data.describe(job.data).counts["train"]
            images = whole * (1 - job.recipe["validation"]) * learned[job.classes]
            assert job.images == pytest.approx(images, rel=0.01), job.name


def test_rates_at_224_pixels_are_near_those_measured() -> None:
    """Table 9 of OptEq, alone on an H200."""
    file = Path(__file__).parents[3] / "results/reproduce/opteq-table9.json"
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    found = {cell["row"]: cell["mean"] for cell in cells}
    jobs = {job.name: job for job in _jobs()}
    resnet, mdeq = jobs["imagenet-resnet50_imagenet"], jobs["imagenet-100-mdeq_cifar-coarse"]
    assert resnet.rate == pytest.approx(found["ResNet-50"], rel=0.01)
    assert 0.75 * found["MDEQ"] < mdeq.rate < found["MDEQ"]  # of 256 pixels


def test_cifar_holds_out_five_thousand() -> None:
    for job in _jobs():
        if job.data in ("cifar10", "cifar100") and job.classes == "all":
            assert round(50_000 * job.recipe["validation"]) == 5_000


@pytest.mark.slow
def test_sizes_of_ours_fit_the_printed_ones() -> None:
    """The networks that we made to fit a printed size: 10 M, 854 k, and the DNN of 199 k."""
    count = models.count_parameters
    jobs = {job.name: job for job in _jobs()}

    def size(name: str, classes: int) -> int:
        job = jobs[name]
        return count(models.create(job.model, classes, **job.options))

    assert size("imagenette-mopteq_imagenet_13m-10m", 10) == pytest.approx(10e6, rel=0.02)
    assert size("cifar10-mondeq_single-large", 10) == pytest.approx(854e3, rel=0.01)
    assert size("cifar10-explicit_stack_cifar_3m-203k", 10) == pytest.approx(199e3, rel=0.03)
