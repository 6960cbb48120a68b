"""A classifier: softmax of a linear head on the equilibrium."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import _check_partial_fit_first_call, check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from .base import FLOATS, Array, BaseEquilibrium, Rows


@dataclass(eq=False, repr=False)
class EquilibriumClassifier(ClassifierMixin, BaseEquilibrium):  # type: ignore[misc]
    """p(y | x) = softmax(Vz* + a), z* the equilibrium of a layer at the standardized x.

        model = eq.sklearn.EquilibriumClassifier(random_state=0).fit(X, y)
        model.predict_proba(X)
        print(model.certify(X))  # what is proven of the equilibria

    X is standardized inside, so no scaler is needed in front. Rows of weight zero are left out of
    training, and as long as all rows fit one batch a row of weight k is the same as k rows.

    Args:
        hidden: size of z.
        layer: "geq" (Gaussian kernel), "opteq" (linear kernel), "deep_opteq" (two layers),
            "explicit" (two plain layers of equal size, for comparison), or a callable
            (in_features, hidden) -> nn.Module that maps [B, in_features] to [B, hidden].
        bound: bound on the norm of W. Where the equilibrium need not be unique it is refused:
            from 1.4969 on for "geq", from 1 on for the OptEq layers. A callable ``layer`` sets its
            own.
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
        class_weight: None, "balanced" or a dict {class: weight}.
        solver, adjoint: of the layer, for training and prediction alike; None: ``Auto`` to three
            digits in training and eight in prediction (float64), and ``Phantom``.
        random_state: seed of the weights, the batches and the split. torch's global generator is
            left alone.
        device: "cpu", "cuda", "cuda:0", …, or "auto".
        dtype: "float64" or "float32" inside.
        verbose: write the loss of each epoch.

    Attributes:
        classes_: the labels.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.
        n_iter_: epochs made.
        loss_curve_, loss_: mean training loss of each epoch, and of the last.
        validation_scores_: held-out accuracy after each epoch, with ``early_stopping``.
        module_: the torch network; ``module_.layer`` is the equilibrium layer.
    """

    _: KW_ONLY
    class_weight: dict[Any, float] | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> EquilibriumClassifier:
        """Train anew on X [n, features] and labels y [n]; ``sample_weight`` [n] if wanted."""
        x, y, weight = self._checked(X, y, sample_weight, reset=True)
        self.classes_ = np.unique(y)
        self._present = np.isin(self.classes_, y[weight > 0])
        self._fit(x, y, weight, len(self.classes_))
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> EquilibriumClassifier:
        """One pass over X and y, from where the last call (or ``fit``) ended.

        The first call needs ``classes``, all labels that will ever come. The standardization grows
        with the rows that were seen; the learning rate is constant.
        """
        if self.class_weight == "balanced":
            raise ValueError(
                "EquilibriumClassifier(class_weight='balanced') needs all labels at once, which "
                "partial_fit does not have: give class_weight as a dict, or sample_weight."
            )
        first = _check_partial_fit_first_call(self, classes) or not hasattr(self, "module_")
        x, y, weight = self._checked(X, y, sample_weight, reset=first)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(
                f"y has the labels {unknown.tolist()}, which are not in classes="
                f"{self.classes_.tolist()} of the first call of partial_fit."
            )
        # In a stream a label may still come; after fit one whose rows all had weight zero may not.
        self._present = np.isin(self.classes_, y[weight > 0]) | (first or self._present)
        self._partial_fit(x, y, weight, len(self.classes_), first)
        return self

    def predict_proba(self, X: Any) -> Array:
        """p(class | x) for each row, [n, classes], in the order of ``classes_``."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Array:
        """log p(class | x) for each row, [n, classes]."""
        outputs = torch.from_numpy(self._predicted(X))
        made: Array = F.log_softmax(outputs, dim=1).numpy()
        return made

    def predict(self, X: Any) -> Array:
        """The likeliest label of each row, [n]."""
        outputs = self._predicted(X)
        found: Array = self.classes_[outputs.argmax(axis=1)]
        return found

    def _checked(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool
    ) -> tuple[Array, Array, Array]:
        """Rows, labels, and the product of the weights of rows and labels."""
        x, y = validate_data(self, X, y, dtype=FLOATS, reset=reset)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        weight = self._weights(sample_weight, x)
        if self.class_weight is not None:
            weight = weight * compute_sample_weight(self.class_weight, y)
        return x, y, weight

    def _predicted(self, X: Any) -> Array:
        """Logits; −inf for labels whose rows all had weight zero."""
        outputs = super()._predicted(X)
        return np.where(self._present, outputs, -np.inf)

    def _encode(self, y: Array) -> Array:
        return np.searchsorted(self.classes_, y)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def _held_out_score(self, output: Tensor, rows: Rows) -> float:
        right = (output.argmax(1) == rows.y).to(rows.weight.dtype)
        return float((rows.weight * right).sum() / rows.weight.sum())

    def _strata(self, y: Array, held: int) -> Array | None:
        counts = np.unique(y, return_counts=True)[1]
        # A label with one row, or more labels than held-out rows, cannot be split evenly.
        even = counts.min() > 1 and held >= len(counts) and len(y) - held >= len(counts)
        return y if even else None
