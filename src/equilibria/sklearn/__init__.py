"""Equilibrium networks for people who know scikit-learn: ``fit``, ``predict``, pipelines, grids."""

try:
    import sklearn  # noqa: F401
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ImportError(
        'equilibria.sklearn needs scikit-learn, which is an extra: pip install "equilibria[train]"'
    ) from error

from .classifier import EquilibriumClassifier
from .regressor import EquilibriumRegressor

__all__ = ["EquilibriumClassifier", "EquilibriumRegressor"]
