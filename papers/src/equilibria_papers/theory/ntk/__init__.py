"""The empirical neural tangent kernel of any model: the kernel, its spectrum, its training."""

from .dynamics import (
    LinearCurve,
    TrainingComparison,
    compare_training,
    linear_gradient_descent,
    linear_gradient_flow,
)
from .kernel import Projection, TangentKernel, empirical_ntk
from .spectrum import (
    Spectrum,
    kernel_alignment,
    kernel_distance,
    kernel_drift,
    label_alignment,
    spectrum,
)
from .study import KernelStudy, study_kernels

__all__ = [
    "KernelStudy",
    "LinearCurve",
    "Projection",
    "Spectrum",
    "TangentKernel",
    "TrainingComparison",
    "compare_training",
    "empirical_ntk",
    "kernel_alignment",
    "kernel_distance",
    "kernel_drift",
    "label_alignment",
    "linear_gradient_descent",
    "linear_gradient_flow",
    "spectrum",
    "study_kernels",
]
