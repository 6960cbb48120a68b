"""How good is a trained network: accuracy, calibration, robustness, certificates, speed.

What belongs here judges a model that is given, and leaves it as it is. What changes weights is in
``training``; what is proven of one layer is in ``certify``.
"""

from equilibria.models import Prediction

from . import timing
from .certified_accuracy import CertifiedAccuracy, attacked_accuracy, certified_accuracy
from .corruption_report import CorruptionReport, corruption_study
from .corruptions import CORRUPTIONS, corrupt
from .evaluation_report import Converged, Report, evaluate
from .explanation import Explanation, SolvedLayer, explain
from .explanation_html import explanation_page
from .explorer import Explorer, explorer_app
from .figures import save_corruption_sheet, save_gradcam
from .label_stopping import LabelStopped
from .layer_solvers import SolverStatistics, replaced, with_solver
from .metrics import (
    ClassificationMetrics,
    NonFiniteError,
    Reliability,
    SegmentationMetrics,
    classification_metrics,
    segmentation_metrics,
)
from .model_certificate import certify_dataset, certify_model
from .model_on_data import batches, check_pair, evaluating, model_input
from .predictions import predict_files
from .saliency import gradcam
from .timing import profile_model
from .training_report import write_training_report

# fmt: off
__all__ = [
    "CORRUPTIONS", "CertifiedAccuracy", "ClassificationMetrics", "Converged", "CorruptionReport",
    "Explanation", "Explorer", "LabelStopped", "NonFiniteError", "Prediction", "Reliability",
    "Report", "SegmentationMetrics", "SolvedLayer", "SolverStatistics", "attacked_accuracy",
    "batches", "certified_accuracy", "certify_dataset", "certify_model", "check_pair",
    "classification_metrics", "corrupt", "corruption_study", "evaluate", "evaluating", "explain",
    "explanation_page", "explorer_app", "gradcam", "model_input", "predict_files", "profile_model",
    "replaced", "save_corruption_sheet", "save_gradcam", "segmentation_metrics", "timing",
    "with_solver", "write_training_report",
]
# fmt: on
