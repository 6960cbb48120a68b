"""The tables of a report, for rich."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from equilibria.problems import CompositeCertificate, Guaranteed

from .certifying import certificate_dict
from .extras import rich_module
from .solver_statistics import SolverStatistics, layer_label

if TYPE_CHECKING:
    from .report import Report

__all__ = [
    "certificate_table",
    "metrics_table",
    "number",
    "percent",
    "solver_table",
    "summary_line",
]

_SHARES = ("accuracy", "pixel accuracy", "mIoU", "agreement")


def percent(value: float) -> str:
    return "–" if value != value else f"{100 * value:.2f}%"


def number(value: Any, digits: int = 4) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return "–"
    if isinstance(value, dict):
        return number(value["max"], digits)
    return f"{value:.{digits}g}"


def _narrow(title: str) -> Any:
    """A table without edges: seven columns and a layer's whole name fit into 80."""
    rich = rich_module()
    return rich.table.Table(
        title=title,
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def _cell(name: str, value: float) -> str:
    return percent(value) if name in _SHARES or name.startswith("top-") else f"{value:.4f}"


def metrics_table(report: Report) -> Any:
    """The headline numbers; in columns of their own those at the equilibria and with flip."""
    rich = rich_module()
    converged = report.converged
    columns = {"as it is": report.metrics}
    if converged is not None:
        columns["at equilibrium"] = converged.metrics
    if report.flip is not None:
        columns["with flip"] = report.flip
    title = f"{report.model} on {report.dataset} ({report.split})"
    table = rich.table.Table(title=title, min_width=len(title))
    for name in ("", *columns) if len(columns) > 1 else ("", "value"):
        table.add_column(name, justify="right" if name else "left")
    for name in report.metrics.headline:
        table.add_row(name, *(_cell(name, part.headline[name]) for part in columns.values()))
    if converged is not None:
        table.add_row("same prediction", "", percent(converged.agreement))
    bad = [len(part.nonfinite) for part in columns.values()]
    if any(bad):
        table.add_row("not finite", *(f"{count:,} samples" for count in bad))
    return table


def summary_line(report: Report) -> str:
    """What stands under the table."""
    samples = f"{report.metrics.samples:,} samples, {len(report.classes)} classes"
    return f"{samples}; {report.parameters:,} parameters; {report.seconds:.1f} s on {report.device}"


def solver_table(report: Report) -> Any:
    """Steps, residuals and shares of every layer."""
    table = _narrow("solves")
    table.add_column("layer", overflow="fold")
    table.add_column("solver", overflow="fold")
    names = ("steps", "residual", "at 95%", "converged", "≤ 1e-3")
    for name in names:
        table.add_column(name, justify="right")
    columns: list[Mapping[str, SolverStatistics]] = [report.statistics]
    if report.converged is not None:
        columns.append(report.converged.statistics)
    for statistics in columns:
        for name, part in statistics.items():
            steps = f"{part.mean_steps:.4g}"
            if not part.fixed_steps:
                steps += f" (max {part.max_steps})"
            table.add_row(
                layer_label(name),
                part.solver.split("(")[0] + (f"\n→ {part.chosen}" if part.chosen else ""),
                steps,
                number(float(part.residual[3]), 2),
                number(float(part.residual[5]), 2),
                "fixed steps" if part.fixed_steps else percent(part.converged),
                percent(part.settled),
            )
        table.add_section()
    return table


def _proven(part: Mapping[str, Any]) -> str:
    """How far the row is a proof; where there is no guarantee, of nothing."""
    if part["kind"] == "none":
        return "nothing"
    return "yes" if part["rigorous"] else "partly"


def certificate_table(
    certificate: CompositeCertificate | Mapping[str, Guaranteed],
) -> Any:
    """What is proven of every layer: guarantee, share unique, worst bound on the error."""
    found = certificate_dict(certificate)
    samples = max((part["samples"] for part in found.values()), default=0)
    table = _narrow(f"certificates ({samples} samples)")
    table.add_column("layer", overflow="fold")
    table.add_column("guarantee", min_width=11)
    for name in ("unique", "ρ ≤", "‖z − z*‖ ≤", "Lipschitz"):
        table.add_column(name, justify="right")
    table.add_column("proven")
    for name, part in found.items():
        table.add_row(
            name,
            part["kind"],
            "–" if part["unique"] is None else percent(part["unique"]),
            number(part["contraction"]),
            number(part["error_bound"], 3),
            number(part["lipschitz"]),
            _proven(part),
        )
    return table
