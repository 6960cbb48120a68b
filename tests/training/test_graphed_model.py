"""CUDA graphs of a training step: the eager model's numbers, its state untouched by capture."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.training import GraphedModel, TrainConfig, fit


def network() -> Any:
    torch.manual_seed(0)
    return eq.models.create("geq_stack_cifar_3m", widths=(16, 32), depth=1)


def test_on_a_cpu_the_model_runs_as_it_is() -> None:
    model = network()
    x = torch.randn(2, 3, 32, 32)
    called = GraphedModel(model)
    reference = copy.deepcopy(model)
    torch.testing.assert_close(called(x), reference(x))
    assert called._graphed == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    settings = TrainConfig(cuda_graphs=True, epochs=1, accelerator="cpu", out=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="need a CUDA device"):
        fit(settings, progress=False)


@pytest.mark.gpu
def test_a_graph_gives_the_eager_numbers() -> None:
    model = network().cuda().to(memory_format=torch.channels_last).train()
    eager = copy.deepcopy(model)
    called = GraphedModel(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(8, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        grads = []
        for run in (called, eager):
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                loss = run(x).float().square().mean()
            owner = model if run is called else eager
            grads.append(torch.autograd.grad(loss, list(owner.parameters())))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-3)
    # Three steps moved the statistics three times, whatever capture did to warm up.
    after, right = model.state_dict(), eager.state_dict()
    for name in before:
        torch.testing.assert_close(after[name], right[name], rtol=2e-2, atol=2e-3)
    assert len(called._graphed) == 1


@pytest.mark.gpu
def test_a_solver_with_a_tolerance_cannot_be_captured() -> None:
    model = eq.models.create("geq_digits").cuda().train()
    with pytest.raises(RuntimeError, match="fixed steps"):
        GraphedModel(model)(torch.randn(4, 1, 8, 8, device="cuda"))
