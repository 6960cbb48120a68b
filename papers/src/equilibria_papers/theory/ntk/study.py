"""The kernels of one network or of several checkpoints, compared, and saved with their pictures."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .comparing import kernel_distance, kernel_drift, label_alignment
from .contracting import Tell
from .dynamics import TrainingComparison
from .kernel import TangentKernel, empirical_ntk
from .pictures import save_drift, save_shares, save_spectra, save_training
from .spectrum import Spectrum, spectrum

__all__ = ["KernelStudy", "study_kernels"]


@dataclass(frozen=True, eq=False)
class KernelStudy:
    """Kernels of the same samples; the first network is the start of the drift."""

    kernels: Mapping[str, TangentKernel]
    """By the name of the network."""
    targets: Tensor | None = None
    training: TrainingComparison | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """What goes to the JSON file beside the numbers."""

    @cached_property
    def spectra(self) -> dict[str, Spectrum]:
        """Name → eigenvalues."""
        return {name: spectrum(kernel) for name, kernel in self.kernels.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One entry a network: spectrum, alignment with the labels, drift from the first."""
        first = next(iter(self.kernels.values()))
        found = []
        for name, kernel in self.kernels.items():
            row: dict[str, Any] = {"network": name, **self.spectra[name].to_dict()}
            if self.targets is not None:
                row["alignment"] = label_alignment(kernel, self.targets)
            row["drift"] = kernel_drift(kernel, first)
            row["distance"] = kernel_distance(kernel, first)
            if kernel.relative_error is not None:
                row["relative_error"] = kernel.relative_error
            if kernel.parts:
                row["shares"] = kernel.shares()
            found.append(row)
        return found

    def to_dict(self) -> dict[str, Any]:
        first = next(iter(self.kernels.values()))
        found = {
            **self.about,
            "samples": len(first.traced),
            "outputs": first.outputs,
            "parameters": first.parameters,
            "method": first.method,
            "networks": self.rows(),
        }
        if self.training is not None:
            found["training"] = self.training.to_dict()
        return found

    def save(self, folder: str | Path) -> list[Path]:
        """ntk.json, ntk.safetensors (kernels, eigenvalues) and pictures; the paths.

        Everything is written beside its place first: an interruption leaves nothing half-written.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ntk", dir=place) as beside:
            made = self._write(Path(beside))
            return [_moved(path, place / path.name) for path in made]

    def _write(self, folder: Path) -> list[Path]:
        text = folder / "ntk.json"
        text.write_text(json.dumps(_plain(self.to_dict()), indent=1) + "\n", encoding="utf-8")
        written = [text, self._write_tensors(folder / "ntk.safetensors")]
        written += save_spectra(self.spectra, folder / "spectrum")
        name, last = list(self.kernels.items())[-1]
        if last.parts:
            written += save_shares(last.shares(), last.sizes, folder / "layers", name=name)
        if len(self.kernels) > 1:
            rows = self.rows()
            drift, distance = ([row[key] for row in rows] for key in ("drift", "distance"))
            written += save_drift(list(self.kernels), drift, distance, folder / "drift")
        if self.training is not None:
            written += save_training(self.training, folder / "training")
        return written

    def _write_tensors(self, path: Path) -> Path:
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise ImportError(
                "saving kernels needs safetensors, which is not installed: "
                'pip install "equilibria[train]".'
            ) from error
        tensors = {}
        for name, kernel in self.kernels.items():
            tensors[f"{name}/kernel"] = kernel.matrix.cpu().contiguous()
            tensors[f"{name}/eigenvalues"] = self.spectra[name].eigenvalues.contiguous()
        if self.targets is not None:
            tensors["targets"] = self.targets.cpu().contiguous()
        save_file(tensors, path)
        return path


def _moved(path: Path, to: Path) -> Path:
    return path.replace(to)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become words."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def study_kernels(
    networks: Mapping[str, nn.Module],
    x: Tensor,
    targets: Tensor | None = None,
    *,
    progress: Tell | None = None,
    about: Mapping[str, Any] | None = None,
    training: TrainingComparison | None = None,
    **options: Any,
) -> KernelStudy:
    """The kernel of each network on the same samples.

    Args:
        networks: by name, in the order of training; of one architecture, for the drift.
        x: samples, [N, …].
        targets: classes [N], for the alignment.
        progress: called with (samples done, of how many), over all networks.
        about: what else the JSON file should say.
        training: a comparison to save with it.
        **options: of ``empirical_ntk``.
    """
    if not networks:
        raise ValueError("study_kernels needs one network at least, got none.")
    made = {}
    for i, (name, model) in enumerate(networks.items()):

        def tell(done: int, of: int, i: int = i) -> None:
            if progress is not None:
                progress(i * of + done, of * len(networks))

        made[name] = empirical_ntk(model, x, progress=tell, **options)
        if made[name].matrix.shape != next(iter(made.values())).matrix.shape:
            raise ValueError(
                f"{name!r} has another number of outputs than the first network; compare "
                "checkpoints of one architecture."
            )
    kept = None if targets is None else torch.as_tensor(targets)
    return KernelStudy(made, kept, training, dict(about or {}))
