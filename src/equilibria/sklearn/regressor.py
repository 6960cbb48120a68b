"""A regressor: a linear head on the equilibrium, squared loss on standardized targets."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin  # type: ignore[import-untyped, unused-ignore]
from sklearn.model_selection import (  # type: ignore[import-untyped, unused-ignore]
    train_test_split,
)
from sklearn.utils.validation import validate_data  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from .base import BaseEquilibrium
from .fitting import Rows
from .moments import Array, Moments

__all__ = ["EquilibriumRegressor"]


class EquilibriumRegressor(RegressorMixin, BaseEquilibrium):  # type: ignore[misc, unused-ignore]
    """ŷ = scale·(Vz* + a) + mean, z* the equilibrium of a layer at the standardized x.

    ::

        model = eq.sklearn.EquilibriumRegressor(random_state=0).fit(X, y)
        model.score(X, y)  # R²

    X and y are standardized inside; y may have several columns. Rows of weight zero are left out
    of training, and as long as all rows fit one batch a row of weight k is the same as k rows.

    Args:
        hidden: size of z.
        layer: "geq" (Gaussian kernel), "opteq" (linear kernel), "deep_opteq" (two layers),
            "explicit" (two plain layers of equal size, for comparison), or a callable
            (in_features, hidden) -> nn.Module that maps [B, in_features] to [B, hidden].
        bound: bound on the norm of W; "geq" is unique below 1.4969, the OptEq layers need < 1.
        max_iter: epochs, at most.
        batch_size: rows of a step.
        lr: AdamW's learning rate at the start.
        schedule: "cosine" (to zero over ``max_iter`` epochs) or "constant".
        weight_decay: AdamW's decoupled decay.
        tol: training stops when the loss (with ``early_stopping`` the held-out score) has not
            improved by this much in ``n_iter_no_change`` epochs.
        n_iter_no_change: see ``tol``.
        early_stopping: hold out ``validation_fraction`` of the rows, and keep the weights that did
            best on them.
        validation_fraction: see ``early_stopping``.
        solver, adjoint: of the layer, for training and prediction alike; None: ``Auto`` to three
            digits in training and eight in prediction (float64), and ``Phantom``.
        random_state: seed of the weights, the batches and the split. torch's global generator is
            left alone.
        device: "cpu", "cuda", "cuda:0", …, or "auto".
        dtype: "float64" or "float32" inside.
        verbose: write the loss of each epoch.

    Attributes:
        n_outputs_: columns of y.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.
        n_iter_: epochs made.
        loss_curve_, loss_: mean training loss of each epoch (½ squared error of the standardized
            targets), and of the last.
        validation_scores_: held-out R² after each epoch, with ``early_stopping``.
        module_: the torch network; ``module_.layer`` is the equilibrium layer.
    """

    n_outputs_: int

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> EquilibriumRegressor:
        """Train anew on X [n, features] and targets y [n] or [n, outputs]."""
        x, target = self._checked(X, y, reset=True)
        weight = self._weights(sample_weight, x)
        self._set_columns(target)
        self._fit(x, target.reshape(len(x), -1), weight, self.n_outputs_)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> EquilibriumRegressor:
        """One pass over X and y, from where the last call (or ``fit``) ended.

        The standardization of X and y grows with the rows that were seen; the learning rate is
        constant.
        """
        first = not hasattr(self, "module_")
        x, target = self._checked(X, y, reset=first)
        weight = self._weights(sample_weight, x)
        if first:
            self._set_columns(target)
        columns = target.reshape(len(x), -1)
        if columns.shape[1] != self.n_outputs_:
            raise ValueError(
                f"y has {columns.shape[1]} columns, and the first call of partial_fit had "
                f"{self.n_outputs_}."
            )
        self._partial_fit(x, columns, weight, self.n_outputs_, first)
        return self

    def predict(self, X: Any) -> Array:
        """ŷ for each row, [n] or [n, outputs] as y was."""
        made = self._predicted(X)
        restored = self._target_moments.restored(made)
        return restored[:, 0] if self._flat else restored

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    # ------------------------------------------------------------------ for the base

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Array, Array]:
        x, target = validate_data(
            self,
            X,
            y,
            dtype=[np.float64, np.float32],
            multi_output=True,
            y_numeric=True,
            reset=reset,
        )
        return x, np.asarray(target, dtype=np.float64)

    def _set_columns(self, target: Array) -> None:
        self._flat = target.ndim == 1
        self.n_outputs_ = 1 if self._flat else target.shape[1]
        self._target_moments = Moments.none(self.n_outputs_)

    def _look(self, x: Array, y: Array, weight: Array) -> None:
        super()._look(x, y, weight)
        self._target_moments = self._target_moments.updated(y, weight)

    def _encode(self, y: Array) -> Array:
        return self._target_moments.standardized(y)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (output - target).square().mean(1)

    def _held_out_score(self, output: Tensor, rows: Rows) -> float:
        weight = rows.weight[:, None]
        mean = (weight * rows.y).sum(0) / weight.sum()
        spread = (weight * (rows.y - mean).square()).sum()
        error = (weight * (rows.y - output).square()).sum()
        return float(1.0 - error / spread.clamp_min(1e-30))

    def _split(self, y: Array, random: Any) -> tuple[Array, Array]:
        held = int(np.ceil(self.validation_fraction * len(y)))
        train, test = train_test_split(np.arange(len(y)), test_size=held, random_state=random)
        return train, test
