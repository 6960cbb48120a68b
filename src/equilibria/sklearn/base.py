"""What the classifier and the regressor share: the network, training, prediction, certificates."""

from __future__ import annotations

import copy
import math
import sys
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.adjoints import Phantom
from equilibria.certify import certify
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions
from equilibria.nn import GEQ, DeepOptEq, NormBounded, OptEq
from equilibria.nn.constraints import settle_norms
from equilibria.solvers import Auto

Array = NDArray[Any]
FLOATS = [np.float64, np.float32]  # what rows may come as
DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CHUNK = 4096  # rows solved at once in predictions

# The layers by name, and the norm of W below which their equilibrium is unique (docs/facts.md).
_GEQ = math.sqrt(math.exp(1.5) / 2.0)
UNIQUE = {"geq": _GEQ, "opteq": 1.0, "deep_opteq": 1.0, "explicit": math.inf}
LayerChoice = str | Callable[[int, int], nn.Module]

# Training follows the equilibrium closely enough; what is predicted is solved to what the dtype can
# reach (1e-8 in float64), so that it does not show how the solver got there.
TRAINING_SOLVER = Auto(rtol=1e-3, max_steps=500, block=2)
PREDICTION_SOLVER = Auto(max_steps=2000)
# The papers' kind of gradient. Its cost is known beforehand, and it cannot fail to converge.
ADJOINT = Phantom(steps=3)
# AdamW moves every entry of a small W by lr in one step, more than one power iteration follows:
# with one, norms up to 1.38 were seen under a bound of 0.95 (iris), and solves that diverged;
# with ten 1.02.
POWER_ITERATIONS = 10


