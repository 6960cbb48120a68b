"""Labels and confidences for image files, with the preprocessing stored beside the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.certify import certify_network
from equilibria.data import read_image
from equilibria.engine.result import Solution
from equilibria.engine.solver import SolverOptions
from equilibria.nn import observe

from .layer_solvers import with_solver
from .model_on_data import check_whole, device_of, evaluating
from .rich_output import progress_bar

_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


@dataclass(frozen=True)
class Prediction:
    """What a network says of one image."""

    file: Path
    labels: tuple[tuple[str, float], ...]
    """The likeliest classes with their probabilities, best first."""
    steps: int | None
    """Evaluations of the map, the most that any layer took; None without equilibrium layers."""
    converged: bool | None
    """Whether every layer's solve passed its tolerance; None where it runs fixed steps."""
    radius: float | None = None
    """No image within this ℓ2 distance, pixels from 0 to 1, has another label; None: not asked."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        labels = [{"label": label, "confidence": p} for label, p in self.labels]
        return {**vars(self), "file": str(self.file), "labels": labels}


def predict_files(
    model: nn.Module,
    paths: Iterable[str | Path],
    *,
    top: int = 1,
    batch_size: int = 64,
    skip_corrupt: bool = False,
    solver: SolverOptions | None = None,
    certify: bool = False,
    progress: bool = False,
) -> list[Prediction]:
    """Classify image files (folders are searched), one Prediction a readable file, in order.

    ``model`` comes from ``models.load``: its ``config`` says channels and size, its ``extra`` the
    classes, mean and std that it was trained with. ``solver`` replaces that of every layer.
    ``certify`` adds the proven radius of the label, 0 where the exact network has another. A file
    that is no image raises a ValueError that names it, or with ``skip_corrupt`` is left out and
    named in a warning.
    """
    check_whole("top", top, 1)
    check_whole("batch_size", batch_size, 1)
    files = _files(paths)
    config = getattr(model, "config", None)
    if config is None:
        raise TypeError(
            f"{type(model).__name__} has no config: make it with equilibria.models.create or load "
            "it with equilibria.models.load."
        )
    extra = dict(getattr(model, "extra", None) or {})
    if extra.get("task") == "segmentation":
        raise ValueError(
            f"{config.name} segments images; a prediction is one class an image. Use a "
            "classification network, or call the model."
        )
    size = _size(extra.get("image_size") or config.image_size)
    classes = tuple(extra.get("classes") or (str(i) for i in range(config.num_classes)))
    used = with_solver(model, solver)
    device = device_of(used)
    mean, std = _normalization(extra, config.in_channels, device)
    found: list[Prediction] = []
    skipped: list[str] = []
    starts = range(0, len(files), batch_size)
    with progress_bar(len(starts), "predicting", progress and len(starts) > 1) as advance:
        for start in starts:
            kept, images = [], []
            for file in files[start : start + batch_size]:
                try:
                    if not file.exists():
                        raise ValueError(f"{file}: no such file.")
                    # uint8 [channels, size, size]: the middle square, resized.
                    images.append(read_image(file, config.in_channels, size))
                    kept.append(file)
                except ValueError as error:
                    if not skip_corrupt:
                        raise
                    skipped.append(str(error))
            if kept:
                x = (torch.stack(images).to(device).float() / 255.0 - mean) / std
                with torch.no_grad(), evaluating(used), observe(used) as seen:
                    warnings.simplefilter("ignore")  # convergence is a field of the answer
                    logits = used(x)
                if logits.shape[1] != len(classes):
                    raise ValueError(
                        f"the model has {logits.shape[1]} classes, its file {len(classes)}."
                    )
                solved = [solution for each in seen.solutions.values() for solution in each]
                answers = _answers(kept, logits.float().softmax(1), classes, top, solved)
                if certify:
                    proven = certify_network(used, x)
                    same = (proven.label == logits.argmax(1)).cpu()
                    radii = proven.radius.cpu() * same * float(std.min()) * (1.0 - 1e-6)
                    pairs = zip(answers, radii.tolist(), strict=True)
                    answers = [replace(answer, radius=r) for answer, r in pairs]
                found += answers
            advance()
    if skipped:
        noun = "file" if len(skipped) == 1 else "files"
        warnings.warn(f"skipped {len(skipped)} {noun}; the first: {skipped[0]}", stacklevel=2)
    return found


def _size(given: Any) -> int:
    """The side of the square images that the network was trained on."""
    sides = set(given) if isinstance(given, (list, tuple)) else {given}
    if len(sides) != 1 or not all(isinstance(s, int) and s > 0 for s in sides):
        raise ValueError(f"the file stores image_size={given!r}: expected the side of a square.")
    return int(sides.pop())


def _files(paths: Iterable[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES)
        if not inside:
            kinds = ", ".join(sorted(_SUFFIXES))
            raise ValueError(f"{path}: the folder holds no image ({kinds}).")
        found += inside
    if not found:
        raise ValueError("predict_files got no path: give image files or folders of them.")
    return found


def _normalization(
    extra: dict[str, Any], channels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, [1, C, 1, 1]."""
    mean, std = extra.get("mean") or [0.0] * channels, extra.get("std") or [1.0] * channels
    if len(mean) != channels or len(std) != channels:
        raise ValueError(
            f"the file stores {len(mean)} means and {len(std)} standard deviations for a model of "
            f"{channels} channels."
        )
    made = torch.tensor([mean, std], device=device).view(2, 1, -1, 1, 1)
    return made[0], made[1]


def _answers(
    files: Sequence[Path],
    probabilities: Tensor,
    classes: tuple[str, ...],
    top: int,
    solved: Sequence[Solution[Any]],
) -> list[Prediction]:
    steps: list[int | None] = [None] * len(files)
    converged: list[bool | None] = [None] * len(files)
    if solved:
        steps = torch.stack([s.stats.steps.cpu() for s in solved]).amax(0).tolist()
    tested = [s.converged.cpu() for s in solved if s.stats.syncs > 0]
    if tested:
        converged = torch.stack(tested).all(0).tolist()
    best = probabilities.topk(min(top, len(classes)), dim=1)
    named = [[classes[k] for k in row] for row in best.indices.tolist()]
    labels = [
        tuple(zip(*row, strict=True)) for row in zip(named, best.values.tolist(), strict=True)
    ]
    return list(map(Prediction, files, labels, steps, converged))
