"""NaN stops the run before it reaches the weights, with a report of the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.training import EquilibriumModule, NonFiniteLoss, TrainConfig
from equilibria.training.nonfinite import Guard
from equilibria.training.optimizer import make_optimizer

from .small import config, digits, run


class Poisoned(nn.Module):
    """Logits of a GEQ layer and of a skip, which are NaN for one image."""

    def __init__(self, poison: Tensor | None = None, after: int = 0) -> None:
        super().__init__()
        solver, adjoint = eq.Picard(rtol=0.0, atol=0.0, max_steps=4), eq.Phantom(steps=2)
        self.geq = eq.nn.GEQ(6, 6, in_channels=64, hidden=None, solver=solver, adjoint=adjoint)
        self.skip = nn.Linear(64, 10)
        self.head = nn.Linear(6, 10)
        self.poison, self.calls, self.after = poison, 0, after

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            self.calls += 1
        if self.poison is not None and self.calls > self.after:
            bad = (x - self.poison).abs().amax(1, keepdim=True) < 1e-4
            x = torch.where(bad, float("nan"), x)
        logits: Tensor = self.head(self.geq(x)) + self.skip(x)
        return logits


class BadGradient(Poisoned):
    """A finite loss whose gradient is not: d√(0·p)/dp."""

    def __init__(self, after: int) -> None:
        super().__init__(after=after)
        self.p = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits + (self.p * 0.0).sqrt() if self.calls > self.after else logits


class Weights(pl.Callback):
    """Keeps the weights after every step that was taken."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.steps.append({k: v.detach().clone() for k, v in pl_module.model.named_parameters()})


def poison(index: int) -> Tensor:
    train, _ = digits()
    return train.normalize(train.images[index : index + 1]).flatten(1)


@pytest.fixture(params=["at once", "later"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As on the CPU, and as on a GPU: noted on the device, read every few steps."""
    later = request.param == "later"
    if later:
        monkeypatch.setattr(EquilibriumModule, "defers", property(lambda self: True))
    return later


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_bad_image_is_found_named_and_kept_from_the_weights(
    tmp_path: Path, looks: bool, optimizer: str
) -> None:
    torch.manual_seed(0)
    model = Poisoned(poison(77), after=6)  # harmless in the first epoch
    watch = Weights()
    settings = config(tmp_path, optimizer=optimizer, lr=0.01, augment=[])
    with pytest.raises(NonFiniteLoss, match="epoch 2") as caught:
        run(settings, model=model, callbacks=[watch])
    report = caught.value.report
    stored = json.loads((tmp_path / "nonfinite.json").read_text("utf-8"))
    assert stored["step"] == report["step"]
    assert (report["epoch"], report["batch"]) == (2, report["step"] - 6)
    assert [report["indices"][k] for k in report["bad_samples"]] == [77]
    # The solver of the layer met NaN for that image and for no other.
    assert report["failed_layers"] == ["geq"]
    assert report["solvers"]["geq"]["failed_samples"] == report["bad_samples"]
    assert report["first_nonfinite_module"]["module"].startswith(("geq", "skip"))
    assert report["nonfinite_parameters"] == []
    assert "77" in str(caught.value)
    assert "'geq'" in str(caught.value)
    # No step was taken with the bad batch, nor any after it.
    good = watch.steps[report["step"] - 1]
    now = dict(model.named_parameters())
    assert all(torch.equal(now[k].detach(), good[k]) for k in good)
    if looks:
        assert len(watch.steps) > report["step"]
    # What was saved before is there to go on from.
    assert (tmp_path / "last.ckpt").exists()


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_a_bad_gradient_under_a_finite_loss(tmp_path: Path, looks: bool, precision: str) -> None:
    torch.manual_seed(0)
    model = BadGradient(after=8)
    watch = Weights()
    with pytest.raises(NonFiniteLoss, match="gradient") as caught:
        run(config(tmp_path, precision=precision, clip=1.0), model=model, callbacks=[watch])
    assert caught.value.report["step"] == 8
    now = dict(model.named_parameters())
    assert all(torch.equal(now[k].detach(), v) for k, v in watch.steps[7].items())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_rate_that_is_too_high(tmp_path: Path, looks: bool) -> None:
    torch.manual_seed(0)
    settings = config(tmp_path, lr=1e30, schedule="constant")
    with pytest.raises(NonFiniteLoss, match="a lower lr"):
        run(settings, model=Poisoned())
    assert not (tmp_path / "model.safetensors").exists()


def _unsettled(model: Any) -> Any:
    """The same with its power iterations off their fixed points, so that a step moves them."""
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=source))
    return model


def test_the_module_alone_reports_too() -> None:
    torch.manual_seed(0)
    module = EquilibriumModule(_unsettled(Poisoned(poison(3))), TrainConfig(), num_classes=10)
    x, y = next(iter(eq.data.Batches(digits()[0], 8)))
    buffers = [b.clone() for b in module.model.buffers()]
    with pytest.raises(NonFiniteLoss) as caught:
        module.training_step((x, y), 0)
    assert caught.value.path is None
    assert caught.value.report["bad_samples"] == [3]
    # Looking at the batch again left no trace in the model (the power iteration moves in training).
    torch.manual_seed(0)
    other = EquilibriumModule(_unsettled(Poisoned()), TrainConfig(), num_classes=10)
    other.training_step((x, y), 0)
    now, once = list(module.model.buffers()), list(other.model.buffers())
    assert all(torch.equal(a, b) for a, b in zip(now, once, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(now, buffers, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fused_optimizers_skip_when_they_are_told(optimizer: str) -> None:
    """The private handshake with torch that the guard rests on."""
    weight = nn.Linear(3, 3)
    made = make_optimizer(weight, TrainConfig(optimizer=optimizer), fused=True)
    guard = Guard(deferred=True)
    values = [torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(2.0)]
    moved = []
    for step, value in enumerate(values):
        before = weight.weight.detach().clone()
        for p in weight.parameters():
            p.grad = torch.full_like(p, float(value))
        assert not guard.sees(value, step)
        guard.protect(made)
        made.step()
        moved.append(not torch.equal(before, weight.weight))
    assert moved == [True, False, False]
    assert guard.first_bad() == 1
