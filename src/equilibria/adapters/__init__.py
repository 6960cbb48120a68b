"""Problems of other libraries as problems of this one, and back. Each needs that library."""

from .cvxpy import from_cvxpy, to_cvxpy
from .deepinv import DeepinvFixedPoint, DeepinvPrior, from_deepinv

__all__ = ["DeepinvFixedPoint", "DeepinvPrior", "from_cvxpy", "from_deepinv", "to_cvxpy"]
