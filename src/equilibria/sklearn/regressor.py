"""A regressor: a linear head on the equilibrium, squared loss on standardized targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import validate_data
from torch import Tensor

from .base import FLOATS, Array, BaseEquilibrium, Rows


class EquilibriumRegressor(RegressorMixin, BaseEquilibrium):  # type: ignore[misc]
    """ŷ = scale·(Vz* + a) + mean, z* the equilibrium of a layer at the standardized x.

        model = eq.sklearn.EquilibriumRegressor(random_state=0).fit(X, y)
        model.score(X, y)  # R²

    X and y are standardized inside; y may have several columns. Rows of weight zero are left out
    of training, and as long as all rows fit one batch a row of weight k is the same as k rows.

    Args:
        hidden, …, verbose: as for ``EquilibriumClassifier``, which has ``class_weight`` too.

    Attributes:
        n_outputs_: columns of y.
        loss_curve_, loss_: mean training loss of each epoch (½ squared error of the standardized
            targets), and of the last.
        validation_scores_: held-out R² after each epoch, with ``early_stopping``.
        n_iter_, module_, …: as for ``EquilibriumClassifier``.
    """

    n_outputs_: int

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> EquilibriumRegressor:
        """Train anew on X [n, features] and targets y [n] or [n, outputs]."""
        x, target, weight = self._checked(X, y, sample_weight, reset=True)
        self._fit(x, target, weight, self.n_outputs_)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> EquilibriumRegressor:
        """One pass over X and y, from where the last call (or ``fit``) ended.

        The standardization of X and y grows with the rows that were seen; the learning rate is
        constant.
        """
        first = not hasattr(self, "module_")
        x, target, weight = self._checked(X, y, sample_weight, reset=first)
        if target.shape[1] != self.n_outputs_:
            raise ValueError(
                f"y has {target.shape[1]} columns, and the first call of partial_fit had "
                f"{self.n_outputs_}."
            )
        self._partial_fit(x, target, weight, self.n_outputs_, first)
        return self

    def predict(self, X: Any) -> Array:
        """ŷ for each row, [n] or [n, outputs] as y was."""
        made = self._predicted(X)
        restored: Array = self._target_scaler.inverse_transform(made)
        return restored[:, 0] if self._flat else restored

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _checked(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool
    ) -> tuple[Array, Array, Array]:
        """Rows, targets [n, outputs] and weights; with ``reset`` the columns of y are these."""
        kinds: dict[str, Any] = {"multi_output": True, "y_numeric": True}
        x, y = validate_data(self, X, y, dtype=FLOATS, reset=reset, **kinds)
        target, weight = np.asarray(y, dtype=np.float64), self._weights(sample_weight, x)
        if reset:
            self._flat = target.ndim == 1
            self._target_scaler = StandardScaler()
            self.n_outputs_ = 1 if self._flat else target.shape[1]
        return x, target.reshape(len(x), -1), weight

    def _look(self, x: Array, y: Array, weight: Array) -> None:
        super()._look(x, y, weight)
        self._target_scaler.partial_fit(y, sample_weight=weight)

    def _encode(self, y: Array) -> Array:
        made: Array = self._target_scaler.transform(y)
        return made

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (output - target).square().mean(1)

    def _held_out_score(self, output: Tensor, rows: Rows) -> float:
        weight = rows.weight[:, None] / rows.weight.sum()
        error, spread = (
            (weight * (rows.y - other).square()).sum(0)
            for other in (output, (weight * rows.y).sum(0))
        )
        # As r2_score: the mean over the columns, 0 for one that is constant.
        return float(torch.where(spread > 0.0, 1.0 - error / spread, 0.0).mean())
