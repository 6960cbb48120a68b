"""The 19 corruptions of ImageNet-C at five severities, in batches, on any device."""

from .corrupting import CORRUPTIONS, check_kinds, check_severities, corrupt
from .severities import SEVERITIES, Scale

__all__ = ["CORRUPTIONS", "SEVERITIES", "Scale", "check_kinds", "check_severities", "corrupt"]
