"""The empirical neural tangent kernel of any model: the kernel and its spectrum."""

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
    "Spectrum",
    "TangentKernel",
    "empirical_ntk",
    "kernel_alignment",
    "kernel_distance",
    "kernel_drift",
    "label_alignment",
    "spectrum",
    "study_kernels",
]
