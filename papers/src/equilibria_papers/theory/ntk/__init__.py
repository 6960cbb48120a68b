"""The empirical neural tangent kernel of any model: the kernel, its spectrum, its training."""

from .dynamics import LinearCurve, TrainingComparison, compare_training, linear_gradient_descent
from .kernel import TangentKernel, empirical_ntk
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
