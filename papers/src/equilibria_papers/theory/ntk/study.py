"""The kernels of one network or of several checkpoints, compared, and saved with their pictures."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from equilibria.engine import write_json
from equilibria_papers.theory.pictures import look, new_figure, plain_ticks, save_picture

from .kernel import TangentKernel, Tell, empirical_ntk
from .spectrum import Spectrum, kernel_distance, kernel_drift, label_alignment, spectrum


@dataclass(frozen=True, eq=False)
class KernelStudy:
    """Kernels of the same samples; the first network is the start of the drift."""

    kernels: Mapping[str, TangentKernel]  # By the name of the network
    targets: Tensor | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """What goes to the JSON file beside the numbers."""

    @cached_property
    def spectra(self) -> dict[str, Spectrum]:
        """Name → eigenvalues."""
        return {name: spectrum(kernel) for name, kernel in self.kernels.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One entry per network: spectrum, alignment with the labels, drift from the first."""
        first = next(iter(self.kernels.values()))
        found = []
        for name, kernel in self.kernels.items():
            row: dict[str, Any] = {"network": name, **self.spectra[name].to_dict()}
            if self.targets is not None:
                row["alignment"] = label_alignment(kernel, self.targets)
            row["drift"] = kernel_drift(kernel, first)
            row["distance"] = kernel_distance(kernel, first)
            if kernel.parts:
                row["shares"] = kernel.shares()
            found.append(row)
        return found

    def to_dict(self) -> dict[str, Any]:
        first = next(iter(self.kernels.values()))
        return {
            **self.about,
            "samples": len(first.traced),
            "outputs": first.outputs,
            "parameters": first.parameters,
            "method": first.method,
            "networks": self.rows(),
        }

    def save(self, folder: str | Path) -> list[Path]:
        """ntk.json, ntk.safetensors (kernels, eigenvalues) and pictures; the paths.

        Everything is written beside its place first: an interruption leaves nothing half-written.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ntk", dir=place) as name:
            beside = Path(name)
            made = [write_json(beside / "ntk.json", self.to_dict()), beside / "ntk.safetensors"]
            save_file(self._tensors(), made[1])
            made += save_picture(_spectra_figure(self.spectra), beside / "spectrum")
            return [path.replace(place / path.name) for path in made]

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, kernel in self.kernels.items():
            tensors[f"{name}/kernel"] = kernel.matrix.cpu().contiguous()
            tensors[f"{name}/eigenvalues"] = self.spectra[name].eigenvalues.contiguous()
        if self.targets is not None:
            tensors["targets"] = self.targets.cpu().contiguous()
        return tensors


def study_kernels(
    networks: Mapping[str, nn.Module],
    x: Tensor,
    targets: Tensor | None = None,
    *,
    progress: Tell | None = None,
    about: Mapping[str, Any] | None = None,
    **options: Any,
) -> KernelStudy:
    """The kernel of each network on the same samples.

    Args:
        networks: by name, in the order of training; of one architecture, for the drift.
        targets: classes [N], for the alignment.
        progress: called with (samples done, of how many), over all networks.
        about: what else the JSON file should say.
        **options: of ``empirical_ntk``.
    """
    if not networks:
        raise ValueError("study_kernels needs one network at least, got none.")
    made: dict[str, TangentKernel] = {}
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
    return KernelStudy(made, kept, dict(about or {}))


def _spectra_figure(spectra: Mapping[str, Spectrum]) -> Any:
    """Eigenvalues, largest first, of one kernel or several, on logarithmic axes."""
    columns = 1 if len(spectra) < 3 else 2
    figure = new_figure(5.2, 3.6 + 0.2 * -(-len(spectra) // columns))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    for i, (name, found) in enumerate(spectra.items()):
        values = found.eigenvalues[: found.rank].tolist()
        label = f"{name} (effective rank {found.effective_rank:.3g})"
        axes.loglog(range(1, len(values) + 1), values, label=label, **look(i, marker=False))
    axes.set(xlabel="index", ylabel="eigenvalue of the tangent kernel")
    plain_ticks(axes)
    # Below: inside it would lie on a curve that falls from corner to corner.
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure
