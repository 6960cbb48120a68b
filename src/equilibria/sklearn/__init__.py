"""Equilibrium networks for people who know scikit-learn: ``fit``, ``predict``, pipelines, grids."""

from equilibria.engine.optional import needs

with needs("scikit-learn", "equilibria.sklearn"):
    import sklearn  # noqa: F401

from .classifier import EquilibriumClassifier
from .regressor import EquilibriumRegressor

__all__ = ["EquilibriumClassifier", "EquilibriumRegressor"]
