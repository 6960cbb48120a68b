"""On a GPU: no step waits for the device, NaN is found all the same, mixed precision trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.training import NonFiniteLoss, TrainConfig

from .small import At, config, run
from .test_nonfinite import Poisoned, poison

pytestmark = pytest.mark.gpu


def gpu(out: Path, **options: Any) -> TrainConfig:
    return config(out, accelerator="gpu", **options)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_never_waits_for_the_device(
    tmp_path: Path, optimizer: str, precision: str, forbid_waits: Callable[[bool], None]
) -> None:
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=4, damping=0.8)
    fixed = {"solver": solver, "adjoint": eq.Phantom(steps=3, damping=0.8)}
    model = eq.models.create("geq_digits", widths=(16,), depth=1, hidden=16, **fixed)
    options: dict[str, Any] = {"ema": 0.9, "clip": 1.0, "channels_last": True, "log_every": 1000}
    options |= {"augment": ["flip", {"crop": {"padding": 1}}], "batch_size": 16, "lr": 0.01}
    settings = gpu(tmp_path, optimizer=optimizer, precision=precision, **options)
    # From the third to the tenth step every wait is an error.
    watch = [At(2, partial(forbid_waits, True)), At(10, partial(forbid_waits, False))]
    result = run(settings, model=model, callbacks=watch)
    assert result.history[-1]["step"] > 10
    assert math.isfinite(result.metrics["train_loss"])
    assert next(result.model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_nan_is_found_later_and_kept_from_the_weights(tmp_path: Path, optimizer: str) -> None:
    model = Poisoned(poison(77).cuda(), after=6)
    settings = gpu(tmp_path, optimizer=optimizer, lr=0.01)
    with pytest.raises(NonFiniteLoss) as caught:
        run(settings, model=model)
    report = caught.value.report
    assert [report["indices"][k] for k in report["bad_samples"]] == [77]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_float16_scales_its_loss(tmp_path: Path) -> None:
    small = {"model": "geq_digits", "model_options": {"widths": [16], "depth": 1, "hidden": 16}}
    settings = gpu(tmp_path, precision="16-mixed", lr=0.02, clip=1.0, **small)
    assert math.isfinite(run(settings, model=None).metrics["train_loss"])