def build(
    choice: LayerChoice,
    features: int,
    hidden: int,
    outputs: int,
    *,
    bound: float,
    solver: SolverOptions | None,
    adjoint: Adjoint | None,
    seed: int,
) -> nn.Sequential:
    """y = V·layer(x) + a: x [B, features] → y [B, outputs]; parts ``layer`` and ``head`` (V, a).

    The network is on the CPU in float32, its weights are drawn from ``seed`` alone.

    torch's layers draw from the global generator; it is lent to them and put back.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        common: dict[str, Any] = {
            "in_channels": features,
            "constraint": NormBounded(bound=bound, steps=POWER_ITERATIONS),
            "solver": PREDICTION_SOLVER if solver is None else solver,
            "adjoint": ADJOINT if adjoint is None else adjoint,
        }
        layer: Any
        if callable(choice):
            layer = choice(features, hidden)
        elif choice == "geq":
            layer = GEQ(hidden, hidden, hidden=None, **common)
        elif choice == "opteq":
            layer = OptEq(hidden, hidden, **common)
        elif choice == "deep_opteq":
            layer = DeepOptEq(hidden, (hidden, hidden), **common)
        else:  # As many weights as the others: U and W one after the other, no equilibrium.
            second = nn.Linear(hidden, hidden, bias=False)
            layer = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), second, nn.ReLU())
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"layer(in_features={features}, hidden={hidden}) must return an nn.Module, got "
                f"{type(layer).__name__}."
            )
        return nn.Sequential(OrderedDict(layer=layer, head=nn.Linear(hidden, outputs)))


@contextmanager
def training_solver(network: nn.Module, solver: SolverOptions | None) -> Iterator[None]:
    """Within it, a layer with our default solver solves as closely as training needs.

    At its end the norm constraints are brought up to date.
    """
    layer: Any = network.layer
    ours = solver is None and getattr(layer, "solver", None) == PREDICTION_SOLVER
    if ours:
        layer.solver = TRAINING_SOLVER
    try:
        yield
        settle_norms(network)  # not where training failed: weights may hold NaN
    finally:
        if ours:
            layer.solver = PREDICTION_SOLVER


@dataclass(frozen=True)
class Rows:
    """Standardized inputs, targets and weights (of mean 1) on the device."""

    x: Tensor
    y: Tensor
    weight: Tensor


def _device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _check_parameters(estimator: Any) -> None:
    """Raise a ValueError that names the parameter, what it got and what it takes."""

    def refuse(key: str, allowed: str) -> ValueError:
        given = f"{key}={getattr(estimator, key)!r}"
        return ValueError(f"{type(estimator).__name__}({given}): {allowed}")

    if not callable(estimator.layer) and estimator.layer not in UNIQUE:
        names = ", ".join(map(repr, UNIQUE))
        allowed = f"expected one of {names}, or a callable (in_features, hidden) -> nn.Module."
        raise refuse("layer", allowed)
    for key in ("hidden", "max_iter", "batch_size", "n_iter_no_change"):
        value = getattr(estimator, key)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise refuse(key, "expected an integer of at least 1.")
    limits = {
        "bound": (0.0, math.inf if callable(estimator.layer) else UNIQUE[estimator.layer], True),
        "lr": (0.0, math.inf, True),
        "weight_decay": (0.0, math.inf, False),
        "tol": (0.0, math.inf, False),
        "validation_fraction": (0.0, 1.0, True),
    }
    for key, (low, high, is_open) in limits.items():
        value = getattr(estimator, key)
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not (low < value if is_open else low <= value) or not value < high:
            allowed = f"expected a number in {'(' if is_open else '['}{low:g}, {high:g})."
            if key == "bound" and real and value >= high:
                allowed += " From there on there may be several equilibria. To allow them, give "
                allowed += "layer=lambda inputs, hidden: ... with a constraint of its own."
            raise refuse(key, allowed)
    if estimator.schedule not in ("cosine", "constant"):
        raise refuse("schedule", "expected 'cosine' or 'constant'.")
    if estimator.dtype not in DTYPES:
        raise refuse("dtype", "expected 'float64' or 'float32'.")
    try:
        device = _device(estimator.device)
    except RuntimeError as error:
        raise refuse("device", "expected 'cpu', 'cuda', 'cuda:0', …, or 'auto'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise refuse("device", "torch sees no GPU here; use 'auto' or 'cpu'.")


@dataclass(eq=False, repr=False)
class BaseEquilibrium(BaseEstimator):  # type: ignore[misc]
    """x̂ = (x − mean)/scale, z* = layer(x̂), output = Vz* + a, trained by AdamW."""

    hidden: int = 64
    _: KW_ONLY
    layer: LayerChoice = "geq"
    bound: float = 0.95
    max_iter: int = 60
    batch_size: int = 256
    lr: float = 0.01
    schedule: str = "cosine"
    weight_decay: float = 0.1
    tol: float = 1e-4
    n_iter_no_change: int = 10
    early_stopping: bool = False
    validation_fraction: float = 0.1
    solver: SolverOptions | None = None
    adjoint: Adjoint | None = None
    random_state: Any = None
    device: str = "cpu"
    dtype: str = "float64"
    verbose: bool = False

    @abstractmethod
    def _encode(self, y: Array) -> Array:
        """Targets as the loss wants them, one row each."""

    @abstractmethod
    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of each row, [B]."""

    @abstractmethod
    def _held_out_score(self, output: Tensor, rows: Rows) -> float:
        """How good the outputs for held-out rows are; more is better."""

    def _strata(self, y: Array, held: int) -> Array | None:
        """What the split for early stopping keeps in proportion."""
        return None

    def _split(self, y: Array, random: Any) -> tuple[Array, Array]:
        """Indices to train on, and held out for early stopping."""
        held = max(2, int(np.ceil(self.validation_fraction * len(y))))  # R² needs two
        how = {"test_size": held, "random_state": random, "stratify": self._strata(y, held)}
        train, test = train_test_split(np.arange(len(y)), **how)
        return train, test

    def _fit(self, x: Array, y: Array, weight: Array, outputs: int) -> None:
        """Train anew on checked rows: x [n, features], y as for ``_encode``, weight [n]."""
        _check_parameters(self)
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
        generator = torch.Generator().manual_seed(int(random.randint(2**31)))
        with training_solver(self.module_, self.solver):
            self._epochs(rows, validation, generator)

    def _epochs(self, rows: Rows, validation: Rows | None, generator: torch.Generator) -> None:
        """Until ``max_iter``, or ``n_iter_no_change`` epochs without a gain of ``tol``."""
        optimizer = self._optimizer()
        if validation is not None:
            self.validation_scores_: list[float] = []
        weights: dict[str, Any] | None = None
        best, waited = math.inf, 0
        for number in range(self.max_iter):
            watched = self._epoch(rows, optimizer, generator, number)
            if validation is not None:
                score = self._held_out_score(self._outputs(validation.x), validation)
                self.validation_scores_.append(score)
                watched = -score
                if watched < best:
                    weights = copy.deepcopy(self.module_.state_dict())
            waited = 0 if watched < best - self.tol else waited + 1
            best = min(best, watched)
            if waited >= self.n_iter_no_change:
                break
        if weights is not None:
            self.module_.load_state_dict(weights)
        self._optimizer_state: dict[str, Any] | None = optimizer.state_dict()

    def _partial_fit(self, x: Array, y: Array, weight: Array, outputs: int, first: bool) -> None:
        """One pass over checked rows, from where the last one ended."""
        _check_parameters(self)
        if first:
            random = check_random_state(self.random_state)
            self._begin(x.shape[1], outputs, random)
            self._shuffle_seed = int(random.randint(2**31))
        kept = weight > 0
        x, y, weight = x[kept], y[kept], weight[kept]
        self._look(x, y, weight)
        optimizer = self._optimizer()
        if self._optimizer_state is not None:
            optimizer.load_state_dict(copy.deepcopy(self._optimizer_state))
            for group in optimizer.param_groups:
                group.update(lr=float(self.lr), weight_decay=float(self.weight_decay))
        random = np.random.RandomState(self._shuffle_seed + self.n_iter_)
        generator = torch.Generator().manual_seed(int(random.randint(2**31)))
        with training_solver(self.module_, self.solver):
            self._epoch(self._rows(x, y, weight), optimizer, generator)
        self._optimizer_state = optimizer.state_dict()

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
        self.device_ = _device(self.device)
        self.module_ = network.to(device=self.device_, dtype=DTYPES[self.dtype]).eval()
        self._input_scaler = StandardScaler()
        self._shuffle_seed = 0
        self._optimizer_state = None
        self.n_iter_ = 0
        self.loss_curve_: list[float] = []

    def _look(self, x: Array, y: Array, weight: Array) -> None:
        """Take the rows into the standardization."""
        self._input_scaler.partial_fit(x.astype(np.float64, copy=False), sample_weight=weight)

    def _optimizer(self) -> torch.optim.AdamW:
        parameters, decay = self.module_.parameters(), float(self.weight_decay)
        return torch.optim.AdamW(parameters, lr=float(self.lr), weight_decay=decay)

    def _rows(self, x: Array, y: Array, weight: Array) -> Rows:
        target = torch.as_tensor(self._encode(y))
        if target.is_floating_point():
            target = target.to(DTYPES[self.dtype])
        relative = torch.as_tensor(weight / weight.mean(), dtype=DTYPES[self.dtype])
        return Rows(self._input(x), target.to(self.device_), relative.to(self.device_))

    def _epoch(
        self,
        rows: Rows,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        number: int | None = None,
    ) -> float:
        """One pass over the rows in random batches; the mean loss.

        Of epoch ``number`` the rate may follow the schedule, lr·½(1 + cos πt) for t from 0 to 1
        over the training. All rows in one batch are not shuffled: then a row of weight 2 is the
        same as two rows.
        """
        count, parts = len(rows.x), -(-len(rows.x) // int(self.batch_size))
        # Equal parts, so that no step is made from a handful of rows that were left over.
        order = torch.randperm(count, generator=generator) if parts > 1 else torch.arange(count)
        total = rows.weight.new_zeros(())
        self.module_.train()
        for place, index in enumerate(order.tensor_split(parts)):
            if number is not None and self.schedule == "cosine":
                done = (number + place / parts) / self.max_iter
                for group in optimizer.param_groups:
                    group["lr"] = float(self.lr) * (0.5 * (1.0 + math.cos(math.pi * done)))
            x, y, weight = rows.x[index], rows.y[index], rows.weight[index]
            optimizer.zero_grad(set_to_none=True)
            loss = (weight * self._loss(self.module_(x), y)).sum() / len(x)
            loss.backward()
            optimizer.step()
            total += loss.detach() * (len(x) / count)
        self.module_.eval()
        self.n_iter_ += 1
        self.loss_ = float(total)
        self.loss_curve_.append(self.loss_)
        if self.verbose:
            sys.stdout.write(f"epoch {self.n_iter_}: loss {self.loss_:.6f}\n")
        if not math.isfinite(self.loss_):
            raise RuntimeError(
                f"{type(self).__name__}: the loss is {self.loss_} after epoch {self.n_iter_}. "
                f"Lower lr (it is {self.lr:g}), or look at the scale of the targets."
            )
        return self.loss_

    def _given(self, X: Any) -> Tensor:
        """The rows of X, checked, as the network takes them."""
        check_is_fitted(self, "module_")
        return self._input(validate_data(self, X, dtype=FLOATS, reset=False))

    def _input(self, x: Array) -> Tensor:
        made = torch.as_tensor(self._input_scaler.transform(x.astype(np.float64, copy=False)))
        return made.to(device=self.device_, dtype=DTYPES[self.dtype])

    @torch.no_grad()
    def _outputs(self, x: Tensor) -> Tensor:
        return torch.cat([self.module_(part) for part in x.split(_CHUNK)])

    def _predicted(self, X: Any) -> Array:
        """Vz* + a for each row, [n, outputs]."""
        made: Array = self._outputs(self._given(X)).cpu().double().numpy()
        return made

    def certify(self, X: Any) -> Any:
        """What is proven of the equilibria for the rows of X: ``equilibria.certify`` on the layer.

        Unique or not, contraction factor, how far each z* may be from the exact one. Lipschitz
        constants are in the standardized input.
        """
        x = self._given(X)
        layer: Any = self.module_.layer
        if not getattr(layer, "is_equilibrium", False):
            raise TypeError(
                f"{type(self).__name__}(layer={self.layer!r}) has no equilibrium to certify; "
                "use layer='geq', 'opteq' or 'deep_opteq'."
            )
        return certify(layer, x)

    def _weights(self, sample_weight: Any, x: Array) -> Array:
        options = {"dtype": np.float64, "ensure_non_negative": True}
        found: Array = _check_sample_weight(sample_weight, x, **options)
        if not found.any():
            raise ValueError("sample_weight is zero for every row; at least one must be positive.")
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Pickles hold tensors of the CPU, so that they open on a machine without a GPU."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "module_" in state:
            state["module_"] = copy.deepcopy(self.module_).cpu()
            state["_optimizer_state"] = pytree.tree_map_only(
                Tensor, lambda t: t.detach().cpu(), self._optimizer_state
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "module_" in state and self.device_.type != "cpu":
            self.device_ = self.device_ if torch.cuda.is_available() else torch.device("cpu")
            self.module_.to(self.device_)
