"""Chapter 4 of the thesis: numbers and pictures of solver paths and of loss landscapes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from equilibria.data import ImageData
from equilibria.solvers import Anderson
from equilibria_papers.theory import pictures
from equilibria_papers.theory.landscapes import Grid, contour_figure, measure_landscape
from equilibria_papers.theory.trajectories import (
    PCA,
    SolverPath,
    layer_input,
    principal_components,
    record_path,
)

from .callbacks import snapshot_epochs
from .supplying import Scene

_SAMPLES, _STEPS, _DRAWN = 256, 50, 10
_SPANNED = 32  # samples whose paths span the plane: all 256 would be 13,056 points of 37,632
_TOLERANCE = 1e-2
_EXAMPLES, _GRID = 1024, 25


def _path(model: nn.Module, scene: Scene, data: ImageData) -> tuple[SolverPath, Tensor]:
    """The path of Anderson for the first images of ``data``, and their classes [B]."""
    count = min(16 if scene.smoke else _SAMPLES, len(data))
    images = torch.as_tensor(data.images[slice(0, count)]).to(scene.device)
    layer, given = layer_input(model, data.normalize(images))
    solver = Anderson(rtol=_TOLERANCE, max_steps=_STEPS)
    path = record_path(layer, given, solver=solver, steps=_STEPS)
    return path, torch.as_tensor(data.targets[slice(0, count)]).cpu()


def _first_step(states: Tensor) -> float:
    """The first step's share of the length of a path [K, B, n], mean over samples, in percent.

    100: one leap and rest. Samples that blew up are left out.
    """
    lengths = states.diff(dim=0).double().norm(dim=2)
    total = lengths.sum(0)
    kept = torch.isfinite(total) & (total > 0)
    return 100.0 * float((lengths[0][kept] / total[kept]).mean())


def _separation(points: Tensor, classes: Tensor) -> float:
    """Variance between the class means over the whole variance of points [B, n], in percent."""
    points = points.double()
    center = points.mean(0)
    between = sum(
        float((classes == k).sum()) * float((points[classes == k].mean(0) - center).square().sum())
        for k in classes.unique().tolist()
    )
    whole = float((points - center).square().sum())
    return 100.0 * between / whole if whole else 0.0


def _states(path: SolverPath) -> Tensor:
    assert path.states is not None
    return path.states


def _plane(path: SolverPath) -> PCA:
    return principal_components(_states(path)[:, :_SPANNED], 2)


def path_measure(scene: Scene) -> dict[str, float]:
    """Figures 4.1 and 4.2: the residual by step, and how the path lies in a plane."""
    path, classes = _path(scene.model, scene, scene.test)
    curve, plane = path.mean_curve(), _plane(path)
    found = {f"path.residual.{k}": float(curve[k - 1]) for k in (5, 20, 50)}
    found["path.settled"] = 100.0 * float((path.steps_to(_TOLERANCE) > 0).double().mean())
    found["path.first_step"] = _first_step(_states(path))
    found["path.plane"] = 100.0 * float(plane.explained.sum())
    figure = pictures.new_figure(8.0, 3.4)
    left, right = figure.subplots(1, 2)
    left.semilogy(range(1, path.steps + 1), curve.tolist(), color=pictures.COLORS[0])
    left.set(xlabel="step", ylabel="relative residual (Eq 4.2)")
    _draw(right, plane.project(_states(path)), classes)
    pictures.save_picture(figure, scene.folder / "paths")
    return found


def _draw(axes: Any, points: Tensor, classes: Tensor) -> None:
    """Some paths [K, B, 2] in their plane, a color for each class."""
    for b in range(min(_DRAWN, points.shape[1])):
        color = pictures.COLORS[int(classes[b]) % len(pictures.COLORS)]
        axes.plot(*points[:, b].T.tolist(), color=color, linewidth=0.8, marker=".", markersize=3)
    axes.set(xlabel="first component", ylabel="second component")


def training_paths(scene: Scene) -> dict[str, float]:
    """Figure 4.3: paths of training images at the start, after 1, a quarter, half, all epochs."""
    from .thesis import STAGES

    found: dict[str, float] = {}
    figure = pictures.new_figure(2.6 * len(STAGES), 2.8)
    panels = figure.subplots(1, len(STAGES))
    moments = zip(STAGES, _snapshots(scene.folder / "snapshots", scene.epochs), strict=True)
    for axes, (stage, (epoch, file)) in zip(panels, moments, strict=True):
        model = copy.deepcopy(scene.model)
        model.load_state_dict(load_file(file))
        path, classes = _path(model.eval(), scene, scene.train)
        steps = path.steps_to(_TOLERANCE)
        found[f"stage.{stage}.first_step"] = _first_step(_states(path))
        found[f"stage.{stage}.separation"] = _separation(_states(path)[-1], classes)
        taken = torch.where(steps > 0, steps, path.steps).double().mean()
        found[f"stage.{stage}.steps"] = float(taken)
        _draw(axes, _plane(path).project(_states(path)), classes)
        axes.set_title(f"{stage} (epoch {epoch})", fontsize=8)
    pictures.save_picture(figure, scene.folder / "training_paths")
    return found


def _snapshots(folder: Path, end: int) -> list[tuple[int, Path]]:
    """Epoch and weights of each stage. In a short run stages fall together, on the same epoch."""
    files = {int(p.stem.split("_")[1]): p for p in folder.glob("weights_*.safetensors")}
    wanted = snapshot_epochs(end)
    if set(wanted) - set(files):
        held = f"the weights of epochs {sorted(files)} alone" if files else "no weights"
        raise FileNotFoundError(
            f"{folder} holds {held}, where Figure 4.3 looks at epochs {sorted(set(wanted))}: they "
            "are written while training. Remove the run's folder and train again."
        )
    return [(epoch, files[epoch]) for epoch in wanted]


def local_minima(loss: Tensor) -> int:
    """Points of a grid [H, W] below all their neighbors (up to eight); a hole is no neighbor."""
    padded = torch.nn.functional.pad(loss.nan_to_num(nan=torch.inf), (1, 1, 1, 1), value=torch.inf)
    height, width = loss.shape
    lowest = torch.isfinite(loss)
    for i in range(3):
        for j in range(3):
            if (i, j) != (1, 1):
                lowest &= loss < padded[i : i + height, j : j + width]
    return int(lowest.sum())


def landscape_measure(scene: Scene) -> dict[str, float]:
    """Figure 4.4, of training images."""
    return _landscape(scene, scene.train, "landscape")


def landscape_of_test(scene: Scene) -> dict[str, float]:
    """Figure 4.5, of test images; ImageNet's own are 50 a class, the first 1,024 of 21 classes."""
    return _landscape(scene, scene.test, "test_landscape")


def _landscape(scene: Scene, data: ImageData, name: str) -> dict[str, float]:
    """Φ(a, b) around the weights, 25 × 25 over [−1, 1]², filter-normalized.

    Rows are kept as they are measured, so that an interrupted landscape goes on.
    """
    count = min(32 if scene.smoke else _EXAMPLES, len(data))
    surface = measure_landscape(
        scene.model,
        data.subset(range(count)),
        grid=Grid(points=5 if scene.smoke else _GRID),
        name=scene.folder.name.rsplit("-", 1)[0],
        seed=scene.seed,
        batch_size=scene.batch_size,
        file=scene.folder / f"{name}.safetensors",
        overwrite=True,
        progress=scene.progress,
    )
    pictures.save_picture(contour_figure([surface]), scene.folder / name)
    return {
        f"{name}.center": surface.center_loss(),
        f"{name}.flat": 100.0 * surface.small_loss_share(1.0),
        f"{name}.minima": float(local_minima(surface.loss)),
        f"{name}.holes": float(surface.holes.sum()),
    }
