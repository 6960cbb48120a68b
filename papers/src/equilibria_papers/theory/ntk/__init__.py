"""The empirical neural tangent kernel of any model: the kernel, its spectrum, its training."""

from .kernel import TangentKernel, empirical_ntk
from .spectrum import (
    LinearCurve,
    Spectrum,
    TrainingComparison,
    compare_training,
    kernel_alignment,
    kernel_distance,
    kernel_drift,
    label_alignment,
    linear_gradient_descent,
    spectrum,
)
from .study import KernelStudy, study_kernels

__all__ = [
    "KernelStudy",
    "LinearCurve",
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
    "spectrum",
    "study_kernels",
]
