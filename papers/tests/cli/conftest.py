"""For every command: networks to look at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import equilibria as eq
from tests.cli.running import Cli


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Cli:
    """The command that a file of tests is about."""
    return Cli(capsys, *request.module.COMMAND)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three networks of one kind, as if of three epochs."""
    folder = tmp_path_factory.mktemp("checkpoints")
    data = eq.data.load("digits", "train", progress=False)
    extra = {"data": "digits", "mean": list(data.mean), "std": list(data.std)}
    torch.manual_seed(0)
    model = eq.models.create("geq_digits", widths=(8, 8), depth=1)
    written = []
    for epoch in range(3):
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.05 * torch.randn_like(weight)
        written.append(eq.models.save(model, folder / f"epoch{epoch}.safetensors", extra=extra))
    return written
