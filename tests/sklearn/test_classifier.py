"""The classifier: against a numpy forward pass, other classifiers, and its own promises."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from torch import nn

import equilibria as eq
from equilibria.sklearn import EquilibriumClassifier

Data = tuple[np.ndarray, np.ndarray]
QUICK: dict[str, Any] = {"hidden": 10, "max_iter": 12, "lr": 0.03, "random_state": 0}


@pytest.fixture(scope="module")
def iris() -> Data:
    return load_iris(return_X_y=True)


@pytest.fixture(scope="module")
def quick(iris: Data) -> EquilibriumClassifier:
    return EquilibriumClassifier(**QUICK).fit(*iris)


def test_probabilities_by_hand(quick: EquilibriumClassifier, iris: Data) -> None:
    """z ← relu(Wᵀr exp(−γ‖r‖²)), r = Ux̂ + b − Wz, γ = 0.2/‖Ux̂ + b‖²; softmax(Vz + a)."""
    x = iris[0]
    layer, head = quick.module_.layer, quick.module_.head
    w, u, b = (t.detach().numpy() for t in (layer.W.weight, layer.U.weight, layer.U.bias))
    c = ((x - x.mean(0)) / x.std(0)) @ u.T + b
    gamma = 0.2 / (c**2).sum(1, keepdims=True)
    z = np.zeros((len(x), 10))
    for _ in range(2000):
        r = c - z @ w.T
        z = np.maximum(np.exp(-gamma * (r**2).sum(1, keepdims=True)) * (r @ w), 0.0)
    logits = z @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(quick.predict_proba(x), expected, atol=1e-6)
    np.testing.assert_allclose(quick.predict_log_proba(x), np.log(expected), atol=1e-5)
    np.testing.assert_array_equal(quick.predict(x), expected.argmax(1))


@pytest.mark.parametrize(
    ("load", "least"),
    [(load_iris, 0.93), (load_wine, 0.95), (partial(load_digits, n_class=6), 0.96)],
    ids=["iris", "wine", "digits"],
)
def test_good_out_of_the_box(load: Any, least: float) -> None:
    x, y = load(return_X_y=True)
    train, test, y_train, y_test = train_test_split(x, y, test_size=0.5, random_state=0, stratify=y)
    model = EquilibriumClassifier(random_state=0).fit(train, y_train)
    assert model.score(test, y_test) >= least
    assert model.n_iter_ == len(model.loss_curve_) <= 60
    assert model.loss_ == model.loss_curve_[-1] < 0.15


@pytest.mark.parametrize("layer", ["opteq", "deep_opteq", "explicit"])
def test_other_layers(layer: str, iris: Data) -> None:
    model = EquilibriumClassifier(layer=layer, max_iter=30, random_state=0).fit(*iris)
    assert model.score(*iris) >= 0.93


def test_the_seed_decides(iris: Data) -> None:
    x, y = iris
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    options = {**QUICK, "batch_size": 40}
    one = EquilibriumClassifier(**options).fit(x, y).predict_proba(x)
    torch.manual_seed(99)
    torch.set_rng_state(torch_state)
    two = EquilibriumClassifier(**options).fit(x, y).predict_proba(x)
    np.testing.assert_array_equal(one, two)
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    other = EquilibriumClassifier(**{**options, "random_state": 1}).fit(x, y).predict_proba(x)
    assert np.abs(other - one).max() > 1e-3


class TestWeights:
    @pytest.mark.parametrize(
        ("given", "same"),
        [({0: 1.0, 1: 5.0, 2: 0.5}, [1.0, 5.0, 0.5]), ("balanced", [110 / 150, 110 / 150, 11 / 3])],
    )
    def test_classes_are_samples(self, given: Any, same: list[float], iris: Data) -> None:
        x, y = iris[0][:110], iris[1][:110]  # 50, 50 and 10 of the labels
        plain = EquilibriumClassifier(**QUICK)
        by_class = EquilibriumClassifier(class_weight=given, **QUICK).fit(x, y).predict_proba(x)
        by_sample = plain.fit(x, y, sample_weight=7.0 * np.array(same)[y]).predict_proba(x)
        np.testing.assert_allclose(by_class, by_sample, rtol=1e-5)
        assert np.abs(plain.fit(x, y).predict_proba(x) - by_class).max() > 1e-2

    def test_a_label_without_weight_is_never_said(self, iris: Data) -> None:
        x, y = iris
        model = EquilibriumClassifier(**QUICK).fit(x, y, sample_weight=(y != 1).astype(float))
        assert model.classes_.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(model.predict_proba(x)[:, 1], 0.0)
        np.testing.assert_allclose(model.predict_proba(x).sum(1), 1.0)
        model.partial_fit(x, y, sample_weight=(y != 1).astype(float))
        np.testing.assert_array_equal(model.predict_proba(x)[:, 1], 0.0)
        model.partial_fit(x, y)  # now it has been seen
        assert model.predict_proba(x)[:, 1].min() > 0.0


class TestEarlyStopping:
    def test_keeps_the_best_weights(self, iris: Data) -> None:
        x, y = iris
        model = EquilibriumClassifier(
            early_stopping=True, validation_fraction=0.2, n_iter_no_change=5, random_state=0
        ).fit(x, y)
        assert model.n_iter_ == len(model.validation_scores_) < 60
        _, held = model._split(y, check_random_state(0))
        assert len(held) == 30
        assert np.bincount(y[held]).tolist() == [10, 10, 10]
        assert model.score(x[held], y[held]) == pytest.approx(max(model.validation_scores_))

    def test_labels_too_rare_to_split_evenly(self) -> None:
        x = np.random.default_rng(0).standard_normal((12, 2))
        y = np.array([0] * 6 + [1] * 5 + [2])
        model = EquilibriumClassifier(early_stopping=True, **QUICK).fit(x, y)
        assert model.classes_.tolist() == [0, 1, 2]


class TestPartialFit:
    def test_three_calls_are_three_epochs(self, iris: Data) -> None:
        """The optimizer's moments go on: the same as fit without a schedule."""
        x, y = iris
        options = {**QUICK, "layer": "explicit", "max_iter": 3}
        whole = EquilibriumClassifier(**options, schedule="constant").fit(x, y)
        parts = EquilibriumClassifier(**options)
        for _ in range(3):
            parts.partial_fit(x, y, classes=[0, 1, 2])
        np.testing.assert_allclose(parts.predict_proba(x), whole.predict_proba(x), rtol=1e-6)
        np.testing.assert_allclose(parts.loss_curve_, whole.loss_curve_, rtol=1e-6)

    def test_errors(self, iris: Data) -> None:
        x, y = iris
        with pytest.raises(ValueError, match="classes must be passed"):
            EquilibriumClassifier(**QUICK).partial_fit(x, y)
        with pytest.raises(ValueError, match=r"labels \[2\].*not in classes=\[0, 1\]"):
            EquilibriumClassifier(**QUICK).partial_fit(x, y, classes=[0, 1])
        with pytest.raises(ValueError, match="class_weight as a dict"):
            EquilibriumClassifier(class_weight="balanced", **QUICK).partial_fit(x, y, [0, 1, 2])


