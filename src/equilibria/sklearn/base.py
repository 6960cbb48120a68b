"""What the classifier and the regressor share: parameters, training, prediction, certificates."""

from __future__ import annotations

import copy
import math
import sys
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator  # type: ignore[import-untyped, unused-ignore]
from sklearn.utils import check_random_state  # type: ignore[import-untyped, unused-ignore]
from sklearn.utils.validation import (  # type: ignore[import-untyped, unused-ignore]
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from equilibria.certify import certify
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions

from .checking import DTYPES, check_parameters, torch_device
from .fitting import Fitting, Plateau, Rows, cosine
from .moments import Array, Moments
from .network import LayerChoice, Network, build, training_solver

__all__ = ["BaseEquilibrium"]

_CHUNK = 4096  # rows solved at once in predictions


class BaseEquilibrium(BaseEstimator):  # type: ignore[misc, unused-ignore]
    """x̂ = (x − mean)/scale, z* = layer(x̂), output = Vz* + a, trained by AdamW."""

    _optimizer_state: dict[str, Any] | None

    def __init__(
        self,
        hidden: int = 64,
        *,
        layer: LayerChoice = "geq",
        bound: float = 0.95,
        max_iter: int = 60,
        batch_size: int = 256,
        lr: float = 0.01,
        schedule: str = "cosine",
        weight_decay: float = 0.1,
        tol: float = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
        random_state: Any = None,
        device: str = "cpu",
        dtype: str = "float64",
        verbose: bool = False,
    ) -> None:
        self.hidden = hidden
        self.layer = layer
        self.bound = bound
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.lr = lr
        self.schedule = schedule
        self.weight_decay = weight_decay
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.solver = solver
        self.adjoint = adjoint
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.verbose = verbose

    # ------------------------------------------------------------------ what differs

    @abstractmethod
    def _encode(self, y: Array) -> Array:
        """Targets as the loss wants them, one row each."""

    @abstractmethod
    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of each row, [B]."""

    @abstractmethod
    def _held_out_score(self, output: Tensor, rows: Rows) -> float:
        """How good the outputs for held-out rows are; more is better."""

    @abstractmethod
    def _split(self, y: Array, random: Any) -> tuple[Array, Array]:
        """Indices to train on, and held out for early stopping."""

    # ------------------------------------------------------------------ training

    def _fit(self, x: Array, y: Array, weight: Array, outputs: int) -> None:
        """Train anew on checked rows: x [n, features], y as for ``_encode``, weight [n]."""
        check_parameters(self)
        random = check_random_state(self.random_state)
        kept = weight > 0  # a row of weight zero is no row
        x, y, weight = x[kept], y[kept], weight[kept]
        train = np.arange(len(x))
        held = train[:0]
        if self.early_stopping:
            train, held = self._split(y, random)
        self._begin(x.shape[1], outputs, random)
        self._look(x[train], y[train], weight[train])
        rows = self._rows(x[train], y[train], weight[train])
        validation = self._rows(x[held], y[held], weight[held]) if self.early_stopping else None
        fitting = self._fitting(random)
        with training_solver(self.module_, self.solver):
            self._epochs(fitting, rows, validation)
        self._optimizer_state = fitting.optimizer.state_dict()

    def _epochs(self, fitting: Fitting, rows: Rows, validation: Rows | None) -> None:
        plateau = Plateau(self.tol, self.n_iter_no_change)
        if validation is not None:
            self.validation_scores_: list[float] = []
        best: dict[str, Any] | None = None
        for number in range(self.max_iter):

            def rate(share: float, number: int = number) -> float:
                return cosine((number + share) / self.max_iter)

            loss = fitting.epoch(rows, rate if self.schedule == "cosine" else None)
            self._note(loss)
            watched = loss
            if validation is not None:
                score = self._held_out_score(self._outputs(validation.x), validation)
                self.validation_scores_.append(score)
                watched = -score
            if plateau.update(watched) and validation is not None:
                best = copy.deepcopy(self.module_.state_dict())
            if plateau.over:
                break
        if best is not None:
            self.module_.load_state_dict(best)

    def _partial_fit(self, x: Array, y: Array, weight: Array, outputs: int, first: bool) -> None:
        """One pass over checked rows, from where the last one ended."""
        check_parameters(self)
        if first:
            random = check_random_state(self.random_state)
            self._begin(x.shape[1], outputs, random)
            self._shuffle_seed = int(random.randint(2**31))
        kept = weight > 0
        x, y, weight = x[kept], y[kept], weight[kept]
        self._look(x, y, weight)
        fitting = self._fitting(np.random.RandomState(self._shuffle_seed + self.n_iter_))
        fitting.resume(self._optimizer_state)
        with training_solver(self.module_, self.solver):
            self._note(fitting.epoch(self._rows(x, y, weight)))
        self._optimizer_state = fitting.optimizer.state_dict()

    def _begin(self, features: int, outputs: int, random: Any) -> None:
        network = build(
            self.layer,
            features,
            int(self.hidden),
            outputs,
            bound=float(self.bound),
            solver=self.solver,
            adjoint=self.adjoint,
            seed=int(random.randint(2**31)),
        )
        self.device_ = torch_device(self.device)
        self.module_: Network = network.to(device=self.device_, dtype=DTYPES[self.dtype]).eval()
        self._input_moments = Moments.none(features)
        self._shuffle_seed = 0
        self._optimizer_state = None
        self.n_iter_ = 0
        self.loss_curve_: list[float] = []

    def _look(self, x: Array, y: Array, weight: Array) -> None:
        """Take the rows into the standardization."""
        self._input_moments = self._input_moments.updated(x, weight)

    def _fitting(self, random: Any) -> Fitting:
        generator = torch.Generator().manual_seed(int(random.randint(2**31)))
        return Fitting(
            self.module_,
            self._loss,
            float(self.lr),
            float(self.weight_decay),
            int(self.batch_size),
            generator,
        )

    def _rows(self, x: Array, y: Array, weight: Array) -> Rows:
        target = torch.as_tensor(self._encode(y))
        if target.is_floating_point():
            target = target.to(DTYPES[self.dtype])
        relative = torch.as_tensor(weight / weight.mean(), dtype=DTYPES[self.dtype])
        return Rows(self._input(x), target.to(self.device_), relative.to(self.device_))

    def _note(self, loss: float) -> None:
        self.n_iter_ += 1
        self.loss_curve_.append(loss)
        self.loss_ = loss
        if self.verbose:
            sys.stdout.write(f"epoch {self.n_iter_}: loss {loss:.6f}\n")
        if not math.isfinite(loss):
            raise RuntimeError(
                f"{type(self).__name__}: the loss is {loss} after epoch {self.n_iter_}. Lower lr "
                f"(it is {self.lr:g}), or look at the scale of the targets."
            )

    # ------------------------------------------------------------------ prediction

    def _input(self, x: Array) -> Tensor:
        made = torch.as_tensor(self._input_moments.standardized(x))
        return made.to(device=self.device_, dtype=DTYPES[self.dtype])

    @torch.no_grad()
    def _outputs(self, x: Tensor) -> Tensor:
        return torch.cat([self.module_(part) for part in x.split(_CHUNK)])

    def _predicted(self, X: Any) -> Array:
        """Vz* + a for each row, [n, outputs]."""
        check_is_fitted(self, "module_")
        x = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        made: Array = self._outputs(self._input(x)).cpu().double().numpy()
        return made

    def certify(self, X: Any) -> Any:
        """What is proven of the equilibria for the rows of X: ``equilibria.certify`` on the layer.

        Unique or not, contraction factor, how far each z* may be from the exact one. Lipschitz
        constants are in the standardized input.
        """
        check_is_fitted(self, "module_")
        layer: Any = self.module_.layer
        if not getattr(layer, "is_equilibrium", False):
            raise TypeError(
                f"{type(self).__name__}(layer={self.layer!r}) has no equilibrium to certify; "
                "use layer='geq', 'opteq' or 'deep_opteq'."
            )
        x = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        found: Any = certify(layer, self._input(x))
        return found

    # ------------------------------------------------------------------ checks, copies

    def _weights(self, sample_weight: Any, x: Array) -> Array:
        found: Array = _check_sample_weight(
            sample_weight,
            x,
            dtype=np.float64,
            ensure_non_negative=True,
        )
        if not found.any():
            raise ValueError("sample_weight is zero for every row; at least one must be positive.")
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Pickles hold tensors of the CPU, so that they open on a machine without a GPU."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "module_" in state:
            state["module_"] = copy.deepcopy(self.module_).cpu()
            state["_optimizer_state"] = _on_cpu(self._optimizer_state)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "module_" in state and self.device_.type != "cpu":
            self.device_ = self.device_ if torch.cuda.is_available() else torch.device("cpu")
            self.module_.to(self.device_)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_on_cpu(inner) for inner in value]
    return value
