"""The reports of a comparison in a few numbers: a table for the eye, one column a layer."""

from __future__ import annotations

from .comparing import Comparison
from .feature_map import FeatureMapReport
from .lipschitz import LipschitzReport
from .margin import MarginReport
from .report import Report, number
from .similarity import SimilarityReport

__all__ = ["summary"]

_SMALL = 1e-6


def summary(comparison: Comparison) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(layers, rows): the layers in order, and for each number its name and a text a layer."""
    layers = list(dict.fromkeys(report.layer for report in comparison.reports))
    rows: dict[str, dict[str, str]] = {}
    for report in comparison.reports:
        for name, text in _numbers(report):
            rows.setdefault(name, {})[report.layer] = text
    return layers, [(name, [found.get(a, "–") for a in layers]) for name, found in rows.items()]


def _numbers(report: Report) -> list[tuple[str, str]]:
    if isinstance(report, MarginReport):
        note = " (heuristic)" if report.heuristic else ""
        return [
            ("Prop 2, error ≤, as printed", number(report.total(report.printed_excess)) + note),
            ("Prop 2, error ≤, as derived", number(report.total(report.derived_excess)) + note),
            ("Prop 2, error ≤, ours", number(report.total(report.ours_excess))),
            ("Prop 2, empirical margin loss", number(report.empirical)),
        ]
    if isinstance(report, LipschitzReport):
        return [
            ("Prop 3, Lipschitz ≤, Eq 11/12", number(report.printed)),
            ("Prop 3, Lipschitz ≤, ours", number(report.ours)),
            ("Prop 3, Lipschitz ≤, ours, local", number(report.local)),
            ("Prop 3, Lipschitz, measured", number(report.measured)),
        ]
    if isinstance(report, SimilarityReport):
        kappa = f"{report.kappa[0]:.3g} ± {report.error[0]:.1g}"
        broken = sum(report.violated)
        return [
            ("Prop 4, κ of the first pair", kappa),
            ("Prop 4, κ ≤, Eq 14/15", number(report.printed[0])),
            ("Prop 4, κ ≤, ours", number(report.ours[0])),
            ("Prop 4, pairs that break it", f"{broken} of {len(report.kappa)}"),
        ]
    if isinstance(report, FeatureMapReport):
        needed = next(
            (k for k, e in zip(report.terms, report.error, strict=True) if e < _SMALL), None
        )
        return [("Prop 1, terms for 1e-6", number(needed))]
    return []
