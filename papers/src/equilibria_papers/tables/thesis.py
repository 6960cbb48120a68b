"""The NTK thesis, chapter 4: Figures 4.1 to 4.5, on paths of solvers and loss landscapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import recipes
from .declaring import Cell, Experiment, Job
from .recipes import RATES, imagenet

_PAPER = "NTK thesis"
_PICTURE = "a picture, no number is printed; the numbers are ours"
_SMALL = {"channels": 16, "inner": 16, "image_size": 8}

STAGES = ("start", "after 1 epoch", "after a quarter", "after half", "at the end")
"""When the paths of Figure 4.3 are looked at."""


def _residual(
    data: str,
    tag: str,
    options: Mapping[str, Any],
    *,
    measures: tuple[str, ...],
    trained: bool = True,
    epochs: int = 50,
) -> Job:
    return Job(
        name=f"{data}-residual_deq-{tag}",
        model="residual_deq",
        options=dict(options),
        data=data,
        recipe={**recipes.THESIS, "epochs": epochs},
        measures=measures,
        trained=trained,
        rate=RATES["deq"],
        images=54_000 if data == "mnist" else 45_000,
        stand_in={"data": "digits"},
        smoke=dict(_SMALL),
    )


def _at_start(std: float) -> Job:
    return _residual("mnist", f"std-{std:g}", {"std": std}, measures=("paths",), trained=False)


_STARTS = (("N(0, 1)", 1.0), ("N(0, 0.01)", 0.01))

_FIGURE_1 = Experiment(
    id="thesis-figure4.1",
    paper=_PAPER,
    title="convergence of the solver for two initializations, MNIST",
    source=f"thesis, Figure 4.1: {_PICTURE}",
    claim="With weights from N(0, 1) the iterates do not settle; with N(0, 0.01) they are steady "
    "after the first step.",
    cells=tuple(
        Cell(row=row, column=column, job=_at_start(std), metric=metric)
        for row, std in _STARTS
        for column, metric in (
            ("residual after 5 steps", "path.residual.5"),
            ("residual after 20 steps", "path.residual.20"),
            ("residual after 50 steps", "path.residual.50"),
            ("samples below 1e-2, in %", "path.settled"),
        )
    ),
    notes=(
        "Anderson on Eq 4.1 with 48 channels, 256 test images; the residual is Eq 4.2, mean over "
        "samples. 0.01 is the standard deviation, as in the code that the block comes from.",
    ),
)

_FIGURE_2 = Experiment(
    id="thesis-figure4.2",
    paper=_PAPER,
    title="paths of the solver in the plane of two principal components, MNIST",
    source=f"thesis, Figure 4.2: {_PICTURE}",
    claim="Chaotic paths with N(0, 1); one leap and rest with N(0, 0.01).",
    cells=tuple(
        Cell(row=row, column=column, job=_at_start(std), metric=metric)
        for row, std in _STARTS
        for column, metric in (
            ("first step's share of the path, in %", "path.first_step"),
            ("variance in the plane, in %", "path.plane"),
        )
    ),
    notes=("256 test images, ten of them drawn; the plane is that of 32 paths.",),
)

_TRAINED = _residual(
    "mnist", "trained", {}, measures=("quality", "paths of training images"), epochs=40
)

_FIGURE_3 = Experiment(
    id="thesis-figure4.3",
    paper=_PAPER,
    title="how the paths of the solver change in training, MNIST",
    source=f"thesis, Figure 4.3: {_PICTURE}",
    claim="At the start one leap; after an epoch the classes lie apart; later the paths become "
    "more complex and orbit the fixed points.",
    cells=tuple(
        Cell(row=stage, column=column, job=_TRAINED, metric=f"stage.{stage}.{metric}")
        for stage in STAGES
        for column, metric in (
            ("first step's share of the path, in %", "first_step"),
            ("between-class share of the variance, in %", "separation"),
            ("steps to 1e-2", "steps"),
        )
    ),
    notes=(
        "Adam, rate 0.001, cosine, 40 epochs (§4.1.2); 54,000 training images, 6,000 held out. The "
        "paths are those of 256 training images. "
        "Anderson to 1e-2 in at most 50 steps, as the text has it (the caption: 1e-3 and 100).",
    ),
    picture="line",
)


def _landscape(row: str, repeats: int | None) -> list[Cell]:
    job = _residual(
        "cifar10",
        "landscape" if repeats is None else f"repeat-{repeats}",
        {} if repeats is None else {"repeats": repeats},
        measures=("quality", "landscape"),
    )
    return _landscape_cells(row, job, "landscape")


def _landscape_cells(row: str, job: Job, measured: str) -> list[Cell]:
    return [
        Cell(row=row, column=column, job=job, metric=metric)
        for column, metric in (
            ("accuracy in %", "accuracy"),
            ("loss at the minimizer", f"{measured}.center"),
            ("share of the plane within 1 of it, in %", f"{measured}.flat"),
            ("local minima on the grid", f"{measured}.minima"),
        )
    ]


_FIGURE_4 = Experiment(
    id="thesis-figure4.4",
    paper=_PAPER,
    title="loss landscapes of a DEQ and of weight-tied networks, CIFAR-10",
    source=f"thesis, Figure 4.4: {_PICTURE}",
    claim="The region of small loss grows with the number of repetitions.",
    cells=(
        *_landscape("DEQ", None),
        *_landscape("repeat-6", 6),
        *_landscape("repeat-11", 11),
        *_landscape("repeat-18", 18),
    ),
    notes=(
        "Adam, rate 0.001, cosine, batches of 100, 50 epochs (§4.2.1); filter-normalized "
        "directions, [-1, 1] by [-1, 1], 25 × 25, loss on 1,024 training images.",
    ),
)

_MDEQ = imagenet(
    "mdeq_cifar",
    "imagenet-100",
    tag="coarse",
    options={"downsample": 2},
    measures=("quality", "landscape of test images"),
)

_FIGURE_5 = Experiment(
    id="thesis-figure4.5",
    paper=_PAPER,
    title="loss landscape of an MDEQ, 1,024 images of ImageNet",
    source=f"thesis, Figure 4.5: {_PICTURE}",
    claim="One minimum: the landscape looks invex.",
    cells=tuple(_landscape_cells("MDEQ", _MDEQ, "test_landscape")),
    notes=(
        "The thesis took an MDEQ trained on ImageNet; ours has 10 M parameters and is trained on "
        "ImageNet-100, the network of GEQ Table 2. As there, the loss is that of the first 1,024 "
        "test images (ImageNet's own are sorted by class, 50 of each).",
    ),
)

EXPERIMENTS = (_FIGURE_1, _FIGURE_2, _FIGURE_3, _FIGURE_4, _FIGURE_5)
