"""The regressor: beside Ridge, on several columns, in a stream."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, make_friedman1
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import KFold, cross_val_score
from sklearn.utils import check_random_state
from torch import Tensor, nn

from equilibria.sklearn import EquilibriumRegressor
from equilibria.sklearn.base import build

QUICK: dict[str, Any] = {"hidden": 10, "max_iter": 40, "lr": 0.05, "random_state": 0}


def data(rows: int = 120, columns: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 3)) * [1.0, 10.0, 0.1] + 5.0
    mix = rng.standard_normal((3, columns))
    y = 1e3 * ((x - 5.0) / [1.0, 10.0, 0.1]) @ mix + 7e3
    return x, y[:, 0] if columns == 1 else y


@pytest.mark.parametrize(
    ("rows", "gain"),
    [
        pytest.param(load_diabetes(return_X_y=True), -0.05, marks=pytest.mark.slow),
        # What a line cannot do.
        (make_friedman1(250, 6, noise=0.5, random_state=0), 0.05),
    ],
    ids=["diabetes", "friedman"],
)
def test_beside_ridge(rows: Any, gain: float) -> None:
    folds = KFold(2, shuffle=True, random_state=0)
    models = EquilibriumRegressor(random_state=0), RidgeCV(np.logspace(-3, 3, 13))
    ours, ridge = (cross_val_score(model, *rows, cv=folds).mean() for model in models)
    assert ours > ridge + gain


def test_units_of_the_target_do_not_matter() -> None:
    x, y = data()
    one = EquilibriumRegressor(**QUICK).fit(x, y).predict(x)
    two = EquilibriumRegressor(**QUICK).fit(x, 1e-6 * y - 3.0).predict(x)
    np.testing.assert_allclose((two + 3.0) * 1e6, one, rtol=1e-5)
    assert 1 - ((one - y) ** 2).mean() / y.var() > 0.9


def test_several_columns() -> None:
    x, y = data(columns=3)
    model = EquilibriumRegressor(**QUICK).fit(x, y)
    assert model.n_outputs_ == 3
    assert model.predict(x).shape == y.shape
    assert model.score(x, y) > 0.9
    column = EquilibriumRegressor(**QUICK).fit(x, y[:, :1])
    assert column.predict(x).shape == (120, 1)


def test_a_constant_target() -> None:
    x, _ = data()
    model = EquilibriumRegressor(**QUICK).fit(x, np.full(120, 42.0))
    np.testing.assert_allclose(model.predict(x), 42.0, atol=0.5)


class Seen(nn.Identity):
    """Keeps the batches that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches.append(x[:, 0].tolist())
        return x


def test_one_step_by_hand() -> None:
    """First step of AdamW: w ← w(1 − lr·decay) − lr·g/(|g| + ε), g of the weighted mean loss."""
    (x, y), weight = data(columns=2), np.random.default_rng(1).uniform(0.5, 2.0, 120)
    options = {"hidden": 3, "lr": 0.1, "weight_decay": 0.3, "max_iter": 1, "random_state": 0}
    model = EquilibriumRegressor(layer=lambda *_: Seen(), **options).fit(x, y, weight)
    seed = int(np.random.RandomState(0).randint(2**31))
    how: dict[str, Any] = {"bound": 1.0, "solver": None, "adjoint": None, "seed": seed}
    head = build(lambda *_: Seen(), 3, 3, 2, **how).double().head
    start, bias = head.weight.detach().numpy(), head.bias.detach().numpy()
    scale = {"axis": 0, "weights": weight}
    x, y = (v - np.average(v, **scale) for v in (x, y))
    x, y = (v / np.sqrt(np.average(v**2, **scale)) for v in (x, y))
    error = x @ start.T + bias - y
    gradient = 0.5 * (weight[:, None] * error).T @ x / weight.sum()
    expected = start * (1 - 0.1 * 0.3) - 0.1 * gradient / (np.abs(gradient) + 1e-8)
    np.testing.assert_allclose(model.module_.head.weight.detach(), expected, atol=1e-9)
    assert model.loss_ == pytest.approx(0.25 * (weight @ (error**2).sum(1)) / weight.sum())


def test_every_row_once_in_equal_batches() -> None:
    x, y = data(rows=101)
    options = {"layer": lambda *_: Seen(), "batch_size": 50, "max_iter": 2, "random_state": 0}
    seen = EquilibriumRegressor(hidden=3, **options).fit(x, y).module_.layer.batches
    assert [len(batch) for batch in seen] == 2 * [34, 34, 33]
    orders = [[v for batch in part for v in batch] for part in (seen[:3], seen[3:])]
    for order in orders:
        np.testing.assert_allclose(sorted(order), np.sort((x - x.mean(0)) / x.std(0), 0)[:, 0])
        assert order != sorted(order)
    assert orders[0] != orders[1]  # another order in the next epoch


def test_stream_and_pickle() -> None:
    x, y = data()
    through, stopped = EquilibriumRegressor(**QUICK), EquilibriumRegressor(**QUICK)
    for number in range(20):
        part = slice(number % 3 * 40, number % 3 * 40 + 40)
        through.partial_fit(x[part], y[part])
        if number == 10:
            stopped = pickle.loads(pickle.dumps(stopped))
        stopped.partial_fit(x[part], y[part])
    np.testing.assert_array_equal(through.predict(x), stopped.predict(x))
    assert through.score(x, y) > 0.6
    with pytest.raises(ValueError, match="2 columns, and the first call of partial_fit had 1"):
        through.partial_fit(x, np.stack([y, y], 1))
    assert through.predict(x).shape == (120,)


def test_early_stopping_keeps_the_best() -> None:
    x, y = load_diabetes(return_X_y=True)
    model = EquilibriumRegressor(
        hidden=32, early_stopping=True, n_iter_no_change=4, random_state=0
    ).fit(x, y)
    assert model.n_iter_ < 60
    _, held = model._split(y, check_random_state(0))
    assert len(held) == 45
    assert model.score(x[held], y[held]) == pytest.approx(max(model.validation_scores_), abs=1e-3)


def test_early_stopping_of_several_columns_and_few_rows() -> None:
    x, _ = load_diabetes(return_X_y=True)
    y = np.stack([x[:, 0], x[:, 2] ** 2, 1e6 * np.random.default_rng(0).standard_normal(442)], 1)
    model = EquilibriumRegressor(early_stopping=True, **QUICK).fit(x, y)
    _, held = model._split(y, check_random_state(0))
    # R² as ``score`` has it: the mean over the columns, whatever their spread.
    assert model.score(x[held], y[held]) == pytest.approx(max(model.validation_scores_), abs=1e-3)
    few = EquilibriumRegressor(early_stopping=True, **QUICK).fit(x[:8], y[:8, 0])
    assert max(few.validation_scores_) > few.validation_scores_[0]


@pytest.mark.filterwarnings("ignore:fixed_point did not converge")
@pytest.mark.parametrize("layer", ["explicit", "geq"])
def test_a_loss_that_is_not_finite(layer: str) -> None:
    x, y = data()
    with pytest.raises(RuntimeError, match=r"loss is .* after epoch .*Lower lr"):
        EquilibriumRegressor(layer=layer, lr=1e200, weight_decay=0.0).fit(x, y)
