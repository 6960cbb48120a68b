"""PL* and conditioning at a point, and along runs of Lightning and of ``fit``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import equilibria as eq
from equilibria import training
from equilibria_papers.theory import KernelMonitor, KernelProbe, empirical_ntk


def data(n: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 2, generator=generator, dtype=torch.float64)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).double()


# What Lightning says of few workers, few batches, and of its own use of torch.
quiet = pytest.mark.filterwarnings("ignore:.*(many workers|smaller than|LeafSpec).*")


def test_the_pl_ratio_is_the_rayleigh_quotient_of_the_kernel() -> None:
    """‖∇L‖²/(2L) = rᵀKr/‖r‖² for L = ½‖r‖², between λ_min and λ_max."""
    (x, y), model = data(), network()
    row = KernelProbe(x, y).measure(model)
    kernel = empirical_ntk(model, x, method="autograd").matrix
    away = (model(x) - y).detach().flatten()
    quotient = float(away @ kernel @ away / (away @ away))
    values = torch.linalg.eigvalsh(kernel)
    assert row["pl_ratio"] == pytest.approx(quotient, rel=1e-9)
    assert row["loss"] == pytest.approx(float(away @ away) / 2)
    assert row["pl_bound"] == pytest.approx(row["lambda_min"], rel=1e-9)
    assert row["lambda_min"] == pytest.approx(float(values[0]), abs=1e-10)
    assert row["lambda_max"] == pytest.approx(float(values[-1]))
    assert row["pl_bound"] <= row["pl_ratio"] <= row["lambda_max"]
    assert (row["drift"], row["moved"]) == (0.0, 0.0)


def test_cross_entropy_has_the_bound_of_its_own_slope() -> None:
    x, _ = data()
    labels, model = torch.tensor([0, 1, 0, 1, 1, 0]), network()
    row = KernelProbe(x, labels, loss=nn.functional.cross_entropy).measure(model)
    outputs = model(x).detach().requires_grad_()
    loss = nn.functional.cross_entropy(outputs, labels)
    (slope,) = torch.autograd.grad(loss, outputs)
    expected = row["lambda_min"] * float(slope.square().sum() / (2 * loss.detach()))
    assert row["pl_bound"] == pytest.approx(expected)
    assert row["pl_bound"] <= row["pl_ratio"]
    assert -1 <= row["alignment"] <= 1


def test_drift_and_distance_are_from_the_first_measurement() -> None:
    (x, y), model = data(), network()
    probe = KernelProbe(x, y)
    probe.measure(model)
    first = empirical_ntk(model, x).matrix
    with torch.no_grad():
        model[0].weight[0, 0] += 3.0
        model[2].bias[1] -= 4.0
    row = probe.measure(model)
    now = empirical_ntk(model, x).matrix
    assert row["moved"] == pytest.approx(5.0)
    assert row["drift"] == pytest.approx(float((now - first).norm() / first.norm()))
    other = KernelProbe(x, y)
    other.load_state_dict(probe.state_dict())
    assert other.measure(model) == row


def test_without_targets_or_all_outputs_there_is_no_bound() -> None:
    (x, y), model = data(), network()
    assert "loss" not in KernelProbe(x).measure(model)
    found = KernelProbe(x, y, outputs="trace").measure(model)
    assert "pl_ratio" in found
    assert "pl_bound" not in found
    perfect = KernelProbe(x, model(x).detach()).measure(model)
    assert math.isnan(perfect["pl_ratio"])
    with pytest.raises(ValueError, match="one each"):
        KernelProbe(x, y[:2])


class Regression(pl.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x)
        return out

    def training_step(self, batch: Any, index: int) -> Tensor:
        return 0.5 * (self(batch[0]) - batch[1]).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def trained(tmp_path: Path, callbacks: list[Any], logger: Any = False) -> nn.Module:
    (x, y), model = data(), network()
    off = {"enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        max_epochs=4, callbacks=callbacks, default_root_dir=tmp_path, logger=logger,
        accelerator="cpu", enable_model_summary=False, **off,
    )  # fmt: skip
    trainer.fit(Regression(model), DataLoader(TensorDataset(x, y), batch_size=6))
    return model


@quiet
def test_a_trainer_measures_logs_and_keeps_its_run(tmp_path: Path) -> None:
    x, y = data()
    monitor = KernelMonitor(KernelProbe(x, y), every=2)
    logger = _Memory()
    watched = trained(tmp_path, [monitor], logger=logger)
    plain = trained(tmp_path, [])
    for a, b in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [row["epoch"] for row in monitor.rows] == [0, 2, 4]
    losses = [row["loss"] for row in monitor.rows]
    assert losses == sorted(losses, reverse=True)
    assert all(row["pl_bound"] <= row["pl_ratio"] * (1 + 1e-9) for row in monitor.rows)
    # PL* at work: descent at a small rate falls by (1 − ημ) a step, μ the least λ_min on the way.
    slowest = 1 - 0.02 * min(row["pl_bound"] for row in monitor.rows)
    assert losses[2] <= slowest**2 * losses[1] <= slowest**4 * losses[0]
    assert [step for step, found in logger.seen if "ntk/drift" in found] == [0, 2, 4]


class _Memory(pl.loggers.Logger):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int | None, dict[str, float]]] = []

    name = "memory"
    version = "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append((step, dict(metrics)))


def test_fit_takes_the_monitor_and_a_resumed_run_goes_on_from_its_start(tmp_path: Path) -> None:
    digits = eq.data.load("digits", "train", progress=False).subset(range(96))
    x = digits.normalize(digits.images[:4])  # type: ignore[arg-type]

    def run(epochs: int, folder: str, **options: Any) -> list[dict[str, float]]:
        probe = KernelProbe(x, digits.targets[:4], outputs=[0, 1])  # type: ignore[arg-type]
        monitor = KernelMonitor(probe)
        config = training.TrainConfig(
            model="explicit_digits", epochs=epochs, batch_size=32, schedule="constant",
            validation=0.0, out=str(tmp_path / folder),
        )  # fmt: skip
        training.fit(config, data=(digits, None), progress=False, callbacks=[monitor], **options)
        return monitor.rows

    whole = run(2, "whole")
    assert [row["epoch"] for row in whole] == [0, 1, 2]
    assert run(1, "parts") == whole[:2]
    resumed = run(2, "parts", resume=tmp_path / "parts")
    assert resumed == whole


def test_monitors_check_what_they_are_given(tmp_path: Path) -> None:
    x, y = data()
    with pytest.raises(ValueError, match="every=0"):
        KernelMonitor(KernelProbe(x, y), every=0)
    assert KernelMonitor(KernelProbe(x), name="a").state_key != KernelMonitor(
        KernelProbe(x), name="b"
    ).state_key  # fmt: skip
