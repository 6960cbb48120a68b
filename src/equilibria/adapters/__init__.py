"""Problems of other libraries as problems of this one, and back. Each needs that library."""

from .cvxpy import from_cvxpy, to_cvxpy

__all__ = ["from_cvxpy", "to_cvxpy"]
