"""OptEq (optimization induced equilibrium networks): Tables 7, 9, 10, on large images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import recipes
from .declaring import Cell, Experiment, Job
from .jobs import family
from .opteq import unrolling
from .published import Published
from .recipes import RATES

__all__ = ["EXPERIMENTS"]

_PAPER = "OptEq"
_DECORRELATION = {"kind": "Decorrelation", "weight": 0.01, "features": "channels"}
_QUOTED = "this network is not in the table of models"


def _imagenet(model: str, tag: str = "", options: Mapping[str, Any] | None = None) -> Job:
    return Job(
        name=f"imagenet-{model}{'-' if tag else ''}{tag}",
        model=model,
        options=dict(options or {}),
        data="imagenet",
        recipe=recipes.OPTEQ_IMAGENET,
        rate=RATES["imagenet"],
        images=1_255_000,
        stand_in={"data": "cifar10", "image_size": 64, "epochs": 20, "batch_size": 256},
        smoke=dict(family(model)[1]),
    )


_SMALL = {**unrolling(5), "regularizer": _DECORRELATION, "regularize": "gradient"}
_LEARNED = {**_SMALL, "learn_alpha": True, "alpha": 0.8}

_ROWS: tuple[tuple[str, str, str, str, Job | None], ...] = (
    ("ResNet-18", "70.2%", "89.9%", "13 M", _imagenet("resnet18_imagenet")),
    ("ResNet-34", "74.8%", "91.1%", "21 M", None),
    ("Inception-V2", "74.8%", "92.2%", "12 M", None),
    ("ResNet-50", "75.1%", "92.5%", "26 M", _imagenet("resnet50_imagenet")),
    ("Res-Extr. + Cls.", "71.2%", "89.5%", "11 M", None),
    ("HRNet-W18", "76.8%", "93.4%", "21 M", None),
    ("MDEQ-single branch", "72.9%", "91.0%", "18 M", None),
    ("MDEQ-small", "75.5%", "92.7%", "18 M", None),
    (
        "OptEq (learnable α's)",
        "76.7%",
        "93.1%",
        "18 M",
        _imagenet("deep_opteq_small", "learned-alpha", _LEARNED),
    ),
    ("OptEq-small", "76.9%", "93.1%", "18 M", _imagenet("deep_opteq_small", "", _SMALL)),
    ("ResNet-101", "77.1%", "93.5%", "52 M", None),
    ("W-ResNet-50", "78.1%", "93.9%", "69 M", None),
    ("W-Res-Extr. + Cls.", "73.4%", "90.9%", "27 M", None),
    ("MDEQ-large", "77.5%", "93.6%", "63 M", None),
    ("MDEQ (Unrolled)", "75.9%", "93.0%", "63 M", None),
    ("OptEq-Mid.", "78.3%", "94.0%", "40 M", _imagenet("deep_opteq_middle", "", _SMALL)),
)

_TABLE_7 = Experiment(
    id="opteq-table7",
    paper=_PAPER,
    title="ImageNet",
    source="OptEq, Table 7",
    claim="OptEq-small of 18 M beats ResNet-50 of 26 M and MDEQ-small; OptEq-Mid. of 40 M beats "
    "ResNet-101 and MDEQ-large.",
    cells=tuple(
        Cell(
            row=row,
            column=column,
            published=Published.read(text),
            job=job,
            metric=metric,
            note="" if job is not None else _QUOTED,
        )
        for row, top1, top5, size, job in _ROWS
        for column, text, metric in (
            ("top-1 in %", top1, "accuracy"),
            ("top-5 in %", top5, "top5"),
            ("size in M", size, "parameters_m"),
        )
    ),
    notes=(
        "The paper's sizes of OptEq do not add up from its Table 6: our networks are what it "
        "describes, with our count beside its own.",
        "ImageNet is read from a folder imagenet (train and val, a folder for each class) in the "
        "data root. Optimizer, rate, decay, batch and epochs are the paper's (§7.3.2).",
    ),
)


def _speed(row: str, text: str, model: str, tag: str, options: Mapping[str, Any]) -> Cell:
    job = Job(
        name=f"speed-{model}{'-' if tag else ''}{tag}",
        model=model,
        options=dict(options),
        data="random",
        recipe={"image_size": 224, "batch_size": 96, "precision": "bf16-mixed"},
        measures=("throughput",),
        trained=False,
        smoke=dict(family(model)[1]),
    )
    return Cell(
        row=row,
        column="images/s",
        published=Published.read(text),
        job=job,
        metric="images_per_second",
    )


_IMPLICIT = {
    "solver": {"kind": "Broyden", "rtol": 1e-3, "max_steps": 18},
    "adjoint": {"kind": "Implicit", "solver": {"kind": "GMRES", "rtol": 1e-2}},
}

_TABLE_9 = Experiment(
    id="opteq-table9",
    paper=_PAPER,
    title="images a second in training, 224 × 224 pixels",
    source="OptEq, Table 9",
    claim="Explicit networks are fastest; of the implicit ones unrolling is the fastest.",
    cells=(
        _speed("ResNet-50", "4597/s", "resnet50_imagenet", "", {}),
        Cell(
            row="MDEQ-single branch",
            column="images/s",
            published=Published.read("257/s"),
            note=_QUOTED,
        ),
        _speed("MDEQ", "1057/s", "mdeq_cifar", "coarse", {"downsample": 2}),
        _speed("OptEq (unrolling K=5)", "1835/s", "deep_opteq_small", "unrolled-5", unrolling(5)),
        _speed("OptEq (IFT with dw-conv)", "200/s", "deep_opteq_small", "implicit", _IMPLICIT),
        Cell(
            row="OptEq (IFT w/o dw-conv)",
            column="images/s",
            published=Published.read("1137/s"),
            note=_QUOTED,
        ),
    ),
    notes=(
        "The paper trained on eight A100 with batches of 768 in all (96 each); ours is one device "
        "with 96 random images, forward, backward and a step of SGD, nothing read from a disk.",
        "Our MDEQ has 10 M parameters and OptEq-small 9 M, the paper's 18 M each.",
    ),
)


def _segmentation(model: str) -> Job:
    return Job(
        name=f"cityscapes-{model}",
        model=model,
        data="cityscapes",
        recipe={**recipes.SEGMENTATION, "image_size": 512},
        measures=("segmentation",),
        rate=RATES["segmentation"] / 8,
        images=2678,
        stand_in={"data": "camvid", "image_size": None},
        smoke=dict(family(model)[1]),
    )


def _scene(row: str, model: str, texts: tuple[str, str, str] | None) -> list[Cell]:
    job = _segmentation(model)
    columns = (("mIoU in %", "miou"), ("mAcc in %", "macc"), ("aAcc in %", "aacc"))
    made = [
        Cell(
            row=row,
            column=column,
            published=None if texts is None else Published.read(texts[index]),
            job=job,
            metric=metric,
        )
        for index, (column, metric) in enumerate(columns)
    ]
    return [*made, Cell(row=row, column="size in M", job=job, metric="parameters_m")]


_TABLE_10 = Experiment(
    id="opteq-table10",
    paper=_PAPER,
    title="semantic segmentation of Cityscapes",
    source="OptEq, Table 10",
    claim="Deep OptEq beats FCN of a similar size.",
    cells=(
        *_scene("FCN", "fcn_seg", ("71.47", "79.23", "95.56")),
        *_scene("Deep OptEq", "deep_opteq_seg", ("74.47", "81.91", "95.93")),
        *_scene("FCN-8s on ResNet-18 (ours)", "fcn_resnet18", None),
    ),
    notes=(
        "Rate, momentum, decay, batch and steps are the paper's (§7.5); its polynomial decay of "
        "the rate is a cosine here. FCN is the explicit twin of the OptEq backbone.",
        "CamVid stands in where Cityscapes is not at hand: 367 training and 233 test images of "
        "240 × 180 pixels, 11 classes.",
    ),
)

EXPERIMENTS = (_TABLE_7, _TABLE_9, _TABLE_10)
