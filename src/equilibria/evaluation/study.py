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

from .corruptions import SEVERITIES, Scale, check_kinds, check_severities, corrupt
from .extras import matplotlib_figure, rich_module
from .metrics import ClassificationMeter
from .pictures import BLUE, ORANGE, save_figure
from .plain import plain, write_json
from .running import (
    batches,
    check_logits,
    check_pair,
    device_of,
    evaluating,
    model_input,
    model_name,
    on_device,
    progress_bar,
    steps_in,
)

__all__ = ["CorruptionReport", "corruption_study"]


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
        """Mean over the severities."""
        return dict(zip(self.kinds, self.accuracy.mean(1).tolist(), strict=True))

    @property
    def mean_accuracy(self) -> float:
        """Mean over kinds and severities."""
        return float(self.accuracy.mean())

    def mean_corruption_error(self, baseline: CorruptionReport) -> float:
        """mCE against ``baseline``: mean over kinds of Σ_s error_s/Σ_s error_s of the baseline."""
        if (baseline.kinds, baseline.severities) != (self.kinds, self.severities):
            raise ValueError("the baseline must have the same kinds and severities.")
        own, other = ((1.0 - r.accuracy).sum(1) for r in (self, baseline))
        if bool((other == 0).any()):
            raise ValueError("the baseline makes no error on some corruption: mCE divides by it.")
        return float((own / other).mean())

    def to_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = plain(
            {
                "model": self.model,
                "dataset": self.dataset,
                "split": self.split,
                "samples": self.samples,
                "seed": self.seed,
                "severities": self.severities,
                "clean_accuracy": self.clean,
                "mean_accuracy": self.mean_accuracy,
                "kinds": {
                    kind: {
                        "accuracy": self.accuracy[i],
                        "mean_accuracy": float(self.accuracy[i].mean()),
                        "ece": self.ece[i],
                        "nonfinite": self.nonfinite[i],
                    }
                    for i, kind in enumerate(self.kinds)
                },
            }
        )
        return made

    def table(self) -> Any:
        """For ``rich.print``."""
        table = rich_module().table.Table(
            title=f"{self.model} on {self.dataset} ({self.split}), corrupted: accuracy in %",
            caption=f"clean {100 * self.clean:.2f}, mean under corruption "
            f"{100 * self.mean_accuracy:.2f}; {self.samples:,} samples, seed {self.seed}",
        )
        table.add_column("corruption")
        for severity in self.severities:
            table.add_column(str(severity), justify="right")
        table.add_column("mean", justify="right")
        table.add_column("ECE", justify="right")
        for i, kind in enumerate(self.kinds):
            cells = [f"{100 * float(a):.1f}" for a in self.accuracy[i]]
            mean = f"{100 * float(self.accuracy[i].mean()):.1f}"
            lost = int(self.nonfinite[i].sum())
            note = f" ({lost} not finite)" if lost else ""
            table.add_row(kind + note, *cells, mean, f"{float(self.ece[i].mean()):.3f}")
        return table

    def save(self, folder: Path | str) -> list[Path]:
        """Write corruptions.json and corruptions.png into ``folder`` (made if missing)."""
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        return [
            write_json(self.to_dict(), out / "corruptions.json"),
            self._picture(out / "corruptions.png"),
        ]

    def _picture(self, path: Path) -> Path:
        """Left the mean of each kind against the clean accuracy, right every severity."""
        rows = len(self.kinds)
        figure = matplotlib_figure(9.5, max(2.6, 1.5 + 0.27 * rows))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.3, 1.0])
        places = range(rows)
        left.barh(places, (100 * self.accuracy.mean(1)).tolist(), color=BLUE)
        left.axvline(100 * self.clean, color=ORANGE, linewidth=2)
        left.set_yticks(places, [kind.replace("_", " ") for kind in self.kinds], fontsize=8)
        left.set(xlim=(0, 101), xlabel="accuracy in %, mean over severities")
        left.set_ylim(rows - 0.4, -0.6)
        shown = right.imshow(
            (100 * self.accuracy).tolist(), vmin=0, vmax=100, cmap="viridis", aspect="auto"
        )
        for i in places:
            for j in range(len(self.severities)):
                value = 100 * float(self.accuracy[i, j])
                color = "black" if value > 60 else "white"
                right.text(j, i, f"{value:.0f}", ha="center", va="center", color=color, fontsize=7)
        right.set_xticks(range(len(self.severities)), [str(s) for s in self.severities])
        right.set_xlabel("severity")
        figure.colorbar(shown, ax=right, label="accuracy in %")
        figure.suptitle(
            f"{self.model} on {self.dataset} ({self.split}): clean {100 * self.clean:.1f}% (line), "
            f"mean under corruption {100 * self.mean_accuracy:.1f}%",
            fontsize=10,
        )
        return save_figure(figure, path)


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
    scale: Scale | None = None,
    progress: bool = True,
) -> CorruptionReport:
    """Accuracy and calibration on every corruption (None: all 19) at every severity.

    Images are corrupted on the device, as ``corrupt`` does it with this ``seed`` and ``scale``,
    then normalized. The images are read once; samples with logits that are not finite count as
    wrong and are listed.
    """
    names, levels = check_kinds(kinds), check_severities(severities)
    model = on_device(model, device)
    check_pair(model, dataset, task="classification")
    at, label = device_of(model), model_name(model)
    classes = len(dataset.classes)
    cells = [(kind, severity) for kind in names for severity in levels]
    meters = {cell: ClassificationMeter(classes) for cell in [None, *cells]}
    steps = steps_in(dataset, batch_size) * len(meters)
    with evaluating(model), progress_bar(steps, "clean", progress) as advance:
        for images, y in batches(dataset, batch_size, at):
            for cell, meter in meters.items():
                changed = images
                if cell is not None:
                    changed = corrupt(images, cell[0], cell[1], seed=seed, scale=scale)
                x = model_input(model, dataset, changed)
                meter.update(check_logits(model(x), dataset, classes, label), y)
                advance("clean" if cell is None else f"{cell[0]} {cell[1]}")
    found = {cell: meter.compute() for cell, meter in meters.items()}
    shape = (len(names), len(levels))
    return CorruptionReport(
        model=label,
        dataset=dataset.name,
        split=dataset.split_name,
        samples=len(dataset),
        seed=seed,
        kinds=names,
        severities=levels,
        clean=found[None].accuracy,
        accuracy=torch.tensor([found[c].accuracy for c in cells], dtype=torch.float64).view(shape),
        ece=torch.tensor([found[c].ece for c in cells], dtype=torch.float64).view(shape),
        nonfinite=torch.tensor([len(found[c].nonfinite) for c in cells]).view(shape),
    )
