"""How the states of a layer move, through a solver and through training (the NTK thesis, §4.1).

Principal components, the states class by class, and the pictures of a solver's way: residual curves
(Figure 4.1), paths in a plane (4.2, and 4.3 for the checkpoints of a training).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.lines import Line2D
from torch import Tensor, nn

from equilibria.engine import SolverOptions
from equilibria_papers.theory.checks import check_sizes
from equilibria_papers.theory.pictures import COLORS, GRAY, MARKERS, look, new_figure, on_log_axis

from .recording import SolverPath, layer_input, record_path


@dataclass(frozen=True)
class PCA:
    """y = C (p − μ): the mean μ [n], orthonormal rows C [k, n], all in float64."""

    mean: Tensor
    components: Tensor
    explained: Tensor
    """[k]: the share of the variance along each component; zero for points that are all equal."""

    def project(self, points: Tensor) -> Tensor:
        """[..., n] → [..., k] in float64."""
        return (points.double() - self.mean) @ self.components.T


def principal_components(points: Tensor, count: int = 2) -> PCA:
    """The first ``count`` principal components of points [..., n], samples in all but the last dim.

    Points with NaN or infinity are left out. The sign of each component is the one that makes its
    entry of largest magnitude positive, so that the same cloud gives the same picture. Components
    beyond the cloud's rank are zero.
    """
    if points.ndim < 2 or not points.is_floating_point():
        raise ValueError(
            f"principal_components takes floating points [..., n], got {points.dtype} "
            f"{tuple(points.shape)}."
        )
    check_sizes("principal_components", {"count": count})
    flat = points.detach().reshape(-1, points.shape[-1])
    flat = flat[torch.isfinite(flat).all(1)]
    if len(flat) < 2:
        raise ValueError(
            f"principal_components needs two finite points at least, got {len(flat)} of "
            f"{points.numel() // max(points.shape[-1], 1)}."
        )
    flat = flat.double()
    mean = flat.mean(0)
    centered = flat - mean
    few = len(flat) <= flat.shape[1]
    values, vectors = torch.linalg.eigh(centered @ centered.T if few else centered.T @ centered)
    components = vectors.flip(1)[:, :count].T
    if few:  # C = Vᵀ X / σ from the N × N matrix X Xᵀ = V σ² Vᵀ
        components = components @ centered
        norm = torch.linalg.vector_norm(components, dim=1, keepdim=True)
        components = components / torch.where(norm == 0, 1.0, norm)
    values, total = values.flip(0)[:count], centered.square().sum()
    # Components that carry rounding alone, and those beyond the cloud's rank, are zero.
    kept = (values > 1e-13 * total) & (values > 0)
    missing = max(0, count - len(values))
    components = torch.where(kept.unsqueeze(1), components, 0.0)
    components = torch.cat([components, components.new_zeros(missing, components.shape[1])])
    values = torch.cat([torch.where(kept, values, 0.0), values.new_zeros(missing)])
    signs = components.gather(1, components.abs().argmax(1, keepdim=True)).sign()
    components = components * torch.where(signs == 0, 1.0, signs)
    return PCA(mean, components, values / total if total > 0 else torch.zeros_like(values))


@dataclass(frozen=True)
class TrainingPath:
    """For E moments of a training the solver's way for the same B samples.

    ``moments`` names them (epochs), ``labels`` [B] are the classes, ``paths[e]`` has the states
    [K, B, n]; the last of each is z*.
    """

    moments: tuple[str, ...]
    labels: Tensor
    paths: tuple[SolverPath, ...]

    @property
    def equilibria(self) -> Tensor:
        """[E, B, n]: z* of every sample at every moment."""
        return torch.stack([path.states[-1] for path in self.paths])

    @property
    def classes(self) -> list[int]:
        """The labels that occur, in order."""
        return [int(c) for c in self.labels.unique()]

    def plane(self) -> PCA:
        """Two principal components of all z*."""
        return principal_components(self.equilibria)

    def class_means(self, points: Tensor) -> Tensor:
        """[E, B, k] → [E, C, k]: the mean of each class, over its samples with finite points."""
        found = []
        for label in self.classes:
            part = points[:, self.labels == label]
            kept = torch.isfinite(part).all(-1, keepdim=True)
            found.append(part.where(kept, torch.nan).nanmean(1))
        return torch.stack(found, 1)

    def spread(self) -> Tensor:
        """[E]: Σ‖class mean − mean‖² over Σ‖z* − mean‖², the share of the variance of z* that lies
        between the classes: 0 where they coincide, 1 where each is a point."""
        points = self.equilibria.double()
        center = points.mean(1, keepdim=True)
        means = self.class_means(points)
        counts = torch.tensor([int((self.labels == c).sum()) for c in self.classes])
        between = ((means - center).square().sum(-1) * counts).sum(1)
        whole = (points - center).square().sum((1, 2))
        return between / torch.where(whole == 0, 1.0, whole)


def follow_training(
    models: Iterable[nn.Module],
    x: Any,
    labels: Tensor,
    *,
    moments: Sequence[str] | None = None,
    layer: str | None = None,
    solver: SolverOptions | None = None,
    steps: int | None = None,
) -> TrainingPath:
    """The solver's way for the inputs x [B, ...] in each of a training's checkpoints.

    Args:
        models: in the order of training; an iterator may load one at a time.
        x, labels: the networks' input, the same for all, and its classes [B].
        moments: their names; 1, 2, … if not given.
        layer: name of the equilibrium layer; the first if not given.
        solver, steps: as ``record_path``.
    """
    if labels.shape != (len(x),):
        raise ValueError(f"labels must be [{len(x)}], one per sample, got {tuple(labels.shape)}.")
    found = (layer_input(model, x, layer) for model in models)
    paths = [record_path(part, given, solver=solver, steps=steps) for part, given in found]
    if not paths:
        raise ValueError("follow_training needs one checkpoint at least, got none.")
    names = tuple(str(i + 1) for i in range(len(paths))) if moments is None else tuple(moments)
    if len(names) != len(paths):
        raise ValueError(f"{len(names)} moments were named for {len(paths)} checkpoints.")
    return TrainingPath(names, labels.cpu(), tuple(paths))


_SAMPLES = 8  # lines in a panel of paths
# Ten classes need ten looks: eight colors, two of them again with another marker.
_TEN = (*COLORS[:6], "#999999", "#000000", "#8B4513", "#F0E442")


def residual_figure(groups: Mapping[str, Mapping[str, SolverPath]]) -> Any:
    """The relative residual of Eq 4.2 over the steps, a panel for each group (Figure 4.1).

    ``groups["N(0, 1)"]["Anderson"]`` is a path. The line is the mean over the samples, the band
    goes from the 10% to the 90% quantile, the dotted line is the tolerance.
    """
    _check(groups)
    figure = new_figure(3.0 * len(groups) + 0.8, 3.0)
    axes = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axis, (title, paths) in zip(axes, groups.items(), strict=True):
        for i, (name, path) in enumerate(paths.items()):
            steps = range(1, path.steps + 1)
            marks = {"markersize": 3, "markevery": max(1, path.steps // 10)}
            axis.plot(steps, on_log_axis(path.mean_curve()), label=name, **look(i), **marks)
            low, high = (on_log_axis(path.quantile_curve(q)) for q in (0.1, 0.9))
            axis.fill_between(steps, low, high, color=look(i)["color"], alpha=0.15, linewidth=0)
        limit = max(path.tolerance for path in paths.values())
        if limit > 0:
            axis.axhline(limit, color=GRAY, linestyle=":", linewidth=0.8, label="tolerance")
        axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel("evaluations of $f$")
    axes[0].set_ylabel("$\\|f(z) - z\\| \\,/\\, \\|f(z)\\|$")
    axes[-1].legend(frameon=False, fontsize=8)
    return figure


def path_figure(groups: Mapping[str, SolverPath]) -> Any:
    """z^[0], z^[1], … in the plane of its two principal components, a panel each (Figure 4.2).

    Every panel has its own plane. A line is one of the first eight samples; it starts at the
    circle, ends at the cross.
    """
    _check(groups)
    figure = new_figure(3.2 * len(groups), 3.1)
    axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axis, (title, path) in zip(axes, groups.items(), strict=True):
        states = path.states[:, :_SAMPLES]
        plane = principal_components(states)
        ways = plane.project(states).numpy()
        for i in range(states.shape[1]):
            way, color = ways[:, i], _TEN[i % len(_TEN)]
            axis.plot(*way.T, color=color, linewidth=1.0, alpha=0.9, marker=".", markersize=3)
            axis.plot(*way[0], marker="o", color=color, markerfacecolor="white", markersize=5)
            axis.plot(*way[-1], marker="x", color=color, markersize=6)
        axis.set_title(title)
        axis.set(xlabel=_share(plane, 0), ylabel=_share(plane, 1))
    looks: dict[str, dict[str, Any]] = {
        "start": {"marker": "o", "markerfacecolor": "white", "linestyle": "none"},
        "end": {"marker": "x", "linestyle": "none"},
        "one color a sample": {"marker": ".", "markersize": 3},
    }
    handles = [Line2D([], [], color=GRAY, label=text, **each) for text, each in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def class_figure(training: TrainingPath) -> Any:
    """z* of every sample by class, with the class means drawn as a path through training.

    Small points are the samples at the last moment; the line joins the means of a class over the
    moments, from the open circle to the filled marker.
    """
    plane = training.plane()
    points = plane.project(training.equilibria)
    means = training.class_means(points)
    figure = new_figure(5.2, 4.2)
    axis = figure.subplots()
    for i, label in enumerate(training.classes):
        color, marker = _TEN[i % len(_TEN)], MARKERS[i % len(MARKERS)]
        mine = points[-1, training.labels == label]
        axis.scatter(*mine.T.numpy(), s=6, color=color, alpha=0.35, linewidths=0)
        way = means[:, i].numpy()
        axis.plot(*way.T, color=color, linewidth=1.2)
        axis.plot(*way[0], marker="o", color=color, markerfacecolor="white", markersize=5)
        end = {"marker": marker, "markersize": 6, "linestyle": "", "label": str(label)}
        axis.plot(*way[-1], color=color, **end)
    axis.set(xlabel=_share(plane, 0), ylabel=_share(plane, 1))
    axis.set_title(f"$z^*$ from {training.moments[0]} to {training.moments[-1]}")
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axis.legend(frameon=False, fontsize=8, title="class", **beside)
    return figure


def _share(plane: PCA, i: int) -> str:
    return f"component {i + 1} ({100 * float(plane.explained[i]):.0f}%)"


def _check(groups: Mapping[str, Any]) -> None:
    if not groups:
        raise ValueError("there is no path to draw: give one at least.")
