"""Labels and confidences for image files, with the preprocessing stored beside the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from equilibria.data import read_image
from equilibria.data.folders import SUFFIXES, files_in
from equilibria.data.parquet import parquet_images
from equilibria.data.sources import Encoded
from equilibria.engine.solver import SolverOptions
from equilibria.models import Network, Prediction

from .layer_solvers import with_solver
from .model_on_data import check_whole
from .rich_output import progress_bar


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
    """Classify images, one Prediction for each readable one, in order.

    A path is an image file, a Parquet file with a column of encoded images, or a folder that is
    searched for both. Images are read batch by batch.

    ``model`` comes from ``models.load``, and a file is treated as an image by ``model.predict``:
    the middle square, resized and normalized as in training. ``solver`` replaces that of every
    layer. ``certify`` adds the proven radius of the label, 0 where the exact network has another. A
    file that is no image raises a ValueError that names it, or with ``skip_corrupt`` is left out
    and named in a warning.
    """
    check_whole("top", top, 1)
    check_whole("batch_size", batch_size, 1)
    files = _files(paths)
    gone = [file for file in files if isinstance(file, Path) and not file.exists()]
    if gone and not skip_corrupt:  # before the first image is answered
        raise ValueError(f"{gone[0]}: no such file.")
    network = with_solver(getattr(model, "_orig_mod", model), solver)
    if not isinstance(network, Network):
        raise TypeError(
            f"{type(network).__name__} has no config: make it with equilibria.models.create or "
            "load it with equilibria.models.load."
        )
    found: list[Prediction] = []
    skipped: list[str] = []
    starts = range(0, len(files), batch_size)
    with progress_bar(len(starts), "predicting", progress and len(starts) > 1) as advance:
        for start in starts:
            kept: list[Encoded] = []
            images: list[Tensor] = []
            for file in files[start : start + batch_size]:
                try:
                    pixels = read_image(file, network.in_channels)
                except ValueError as error:
                    if not skip_corrupt:
                        raise
                    skipped.append(str(error))
                    continue
                kept.append(file)
                # One at a time: a photograph is large, what is left of it is small.
                images.append(network.preprocess(pixels, names=[str(file)]))
            if kept:
                answers = network.predict_normalized(torch.cat(images), top=top, certify=certify)
                named = [f if isinstance(f, Path) else Path(str(f)) for f in kept]
                found += [replace(a, file=f) for a, f in zip(answers, named, strict=True)]
            advance()
    if skipped:
        noun = "file" if len(skipped) == 1 else "files"
        warnings.warn(f"skipped {len(skipped)} {noun}; the first: {skipped[0]}", stacklevel=2)
    return found


def image_of(file: Path, rows: Callable[[Path], Sequence[Encoded]]) -> Encoded:
    """What a ``Prediction.file`` names: an image file, or one of the ``rows`` of a Parquet file."""
    name, _, row = str(file).rpartition(" row ")
    if Path(name).suffix.lower() != ".parquet" or file.exists():
        return file
    return rows(Path(name))[int(row)]


def _files(paths: Iterable[str | Path]) -> list[Encoded]:
    """Image files, and the rows of Parquet files."""
    known = {*SUFFIXES, ".parquet"}
    found: list[Encoded] = []
    for path in map(Path, paths):
        inside = [path]
        if path.is_dir():
            inside = sorted(files_in(path, known))
            if not inside:
                kinds = ", ".join(sorted(known))
                raise ValueError(f"{path}: the folder holds no image ({kinds}).")
        for file in inside:
            found += parquet_images(file) if file.suffix.lower() == ".parquet" else [file]
    if not found:
        raise ValueError("predict_files got no path: give image files or folders of them.")
    return found
