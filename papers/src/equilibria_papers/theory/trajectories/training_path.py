"""How the states of a layer move through training, class by class (the NTK thesis, §4.1.2)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from equilibria.engine import SolverOptions
from equilibria_papers.theory.checks import check_sizes

from .recording import SolverPath, layer_input, record_path

_CHUNK = 1 << 14  # columns at a time in float64, so that a wide float32 cloud is not doubled


def _centered(flat: Tensor, mean: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Columns of p − μ in float64, a part at a time."""
    for begin in range(0, flat.shape[1], _CHUNK):
        columns = slice(begin, begin + _CHUNK)
        yield columns, flat[:, columns].double() - mean[columns]


@dataclass(frozen=True)
class PCA:
    """y = C (p − μ): the mean μ [n], orthonormal rows C [k, n], all in float64."""

    mean: Tensor
    components: Tensor
    explained: Tensor
    """[k]: the share of the variance along each component; zero for points that are all equal."""

    def project(self, points: Tensor) -> Tensor:
        """[..., n] → [..., k] in float64."""
        flat = points.reshape(-1, points.shape[-1])
        total = flat.new_zeros(len(flat), len(self.components), dtype=torch.float64)
        for columns, part in _centered(flat, self.mean):
            total += part @ self.components[:, columns].T
        return total.reshape(*points.shape[:-1], -1)


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
    mean = torch.cat([part.double().mean(0) for part in flat.split(_CHUNK, 1)])
    if len(flat) <= flat.shape[1]:
        values, components = _by_gram(flat, mean, count)
    else:
        centered = flat.double() - mean
        values, vectors = torch.linalg.eigh(centered.T @ centered)
        values, components = values.flip(0)[:count], vectors.flip(1).T[:count]
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for _, part in _centered(flat, mean):
        total += part.square().sum()
    # Components that carry rounding alone, and those beyond the cloud's rank, are zero.
    kept = (values > 1e-13 * total) & (values > 0)
    missing = max(0, count - len(values))
    components = torch.where(kept.unsqueeze(1), components, 0.0)
    components = torch.cat([components, components.new_zeros(missing, components.shape[1])])
    values = torch.cat([torch.where(kept, values, 0.0), values.new_zeros(missing)])
    signs = components.gather(1, components.abs().argmax(1, keepdim=True)).sign()
    components = components * torch.where(signs == 0, 1.0, signs)
    return PCA(mean, components, values / total if total > 0 else torch.zeros_like(values))


def _by_gram(flat: Tensor, mean: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Fewer points than dimensions: C = Vᵀ X / σ from the N × N matrix X Xᵀ = V σ² Vᵀ."""
    gram = flat.new_zeros(len(flat), len(flat), dtype=torch.float64)
    for _, part in _centered(flat, mean):
        gram += part @ part.T
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:count].clamp_min(0), vectors.flip(1)[:, :count]
    components = torch.cat([vectors.T @ part for _, part in _centered(flat, mean)], 1)
    norm = torch.linalg.vector_norm(components, dim=1, keepdim=True)
    return values, components / torch.where(norm == 0, 1.0, norm)


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
            total = torch.where(kept, part, 0.0).sum(1)
            found.append(total / torch.where(kept.any(1), kept.sum(1), torch.nan))
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


def training_recorder(
    x: Tensor,
    labels: Tensor,
    *,
    every: int = 1,
    layer: str | None = None,
    solver: SolverOptions | None = None,
    steps: int | None = None,
) -> Any:
    """A Lightning callback that records the solver's way for x at the start and after epochs.

    Give it to ``training.fit(..., callbacks=[recorder])`` or to a Trainer; afterwards
    ``recorder.training_path()`` has what it saw. The model is copied and looked at in eval mode:
    nothing of the training changes. Only the first process records, every ``every`` epochs; the
    others are as in ``follow_training``.
    """
    check_sizes("training_recorder", {"every": every})

    class TrainingRecorder(pl.Callback):
        """Looks at the model before the first epoch and after every ``every``-th."""

        def __init__(self) -> None:
            self._seen: list[TrainingPath] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._look(trainer, pl_module, int(trainer.current_epoch))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            epoch = int(trainer.current_epoch) + 1
            if epoch % every == 0:
                self._look(trainer, pl_module, epoch)

        def _look(self, trainer: Any, pl_module: Any, epoch: int) -> None:
            if not trainer.is_global_zero:
                return
            model = copy.deepcopy(getattr(pl_module, "model", pl_module)).eval()
            like = next(model.parameters())
            found = follow_training(
                [model],
                x.to(like.device, like.dtype),
                labels,
                moments=[str(epoch)],
                layer=layer,
                solver=solver,
                steps=steps,
            )
            self._seen.append(found)

        def training_path(self) -> TrainingPath:
            """What was seen so far."""
            if not self._seen:
                raise RuntimeError("nothing was recorded yet: the training has not begun.")
            return dataclasses.replace(
                self._seen[0],
                moments=tuple(m for found in self._seen for m in found.moments),
                paths=tuple(p for found in self._seen for p in found.paths),
            )

    return TrainingRecorder()
