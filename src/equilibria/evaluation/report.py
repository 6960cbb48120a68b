"""What an evaluation found: to print (rich), to read (numbers), to save (JSON and pictures)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from equilibria.problems import CompositeCertificate, Guaranteed

from .certifying import certificate_dict
from .extras import rich_module
from .metrics import ClassificationMetrics
from .pictures import save_confusion, save_per_class, save_reliability, save_steps
from .plain import plain, write_json
from .segmentation import SegmentationMetrics
from .solver_statistics import SolverStatistics
from .tables import certificate_table, metrics_table, solver_table, summary_line

__all__ = ["Converged", "Metrics", "Report"]

Metrics: TypeAlias = ClassificationMetrics | SegmentationMetrics


@dataclass(frozen=True, eq=False)
class Converged:
    """The same network with every layer solved by ``solver``."""

    solver: str
    metrics: Metrics
    statistics: Mapping[str, SolverStatistics]
    agreement: float
    """Share of predictions (of pixels, for segmentation) that are those of the model as it is."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "solver": self.solver,
            "agreement": self.agreement,
            "metrics": self.metrics.to_dict(),
            "layers": {name: part.to_dict() for name, part in self.statistics.items()},
        }


@dataclass(frozen=True, eq=False)
class Report:
    """The result of ``evaluate``."""

    model: str
    dataset: str
    split: str
    task: str
    classes: tuple[str, ...]
    parameters: int
    device: str
    seconds: float
    """Of all passes: also those at the equilibria and of mirror images, if asked for."""
    metrics: Metrics
    statistics: Mapping[str, SolverStatistics]
    """Of each equilibrium layer, by name; empty for a network without any."""
    converged: Converged | None
    """With the solver that was asked for, or None."""
    certificate: CompositeCertificate | Mapping[str, Guaranteed] | None
    """On the first samples, or None where none was asked for or there are no layers."""
    flip: Metrics | None = None
    """With test-time flip (the mean of the probabilities of each image and its mirror image), or
    None where it was not asked for. ``metrics`` and ``accuracy`` are always without."""
    notes: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float:
        """Share of right predictions (of pixels, for segmentation)."""
        return self.metrics.accuracy

    def table(self) -> Any:
        """For ``rich.print``: the metrics, and beneath them the solvers and the certificates."""
        rich = rich_module()
        parts: list[Any] = [metrics_table(self), summary_line(self)]
        if self.statistics:
            parts += ["", solver_table(self)]
        if self.certificate is not None:
            parts += ["", certificate_table(self.certificate)]
        parts += [f"note: {note}" for note in self.notes]
        return rich.console.Group(*parts)

    def __str__(self) -> str:
        """The table as plain text, 100 columns wide."""
        rich = rich_module()
        console = rich.console.Console(width=100, color_system=None, legacy_windows=False)
        with console.capture() as captured:
            console.print(self.table(), highlight=False, markup=False)
        return str(captured.get()).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """All numbers in types that JSON has; what is not finite is None."""
        found = {
            "model": self.model,
            "dataset": self.dataset,
            "split": self.split,
            "task": self.task,
            "classes": self.classes,
            "parameters": self.parameters,
            "device": self.device,
            "seconds": self.seconds,
            "metrics": self.metrics.to_dict(),
            "layers": {name: part.to_dict() for name, part in self.statistics.items()},
            "converged": None if self.converged is None else self.converged.to_dict(),
            "flip": None if self.flip is None else self.flip.to_dict(),
            "certificates": None
            if self.certificate is None
            else certificate_dict(self.certificate),
            "notes": self.notes,
        }
        made: dict[str, Any] = plain(found)
        return made

    def save(self, folder: Path | str) -> list[Path]:
        """Write report.json and the pictures into ``folder`` (made if missing); what was written.

        reliability.png (classification), confusion.png, per_class.png, solver.png (where there are
        equilibrium layers), certificate.txt (where there is one). The pictures are of the plain
        metrics; those with flip are in report.json.
        """
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        written = [write_json(self.to_dict(), out / "report.json")]
        title = f"{self.model} on {self.dataset} ({self.split})"
        metrics = self.metrics
        if isinstance(metrics, ClassificationMetrics):
            written.append(save_reliability(metrics.reliability, out / "reliability.png", title))
            values, what = metrics.per_class, "accuracy"
        else:
            values, what = metrics.iou, "IoU"
        written.append(
            save_confusion(metrics.confusion, self.classes, out / "confusion.png", title)
        )
        written.append(save_per_class(values, self.classes, what, out / "per_class.png", title))
        if self.statistics:
            written.append(save_steps(self, out / "solver.png", title))
        if self.certificate is not None:
            text = out / "certificate.txt"
            shown = (
                str(self.certificate)
                if isinstance(self.certificate, CompositeCertificate)
                else "\n".join(f"{name}: {part}" for name, part in self.certificate.items())
            )
            text.write_text(shown + "\n", encoding="utf-8")
            written.append(text)
        return written
