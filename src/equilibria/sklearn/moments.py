"""Running weighted means and variances, x̂ = (x − mean)/scale: standardization that can grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Moments"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Moments:
    """Weighted count, mean and variance of each column; ``updated`` adds rows (Chan et al.)."""

    count: float
    mean: Array
    variance: Array

    @classmethod
    def none(cls, columns: int) -> Moments:
        """Of no rows at all."""
        return cls(0.0, np.zeros(columns), np.zeros(columns))

    def updated(self, rows: Array, weight: Array) -> Moments:
        """The moments of the rows so far and of ``rows`` [n, columns] with ``weight`` [n]."""
        rows = rows.astype(np.float64, copy=False)
        added = float(weight.sum())
        if added == 0.0:
            return self
        mean = weight @ rows / added
        centered = rows - mean
        variance = weight @ (centered * centered) / added
        total = self.count + added
        shift = mean - self.mean
        share = added / total
        return Moments(
            total,
            self.mean + share * shift,
            (1 - share) * self.variance + share * variance + share * (1 - share) * shift**2,
        )

    @property
    def scale(self) -> Array:
        """The standard deviation; 1 for a column that is constant up to rounding."""
        eps = np.finfo(np.float64).eps
        # What rounding of the mean alone leaves as a variance (as scikit-learn's StandardScaler).
        noise = self.count * eps * self.variance + (self.count * self.mean * eps) ** 2
        constant = self.variance <= noise
        scale: Array = np.sqrt(np.where(constant, 1.0, self.variance))
        return scale

    def standardized(self, rows: Array) -> Array:
        """(rows − mean)/scale, a new array."""
        made: Array = (rows.astype(np.float64, copy=False) - self.mean) / self.scale
        return made

    def restored(self, rows: Array) -> Array:
        """rows·scale + mean."""
        made: Array = rows * self.scale + self.mean
        return made
