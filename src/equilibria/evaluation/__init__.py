"""How good is a trained network: accuracy, calibration, robustness, certificates."""

from .calibration import Reliability
from .certifying import certify_dataset, certify_model
from .corruptions import CORRUPTIONS, corrupt
from .judging import evaluate
from .metrics import ClassificationMetrics, NonFiniteError, classification_metrics
from .predicting import Prediction, predict_files
from .report import Converged, Report
from .running import batches, evaluating, model_input
from .saliency import gradcam
from .saliency_picture import save_gradcam
from .segmentation import SegmentationMetrics, segmentation_metrics
from .sheet import save_corruption_sheet
from .solver_statistics import SolverStatistics
from .solving import replaced, with_solver
from .study import CorruptionReport, corruption_study
from .superclass import SuperclassResult, superclass_accuracy, superclass_split
from .unknown import KnownUnknown, known_unknown_kl, select_classes

__all__ = [
    "CORRUPTIONS",
    "ClassificationMetrics",
    "Converged",
    "CorruptionReport",
    "KnownUnknown",
    "NonFiniteError",
    "Prediction",
    "Reliability",
    "Report",
    "SegmentationMetrics",
    "SolverStatistics",
    "SuperclassResult",
    "batches",
    "certify_dataset",
    "certify_model",
    "classification_metrics",
    "corrupt",
    "corruption_study",
    "evaluate",
    "evaluating",
    "gradcam",
    "known_unknown_kl",
    "model_input",
    "predict_files",
    "replaced",
    "save_corruption_sheet",
    "save_gradcam",
    "segmentation_metrics",
    "select_classes",
    "superclass_accuracy",
    "superclass_split",
    "with_solver",
]
