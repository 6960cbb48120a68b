"""What is proven about an answer: uniqueness, distance from the exact one, dependence on the input.

Certificates of problems, of maps and of layers, in float64, rounding included. The bounds of a
kernel, a prior, an operator or a regularizer are its own (``problems``): here they are asked for.
"""

from .certificate import Certificate, Numbers, global_lipschitz, local_lipschitz
from .error_bounds import tight_curvature
from .gap import GapCertificate
from .guarantee import Guarantee, Guaranteed
from .label import LabelCertificate, LabelStopping
from .map_certificate import CompositeCertificate, MapCertificate
from .network import Enclosed, NetworkCertificate, certify, certify_network

__all__ = [
    "Certificate",
    "CompositeCertificate",
    "Enclosed",
    "GapCertificate",
    "Guarantee",
    "Guaranteed",
    "LabelCertificate",
    "LabelStopping",
    "MapCertificate",
    "NetworkCertificate",
    "Numbers",
    "certify",
    "certify_network",
    "global_lipschitz",
    "local_lipschitz",
    "tight_curvature",
]
