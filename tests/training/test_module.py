"""The LightningModule: losses and metrics against numpy, the penalty against a dense Jacobian."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import equilibria as eq
from equilibria.training import EquilibriumModule, TrainConfig
from equilibria.training.module import JacobianPenalty

from .small import Pixels, Tiny, config, digits, masks, run


def module(model: nn.Module, classes: int = 10, **more: Any) -> EquilibriumModule:
    options = {k: more.pop(k) for k in ("label_smoothing", "jacobian_weight") if k in more}
    return EquilibriumModule(model, TrainConfig(**options), num_classes=classes, **more)


def log_softmax(logits: Tensor) -> Any:
    x = logits.detach().double().numpy()
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # summed in float32
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_its_formula(smoothing: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(64, 10).to(dtype), torch.randint(0, 10, (64,))
    q = np.full((64, 10), smoothing / 10)
    q[np.arange(64), y.numpy()] += 1 - smoothing
    expected = -(q * log_softmax(logits)).sum(1).mean()
    assert float(module(nn.Flatten()).loss(logits, y, smoothing)) == pytest.approx(expected)


def test_ignored_pixels_do_not_count() -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    y[0, :2] = 255
    ours = module(nn.Flatten(), 3, task="segmentation", ignore_index=255)
    rows = np.moveaxis(log_softmax(logits), 1, -1)
    keep = (y != 255).numpy()
    picked = -np.take_along_axis(rows, np.where(keep, y.numpy(), 0)[..., None], -1)[..., 0]
    assert float(ours.loss(logits, y, 0.0)) == pytest.approx(picked[keep].mean(), rel=1e-6)
    each = [picked[k][keep[k]].mean() for k in range(2)]
    assert ours.losses(logits, y).tolist() == pytest.approx(each, rel=1e-6)
    nothing = torch.full_like(y, 255)
    assert float(ours.loss(logits, nothing, 0.1)) == 0.0


def test_a_step_adds_loss_and_right_answers_to_the_metrics() -> None:
    torch.manual_seed(0)
    model = Tiny()
    ours = module(model)
    train, _ = digits()
    x, y = next(iter(eq.data.Batches(train, 32)))
    loss = ours.training_step((x, y), 0)
    with torch.no_grad():
        right = int((model(x).argmax(1) == y).sum())
    assert ours.metrics._sums[2] == 32
    assert ours.metrics._sums[1] == right
    assert ours.metrics.row()["loss"] == pytest.approx(loss.item())
    assert ours.metrics.row()["solver_steps"] == 3.0
    assert module(model, jacobian_weight=5.0).training_step((x, y), 0) > loss + 0.01


def test_segmentation_reports_the_mean_intersection_over_union(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = masks()
    train, valid = data.subset(range(48)), data.subset(range(48, 64))
    settings = config(tmp_path, epochs=2, batch_size=16, lr=0.05)
    result = run(settings, data=(train, valid), model=Pixels(3))
    x, y = next(iter(eq.data.Batches(valid, 16)))
    with torch.no_grad():
        guess = result.model(x).argmax(1)
    keep = y != 255
    hits = [((guess == c) & (y == c) & keep).sum() for c in range(3)]
    either = [(((guess == c) | (y == c)) & keep).sum() for c in range(3)]
    iou = float(sum(a / b for a, b in zip(hits, either, strict=True) if b)) / sum(map(bool, either))
    assert result.metrics["val_miou"] == pytest.approx(iou, rel=1e-5)
    accuracy = float((guess == y)[keep].float().mean())
    assert result.metrics["val_accuracy"] == pytest.approx(accuracy, rel=1e-5)


def test_clipping_bounds_the_step_also_of_mixed_labels(tmp_path: Path) -> None:
    """Plain SGD of rate 1 moves the weights by the clipped norm and no further."""
    torch.manual_seed(0)
    model = Tiny()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    plain: dict[str, Any] = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "lr": 1.0}
    plain |= {"schedule": "constant", "epochs": 1, "batch_size": 192, "augment": ["mixup"]}
    result = run(config(tmp_path, **plain, clip=0.01), model=model)
    moved = [(p.detach() - before[n]).flatten() for n, p in result.model.named_parameters()]
    assert float(torch.cat(moved).norm()) == pytest.approx(0.01, rel=1e-3)
    assert 0.0 < result.metrics["train_accuracy"] <= 1.0


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # Lightning's own use of torch
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_norm_of_the_gradient_does_not_hold_the_scale_of_float16(
    monkeypatch: pytest.MonkeyPatch, clip: float | None
) -> None:
    """Fused optimizers, those of a GPU, unscale gradients as they step: after the norm is taken."""
    monkeypatch.setattr(EquilibriumModule, "defers", property(lambda self: True))
    x, y = next(iter(eq.data.Batches(digits()[0], 64)))
    torch.manual_seed(0)
    model = Tiny()
    made = EquilibriumModule(model, TrainConfig(precision="16-mixed", clip=clip), num_classes=10)
    made.logs = False
    loss = nn.functional.cross_entropy(made.model(x), y)
    norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, made._trained)]).norm()
    plain: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    plain |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_steps=1, plugins=[MixedPrecision("16-mixed", "cpu")], **plain)
    trainer.fit(made, DataLoader(TensorDataset(x, y), batch_size=64))
    assert float(made.metrics.gradient_norm) == pytest.approx(float(norm), rel=1e-2)


@pytest.mark.slow
def test_the_compiled_model_trains_and_its_solver_is_seen(tmp_path: Path) -> None:
    plain = run(config(tmp_path / "a", epochs=2))
    compiled = run(config(tmp_path / "b", epochs=2, compile=True))
    assert compiled.metrics["train_loss"] == pytest.approx(plain.metrics["train_loss"], rel=1e-3)
    assert compiled.metrics["solver_steps"] == 3.0
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # Lightning's own use of torch
def test_lightning_alone_can_train_it() -> None:
    """The last block of docs/training.md."""
    page = Path(__file__).parent.parent.parent / "docs" / "training.md"
    code = page.read_text("utf-8").split("```python\n")[-1].split("```")[0]
    small = TrainConfig(model_options={"widths": [8], "depth": 1, "hidden": 8})
    scope: dict[str, Any] = {"training": eq.training, "models": eq.models, "config": small}
    exec(compile(code, "training.md", "exec"), scope)
    module, trainer = scope["module"], scope["trainer"]
    assert module.step == trainer.global_step == 11
    logged = trainer.callback_metrics
    assert float(logged["val_accuracy"]) == pytest.approx(module.validation["val_accuracy"])
    assert 0.0 < float(logged["train_loss"]) < 5.0
    assert float(logged["solver_steps"]) >= 1.0


def test_channels_last(tmp_path: Path) -> None:
    seen = []

    class Look(Pixels):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.second.weight
            seen.append(weight.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    settings = config(tmp_path, epochs=1, batch_size=16, channels_last=True)
    run(settings, data=(masks(), None), model=Look(3))
    assert seen
    assert all(seen)


class Linear(eq.nn.MapLayer):
    """z = Az/2 + x: its Jacobian is A/2 everywhere."""

    def __init__(self, size: int) -> None:
        super().__init__(solver=eq.Picard(max_steps=200))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(size, size)).Q)

    def inject(self, x: Any) -> tuple[Any, ...]:
        return (x,)

    def step(self, z: Any, x: Any) -> Any:
        return 0.5 * z @ self.weight.mT + x

    def start(self, x: Any, *injected: Any) -> Any:
        return torch.zeros_like(x)


def total(penalty: JacobianPenalty, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with penalty.collect() as found:
        model(x)
    return torch.stack(found).sum()


def test_it_estimates_the_frobenius_norm_of_every_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        eq.nn.GEQ(5, 5, in_channels=3, hidden=None), nn.Linear(5, 6), Linear(6)
    ).double()
    x = torch.randn(64, 3, dtype=torch.float64)
    penalty = JacobianPenalty(model, 2.0)
    with torch.no_grad():
        z = model[0](x)
    problem = model[0].problem(x)
    dense = torch.autograd.functional.jacobian(lambda s: problem.step(s).sum(0), z)
    norms = dense.movedim(1, 0).flatten(1).square().sum(1) / 5
    expected = 2.0 * (norms.mean() + 0.25)  # ‖A/2‖²_F/n = 1/4 for an orthogonal A
    found = torch.stack([total(penalty, model, x).detach() for _ in range(30)]).mean()
    assert float(found) == pytest.approx(float(expected), rel=0.08)


def test_layers_with_a_weight_of_their_own_keep_it() -> None:
    class Own(Linear):
        jacobian_weight = 0.0

    model = nn.Sequential(Own(3), Own(3))
    model[1].jacobian_weight = 0.7
    penalty = JacobianPenalty(model, 0.2)
    assert (model[0].jacobian_weight, model[1].jacobian_weight) == (0.2, 0.7)
    assert penalty.active
    assert not JacobianPenalty(nn.Sequential(Linear(3)), 0.0).active


def test_a_model_without_equilibrium_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="there is none"):
        JacobianPenalty(nn.Linear(2, 2), 1.0)


def test_the_validation_loss_is_the_mean_over_images_also_of_a_short_last_batch(
    tmp_path: Path,
) -> None:
    """64 + 37 images; the mean of the two batches' means is another number."""
    valid = eq.data.load("digits", progress=False).subset(range(192, 293))
    result = run(config(tmp_path, epochs=1, precision="64-true"), data=(digits()[0], valid))
    x, y = next(iter(eq.data.Batches(valid, len(valid), dtype=torch.float64)))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(result.model(x), y)
    assert result.metrics["val_loss"] == pytest.approx(float(expected), rel=1e-12)