class TestHousekeeping:
    def test_stops_when_nothing_improves(self, iris: Data) -> None:
        model = EquilibriumClassifier(**QUICK, tol=1e3, n_iter_no_change=3).fit(*iris)
        assert model.n_iter_ == 4

    def test_constant_schedule_is_another_training(
        self, quick: EquilibriumClassifier, iris: Data
    ) -> None:
        other = EquilibriumClassifier(**QUICK, schedule="constant").fit(*iris)
        assert other.loss_curve_[-1] < quick.loss_curve_[-1]

    def test_float32(self, iris: Data) -> None:
        model = EquilibriumClassifier(**QUICK, dtype="float32").fit(*iris)
        assert next(model.module_.parameters()).dtype == torch.float32
        assert model.score(*iris) > 0.8


def own_layer(features: int, hidden: int) -> nn.Module:
    return eq.nn.GEQ(hidden, 2 * hidden, in_channels=features, adjoint=eq.Implicit())


class TestCertify:
    def test_of_the_defaults(self, quick: EquilibriumClassifier, iris: Data) -> None:
        certificate = quick.certify(iris[0][:20])
        assert certificate.unique
        assert len(certificate.kinds) == 20
        assert certificate.kind == "contraction"
        assert float(certificate.error_bound.max()) < 1e-5
        assert certificate.contraction <= 0.96**2

    @pytest.mark.parametrize("layer", ["deep_opteq", own_layer])
    def test_of_other_layers(self, layer: Any, iris: Data) -> None:
        model = EquilibriumClassifier(layer=layer, **QUICK).fit(*iris)
        assert model.certify(iris[0][:5]).unique

    def test_explicit_has_none(self, iris: Data) -> None:
        model = EquilibriumClassifier(layer="explicit", **QUICK).fit(*iris)
        with pytest.raises(TypeError, match="no equilibrium to certify"):
            model.certify(iris[0])
        with pytest.raises(NotFittedError):
            EquilibriumClassifier().certify(iris[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 0}, "hidden=0.*at least 1"),
        ({"hidden": 2.5}, "hidden=2.5"),
        ({"max_iter": True}, "max_iter=True"),
        ({"layer": "mlp"}, "'geq', 'opteq'"),
        ({"bound": 0.0}, r"bound=0.0.*\(0, 1.49695\)"),
        ({"bound": 3.0}, r"bound=3.0.*\(0, 1.49695\).*several equilibria.*layer=lambda"),
        ({"bound": 0.0, "layer": "explicit"}, r"\(0, inf\)\.$"),
        ({"bound": 1.0, "layer": "opteq"}, r"bound=1.0.*\(0, 1\)"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"weight_decay": -0.1}, r"\[0, inf\)"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"schedule": "step"}, "'cosine' or 'constant'"),
        ({"dtype": "float16"}, "'float64' or 'float32'"),
        ({"device": "toaster"}, "device='toaster'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, iris: Data) -> None:
    with pytest.raises(ValueError, match=message):
        EquilibriumClassifier(**options).fit(*iris)


def test_a_layer_of_ones_own_may_have_several_equilibria(iris: Data) -> None:
    """What the error for bound=3.0 advises."""

    def layer(inputs: int, hidden: int) -> torch.nn.Module:
        free = eq.nn.NormBounded(bound=3.0)
        return eq.nn.GEQ(hidden, hidden, hidden=None, in_channels=inputs, constraint=free)

    model = EquilibriumClassifier(4, layer=layer, max_iter=1, random_state=0).fit(*iris)
    assert model.module_.layer.constraint.bound == 3.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(iris: Data) -> None:
    with pytest.raises(ValueError, match="sees no GPU"):
        EquilibriumClassifier(device="cuda").fit(*iris)
    assert EquilibriumClassifier(device="auto", **QUICK).fit(*iris).device_.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(iris: Data) -> None:
    model = EquilibriumClassifier(device="cuda", **QUICK).fit(*iris)
    assert model.module_.head.weight.is_cuda
    cpu = EquilibriumClassifier(**QUICK).fit(*iris)
    np.testing.assert_allclose(model.predict_proba(iris[0]), cpu.predict_proba(iris[0]), atol=1e-2)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_proba(iris[0]), model.predict_proba(iris[0]))


def test_weights_that_are_all_zero_or_negative(iris: Data) -> None:
    x, y = iris
    with pytest.raises(ValueError, match="zero"):
        EquilibriumClassifier().fit(x, y, sample_weight=np.zeros(150))
    with pytest.raises(ValueError, match="egative"):
        EquilibriumClassifier().fit(x, y, sample_weight=-np.ones(150))
