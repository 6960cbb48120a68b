"""How the states of a layer move through training, class by class (paper 004, §4.1.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine import Solver
from equilibria_papers.theory.checks import check_sizes
from equilibria_papers.theory.extras import lightning_module

from .layers import eval_copy, layer_input
from .pca import PCA, principal_components
from .recording import SolverPath, record_path

__all__ = ["TrainingPath", "follow_training", "training_recorder"]


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
        return torch.stack([_states(p)[-1] for p in self.paths])

    @property
    def classes(self) -> list[int]:
        """The labels that occur, in order."""
        return [int(c) for c in self.labels.unique()]

    def plane(self, *, whole: bool = False) -> PCA:
        """Two principal components of all z*; of all iterates with ``whole``."""
        points = torch.cat([_states(p) for p in self.paths]) if whole else self.equilibria
        return principal_components(points)

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


def _states(path: SolverPath) -> Tensor:
    if path.states is None:
        raise ValueError("this path was recorded without states: use keep_states=True.")
    return path.states


def follow_training(
    models: Iterable[nn.Module],
    x: Any,
    labels: Tensor,
    *,
    moments: Sequence[str] | None = None,
    layer: str | None = None,
    solver: Solver | None = None,
    steps: int | None = None,
) -> TrainingPath:
    """The solver's way for the inputs x [B, ...] in each of a training's checkpoints.

    Args:
        models: in the order of training; an iterator may load one at a time.
        x: the networks' input, the same for all.
        labels: classes [B].
        moments: their names; 1, 2, … if not given.
        layer: name of the equilibrium layer; the first if not given.
        solver, steps: as ``record_path``.
    """
    if labels.shape != (len(x),):
        raise ValueError(f"labels must be [{len(x)}], one a sample, got {tuple(labels.shape)}.")
    paths = [_path(model, x, layer, solver, steps) for model in models]
    if not paths:
        raise ValueError("follow_training needs one checkpoint at least, got none.")
    names = tuple(str(i + 1) for i in range(len(paths))) if moments is None else tuple(moments)
    if len(names) != len(paths):
        raise ValueError(f"{len(names)} moments were named for {len(paths)} checkpoints.")
    return TrainingPath(names, labels.cpu(), tuple(paths))


def _path(
    model: nn.Module, x: Any, layer: str | None, solver: Solver | None, steps: int | None
) -> SolverPath:
    found, given = layer_input(model, x, layer)
    return record_path(found, given, solver=solver, steps=steps)


def training_recorder(
    x: Tensor,
    labels: Tensor,
    *,
    every: int = 1,
    layer: str | None = None,
    solver: Solver | None = None,
    steps: int | None = None,
) -> Any:
    """A Lightning callback that records the solver's way for x at the start and after epochs.

    Give it to ``training.fit(..., callbacks=[recorder])`` or to a Trainer; afterwards
    ``recorder.training_path()`` has what it saw. The model is copied and looked at in eval mode:
    nothing of the training changes. Only the first process records.

    Args:
        x, labels: the samples to follow, as the network takes them.
        every: epochs between two looks.
        layer, solver, steps: as ``follow_training``.
    """
    check_sizes("training_recorder", {"every": every})
    pl = lightning_module()

    class TrainingRecorder(pl.Callback):  # type: ignore[misc, name-defined]
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
            model = eval_copy(getattr(pl_module, "model", pl_module))
            like = next(model.parameters())
            given = x.to(like.device, like.dtype)
            found = follow_training(
                [model],
                given,
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
