"""The propositions of GEQ and KerDEQ as calculators: from a layer and data, GEQ beside OptEq.

``feature_map_report`` (Proposition 1, KerDEQ Theorem 1), ``margin_report`` (Proposition 2, KerDEQ
Theorem 2, Remark 1), ``lipschitz_report`` (Proposition 3, Remark 2), ``similarity_report``
(Proposition 4, KerDEQ Theorem 3, Remark 3); ``compare_bounds`` and ``network_bounds`` run them all.
Each report has the numbers, what they are made of, which assumptions hold, and our own bounds.
"""

from .comparing import (
    Comparison,
    Demonstration,
    compare_bounds,
    demonstration_pair,
    digit_vectors,
    fresh_pair,
    layer_inputs,
    network_bounds,
    summary,
)
from .curves import (
    Curves,
    Line,
    demonstration_curves,
    draw_curves,
    lipschitz_curves,
    margin_curves_norm,
    margin_curves_width,
    network_curves,
    rescaled,
    similarity_curves,
)
from .feature_map import FeatureMapReport, feature_map_report
from .layer_numbers import LayerNumbers, measure_layer, measured_around, measured_pairs
from .lipschitz import LipschitzReport, eq11, eq12, lipschitz_report, ours_at_the_data, remark2
from .margin import MarginReport, margin_loss, margin_report
from .report import (
    Assumption,
    AssumptionError,
    Report,
    kerdeq_remark1,
    remark1,
    remark1_ratios,
    remark3,
)
from .similarity import (
    SimilarityReport,
    arc_cosine,
    eq14,
    eq15,
    eq48,
    kerdeq_eq10,
    similarity_report,
)

__all__ = [
    "Assumption",
    "AssumptionError",
    "Comparison",
    "Curves",
    "Demonstration",
    "FeatureMapReport",
    "LayerNumbers",
    "Line",
    "LipschitzReport",
    "MarginReport",
    "Report",
    "SimilarityReport",
    "arc_cosine",
    "compare_bounds",
    "demonstration_curves",
    "demonstration_pair",
    "digit_vectors",
    "draw_curves",
    "eq11",
    "eq12",
    "eq14",
    "eq15",
    "eq48",
    "feature_map_report",
    "fresh_pair",
    "kerdeq_eq10",
    "kerdeq_remark1",
    "layer_inputs",
    "lipschitz_curves",
    "lipschitz_report",
    "margin_curves_norm",
    "margin_curves_width",
    "margin_loss",
    "margin_report",
    "measure_layer",
    "measured_around",
    "measured_pairs",
    "network_bounds",
    "network_curves",
    "ours_at_the_data",
    "remark1",
    "remark1_ratios",
    "remark2",
    "remark3",
    "rescaled",
    "similarity_curves",
    "similarity_report",
    "summary",
]
