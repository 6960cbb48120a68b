"""The NTK thesis, chapter 4: its network, and the cells of Figures 4.1 to 4.5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from equilibria import models
from equilibria.adjoints import Implicit
from equilibria.data import ImageData
from equilibria.engine import GMRES
from equilibria.nn import DEQ, RepeatedBlock, ResidualBlock
from equilibria.solvers import Anderson

from . import recipes
from .experiment import Cell, Job, cells
from .recipes import RATES, imagenet

STAGES = ("start", "after 1 epoch", "after a quarter", "after half", "at the end")
"""When the paths of Figure 4.3 are looked at."""


def _residual(
    data: str, tag: str, options: Mapping[str, Any], *, epochs: int = 50, **more: Any
) -> Job:
    return Job(
        name=f"{data}-residual_deq-{tag}",
        model="residual_deq",
        options=dict(options),
        data=data,
        recipe={**recipes.THESIS, "epochs": epochs},
        rate=RATES["deq"],
        images=54_000 if data == "mnist" else 45_000,
        stand_in={"data": "digits"},
        smoke={"channels": 16, "inner": 16, "image_size": 8},
        **more,
    )


def _at_start(*columns: tuple[str, str]) -> list[Cell]:
    made: list[Cell] = []
    for row, std in (("N(0, 1)", 1.0), ("N(0, 0.01)", 0.01)):
        tag, options = f"std-{std:g}", {"std": std}
        job = _residual("mnist", tag, options, measures=("paths",), trained=False)
        made += cells(row, job, *columns)
    return made


_TRAINED = _residual(
    "mnist", "trained", {}, measures=("quality", "paths of training images"), epochs=40
)


def _stage(stage: str) -> list[Cell]:
    return cells(
        stage,
        _TRAINED,
        ("first step's share of the path, in %", f"stage.{stage}.first_step"),
        ("between-class share of the variance, in %", f"stage.{stage}.separation"),
        ("steps to 1e-2", f"stage.{stage}.steps"),
    )


def _landscape(row: str, tag: str, options: Mapping[str, Any]) -> list[Cell]:
    job = _residual("cifar10", tag, options, measures=("quality", "landscape"))
    return _landscape_cells(row, job, "landscape")


def _landscape_cells(row: str, job: Job, measured: str) -> list[Cell]:
    return cells(
        row,
        job,
        ("accuracy in %", "accuracy"),
        ("loss at the minimizer", f"{measured}.center"),
        ("share of the plane within 1 of it, in %", f"{measured}.flat"),
        ("local minima on the grid", f"{measured}.minima"),
    )


_MDEQ = imagenet(
    "mdeq_cifar",
    "imagenet-100",
    tag="coarse",
    options={"downsample": 2},
    measures=("quality", "landscape of test images"),
)

CELLS = {
    "thesis-figure4.1": _at_start(
        ("residual after 5 steps", "path.residual.5"),
        ("residual after 20 steps", "path.residual.20"),
        ("residual after 50 steps", "path.residual.50"),
        ("samples below 1e-2, in %", "path.settled"),
    ),
    "thesis-figure4.2": _at_start(
        ("first step's share of the path, in %", "path.first_step"),
        ("variance in the plane, in %", "path.plane"),
    ),
    "thesis-figure4.3": [cell for stage in STAGES for cell in _stage(stage)],
    "thesis-figure4.4": [
        *_landscape("DEQ", "landscape", {}),
        *_landscape("repeat-6", "repeat-6", {"repeats": 6}),
        *_landscape("repeat-11", "repeat-11", {"repeats": 11}),
        *_landscape("repeat-18", "repeat-18", {"repeats": 18}),
    ],
    "thesis-figure4.5": _landscape_cells("MDEQ", _MDEQ, "test_landscape"),
}


_POOLED = 4


class ResidualNet(nn.Module):
    """images → convolution → fixed point of Eq 4.1, or Eq 4.1 applied K times → pool → logits.

    x [B, C, H, W] → [B, classes]. The thesis names the block (Eq 4.1) and the solver (Anderson to
    1e-2 in at most 50 steps, §4.1.2); widths and head are those of the tutorial that its block
    comes from: 48 channels, 64 inside, group norms of 8.

    Args:
        classes, in_channels: of the data.
        channels, inner: of z, and inside the block.
        std: standard deviation of the block's kernels at the start (§4.1.1: 1 or 0.01).
        repeats: K; None: the fixed point.
        rtol, max_steps: of Anderson.
    """

    def __init__(
        self,
        classes: int,
        in_channels: int,
        *,
        channels: int = 48,
        inner: int = 64,
        std: float = 0.01,
        repeats: int | None = None,
        rtol: float = 1e-2,
        max_steps: int = 50,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        )
        block = ResidualBlock(channels, inner, std=std)
        self.layer: nn.Module = (
            DEQ(
                block,
                # A few samples take all steps. The others leave the batch, which halves its time.
                solver=Anderson(rtol=rtol, max_steps=max_steps, compact=True),
                adjoint=Implicit(solver=GMRES(rtol=rtol)),
            )
            if repeats is None
            else RepeatedBlock(block, repeats=repeats)
        )
        self.head = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.AdaptiveAvgPool2d(_POOLED),
            nn.Flatten(),
            nn.Linear(channels * _POOLED**2, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.stem(x)))
        return logits


NETWORKS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType({"residual_deq": ResidualNet})
"""name → build(classes, in_channels, **options)."""


def create(name: str, data: ImageData, /, **options: Any) -> nn.Module:
    """A network of the thesis or of the library, with fresh weights, laid out for the images."""
    if name in NETWORKS:
        return NETWORKS[name](data.num_classes, data.channels, **options)
    height, width = data.images.shape[2:]
    size = int(height) if height == width else None
    given = {"in_channels": data.channels, "image_size": size, **options}
    return models.create(name, data.num_classes, **given)
