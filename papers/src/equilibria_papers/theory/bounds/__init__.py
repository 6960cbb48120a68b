"""The propositions of GEQ and KerDEQ as calculators: from a layer and data, GEQ beside OptEq.

``feature_map_report`` (Proposition 1, KerDEQ Theorem 1), ``margin_report`` (Proposition 2, KerDEQ
Theorem 2, Remark 1), ``lipschitz_report`` (Proposition 3, Remark 2), ``similarity_report``
(Proposition 4, KerDEQ Theorem 3, Remark 3); ``compare_bounds`` and ``network_bounds`` run them all.
Each report has the numbers, what they are made of, which assumptions hold, and our own bounds. The
papers' formulas are in the modules of the same names.
"""

from .comparing import Comparison, Demonstration, compare_bounds, demonstration_pair, network_bounds
from .curves import Curves, demonstration_curves, draw_curves
from .feature_map import FeatureMapReport, feature_map_report
from .lipschitz import LipschitzReport, lipschitz_report
from .margin import MarginReport, margin_report
from .report import Assumption, AssumptionError, Report
from .similarity import SimilarityReport, similarity_report

__all__ = [
    "Assumption",
    "AssumptionError",
    "Comparison",
    "Curves",
    "Demonstration",
    "FeatureMapReport",
    "LipschitzReport",
    "MarginReport",
    "Report",
    "SimilarityReport",
    "compare_bounds",
    "demonstration_curves",
    "demonstration_pair",
    "draw_curves",
    "feature_map_report",
    "lipschitz_report",
    "margin_report",
    "network_bounds",
    "similarity_report",
]
