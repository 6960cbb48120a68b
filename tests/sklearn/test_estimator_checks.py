"""scikit-learn's own battery, all of it, for both estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from equilibria.sklearn import EquilibriumClassifier, EquilibriumRegressor

SMALL: dict[str, Any] = {"hidden": 8, "max_iter": 15, "lr": 0.05}


@parametrize_with_checks([EquilibriumClassifier(**SMALL), EquilibriumRegressor(**SMALL)])
def test_small(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([EquilibriumClassifier(), EquilibriumRegressor()])
def test_defaults(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [
        # Other seeds may warn: of 600 trainings of "opteq" W ran far beyond its bound in 15.
        made(layer=layer, hidden=16, max_iter=30, lr=0.03, random_state=0)
        for made in (EquilibriumClassifier, EquilibriumRegressor)
        for layer in ("opteq", "deep_opteq", "explicit")
    ]
)
def test_other_layers(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)
