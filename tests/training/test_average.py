"""The running average of the weights: its formula, its norm bounds, its place in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import equilibria as eq
from equilibria.training import WeightAverage, settle_norms

from .small import Tiny, accuracy, config, digits, run, same_state


def test_the_average_is_its_formula() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = WeightAverage(0.8)
    average.follow(model)
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    expected = [t.detach().double().numpy().copy() for t in tensors]
    for step in range(1, 60):
        with torch.no_grad():
            for t in tensors:
                t.add_(torch.randn_like(t))
        average.update()
        decay = min(0.8, (1 + step) / (10 + step))
        expected = [
            decay * e + (1 - decay) * t.detach().double().numpy()
            for e, t in zip(expected, tensors, strict=True)
        ]
    own = [t.detach().clone() for t in tensors]
    average.apply()
    for t, e in zip(tensors, expected, strict=True):
        np.testing.assert_allclose(t.detach().numpy(), e, rtol=2e-4, atol=1e-5)
    average.apply()  # twice is once
    average.restore()
    assert all(torch.equal(t, o) for t, o in zip(tensors, own, strict=True))


def test_a_mask_of_minus_infinity_stays_as_it_is() -> None:
    """−∞ − (−∞) is NaN."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))
    before = model.mask.clone()
    average = WeightAverage(0.9)
    average.follow(model)
    average.update()
    average.apply()
    assert torch.equal(model.mask, before)
    average.restore()
    assert torch.equal(model.mask, before)


def test_low_precision_is_averaged_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    average = WeightAverage(0.999)
    average.follow(model)
    average.updates = 10**6
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(500):
        average.update()
    average.apply()
    # 2 − 0.999^500 = 1.394; in bfloat16 a step of 0.001 is lost next to 1.
    assert model.weight.item() == pytest.approx(2 - 0.999**500, abs=0.01)


def spectral(weight: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().double(), 2))


def test_an_averaged_weight_keeps_its_norm_bound() -> None:
    """Two weights with orthogonal leading vectors: that of the last one misses the average."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6)).Q
    layer = eq.nn.constrain(nn.Linear(6, 6, bias=False), "weight", eq.nn.NormBounded(bound=0.9))
    bounded: Any = layer.parametrizations

    def train(*singular: float) -> None:
        with torch.no_grad():
            middle = torch.diag(torch.tensor(singular))
            bounded.weight.original.copy_(basis @ middle @ basis.mT)
        for _ in range(200):  # power iterations of the training mode
            _ = layer.weight

    layer.train()
    train(5.0, 1, 1, 1, 1, 1)
    average = WeightAverage(0.5)
    average.follow(layer)
    average.updates = 10**6
    train(0.1, 3, 1, 1, 1, 1)
    average.update()
    own, vector = layer.weight.detach().clone(), bounded.weight[0].v.clone()
    average.apply()
    layer.eval()
    assert spectral(layer.weight) == pytest.approx(0.9, rel=1e-3)
    assert spectral(bounded.weight.original) == pytest.approx(2.55, rel=1e-3)
    with torch.no_grad():
        bounded.weight[0].v.copy_(vector)  # what happens without settling
    assert spectral(layer.weight) > 1.1
    average.restore()
    assert torch.equal(bounded.weight[0].v, vector)
    assert torch.equal(layer.weight, own)
    assert spectral(own) == pytest.approx(0.9, rel=1e-3)


def test_settling_serves_modules_with_a_bound_of_their_own() -> None:
    class Own(nn.Module):
        settled = 0

        def settle(self) -> None:
            self.settled += 1

    model = Own()
    settle_norms(nn.Sequential(model))
    assert model.settled == 1


class Compare(pl.Callback):
    """In validation the model is the average; after it, the trained weights, bit for bit."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.trained = {k: v.clone() for k, v in pl_module.model.state_dict().items()}

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *a: Any, **k: Any) -> None:
        self.validated = {k: v.clone() for k, v in pl_module.model.state_dict().items()}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert same_state(self.trained, pl_module.model.state_dict())


@pytest.mark.parametrize("ema", [None, 0.9])
def test_what_is_validated_is_saved(tmp_path: Path, ema: float | None) -> None:
    """The average where there is one, with the bound on its norms; and its accuracy is reported."""
    watch = Compare()
    result = run(config(tmp_path, ema=ema), callbacks=[watch])
    saved = load_file(result.weights)
    assert same_state(saved, dict(result.model.state_dict()))
    assert same_state(saved, watch.validated)
    assert same_state(saved, watch.trained) == (ema is None)
    fresh = Tiny()
    fresh.load_state_dict(saved)
    assert result.metrics["val_accuracy"] == pytest.approx(accuracy(fresh.eval(), digits()[1]))
    assert ema is None or spectral(fresh.geq.W.weight) <= 0.9 * (1 + 1e-4)
