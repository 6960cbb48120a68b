"""Accuracy under corruptions (GEQ §4.3, Figure 2): 19 kinds at five severities.

mCA = mean over kinds of the mean accuracy over severities
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.data.image_data import ImageData
from equilibria.engine.files import json_value, write_json

from .corruptions import SEVERITIES, check_kinds, check_severities, corrupt
from .figures import save_accuracies
from .metrics import ClassificationMeter
from .model_on_data import (
    batches,
    check_logits,
    check_pair,
    device_of,
    evaluating,
    model_input,
    model_name,
    on_device,
    steps_in,
)
from .rich_output import make_table, progress_bar


@dataclass(frozen=True, eq=False)
class CorruptionReport:
    """The result of ``corruption_study``."""

    model: str
    dataset: str
    split: str
    samples: int
    seed: int
    kinds: tuple[str, ...]
    severities: tuple[int, ...]
    clean: float
    """Accuracy on the images as they are."""
    accuracy: Tensor
    """Float64 [kinds, severities]."""
    ece: Tensor
    """Expected calibration error, [kinds, severities]."""
    nonfinite: Tensor
    """Long [kinds, severities]: samples whose logits were NaN or infinite; they count as wrong."""

    @property
    def by_kind(self) -> dict[str, float]:
        return dict(zip(self.kinds, self.accuracy.mean(1).tolist(), strict=True))

    @property
    def mean_accuracy(self) -> float:
        return float(self.accuracy.mean())

    def to_dict(self) -> dict[str, Any]:
        found = {k: getattr(self, k) for k in ("model", "dataset", "split", "samples", "seed")}
        kinds = {
            kind: {
                "accuracy": self.accuracy[i],
                "mean_accuracy": mean,
                "ece": self.ece[i],
                "nonfinite": self.nonfinite[i],
            }
            for i, (kind, mean) in enumerate(self.by_kind.items())
        }
        found |= {"severities": self.severities, "clean_accuracy": self.clean}
        return dict(json_value({**found, "mean_accuracy": self.mean_accuracy, "kinds": kinds}))

    def table(self) -> Any:
        rows = []
        for kind, values, ece, lost in zip(
            self.kinds, self.accuracy, self.ece, self.nonfinite.sum(1).tolist(), strict=True
        ):
            note = f" ({lost} not finite)" if lost else ""
            cells = [f"{100 * float(a):.1f}" for a in (*values, values.mean())]
            rows.append([kind + note, *cells, f"{float(ece.mean()):.3f}"])
        return make_table(
            f"{self.model} on {self.dataset} ({self.split}), corrupted: accuracy in %",
            ["corruption", *map(str, self.severities), "mean", "ECE"],
            rows,
            boxed=True,
            caption=f"clean {100 * self.clean:.2f}, mean under corruption "
            f"{100 * self.mean_accuracy:.2f}; {self.samples:,} samples, seed {self.seed}",
        )

    def save(self, folder: Path | str) -> list[Path]:
        """Write corruptions.json and corruptions.png into ``folder`` (made if missing)."""
        out = Path(folder)
        title = (
            f"{self.model} on {self.dataset} ({self.split}): clean {100 * self.clean:.1f}% (line), "
            f"mean under corruption {100 * self.mean_accuracy:.1f}%"
        )
        cells = (self.accuracy, self.clean, self.kinds, self.severities)
        return [
            write_json(out / "corruptions.json", self.to_dict()),
            save_accuracies(*cells, out / "corruptions.png", title),
        ]


@torch.no_grad()
def corruption_study(
    model: nn.Module,
    dataset: ImageData,
    kinds: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> CorruptionReport:
    """Accuracy and calibration on every corruption (None: all 19) at every severity.

    Images are read once and corrupted on the device, as ``corrupt`` does it with this ``seed``,
    then normalized. Samples with logits that are not finite count as wrong.
    """
    names, levels = check_kinds(kinds), check_severities(severities)
    model = on_device(model, device)
    check_pair(model, dataset, task="classification")
    cells = [(kind, severity) for kind in names for severity in levels]
    meters = {cell: ClassificationMeter(len(dataset.classes)) for cell in [None, *cells]}
    total, name = steps_in(dataset, batch_size) * len(meters), model_name(model)
    with progress_bar(total, "clean", progress) as advance, evaluating(model):
        for images, y in batches(dataset, batch_size, device_of(model)):
            for cell, meter in meters.items():
                shown = images if cell is None else corrupt(images, *cell, seed=seed)
                logits = model(model_input(model, dataset, shown))
                meter.update(check_logits(logits, dataset, name), y)
                advance("clean" if cell is None else " ".join(map(str, cell)))
    found = {cell: meter.compute() for cell, meter in meters.items()}

    def table(values: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype).view(len(names), len(levels))

    return CorruptionReport(
        model=name,
        dataset=dataset.name,
        split=dataset.split_name,
        samples=len(dataset),
        seed=seed,
        kinds=names,
        severities=levels,
        clean=found[None].accuracy,
        accuracy=table([found[c].accuracy for c in cells]),
        ece=table([found[c].ece for c in cells]),
        nonfinite=table([len(found[c].nonfinite) for c in cells], torch.long),
    )
