"""Pictures show the numbers they are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from equilibria_papers.theory.pictures import save_picture
from equilibria_papers.theory.trajectories import (
    SolverPath,
    TrainingPath,
    class_figure,
    path_figure,
    residual_figure,
)


def path(seed: int = 0, steps: int = 6, batch: int = 5) -> SolverPath:
    generator = torch.Generator().manual_seed(seed)
    relative = 0.5 ** torch.arange(1.0, steps + 1).unsqueeze(1) * torch.rand(
        steps, batch, generator=generator
    )
    states = torch.randn(steps, batch, 7, generator=generator)
    return SolverPath("Anderson", 1e-3, relative, relative, states)


def training() -> TrainingPath:
    labels = torch.tensor([0, 1, 2, 1, 0])
    return TrainingPath(("start", "epoch 1", "epoch 2"), labels, tuple(path(i) for i in range(3)))


def test_residual_curves_are_the_means() -> None:
    first, second = path(0), path(1)
    figure = residual_figure({"a": {"one": first, "two": second}, "b": {"one": second}})
    axes = figure.axes
    assert [a.get_title() for a in axes] == ["a", "b"]
    lines = {line.get_label(): line for line in axes[0].get_lines()}
    np.testing.assert_allclose(lines["two"].get_ydata(), second.relative.double().mean(1))
    assert set(lines["tolerance"].get_ydata()) == {1e-3}
    assert axes[0].get_yscale() == "log"


def test_zero_and_infinite_residuals_leave_gaps() -> None:
    given = path()
    given.relative[2] = 0.0
    given.relative[4] = torch.inf
    figure = residual_figure({"": {"one": given}})
    drawn = np.asarray(figure.axes[0].get_lines()[0].get_ydata())
    assert np.isnan(drawn[[2, 4]]).all()
    assert np.isfinite(drawn[[0, 1, 3, 5]]).all()


def test_paths_are_projections_of_the_states() -> None:
    given = path()
    figure = path_figure({"left": given, "right": path(1)})
    lines = [x for x in figure.axes[0].get_lines() if len(x.get_xdata()) == 6]
    assert len(lines) == 5
    cloud = given.states.double().numpy()
    flat = cloud.reshape(-1, 7)
    _, _, rows = np.linalg.svd(flat - flat.mean(0))
    for i, line in enumerate(lines):
        expected = (cloud[:, i] - flat.mean(0)) @ rows[0]
        drawn = np.asarray(line.get_xdata())
        np.testing.assert_allclose(np.abs(drawn), np.abs(expected), atol=1e-6)
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert words == ["start", "end", "one color a sample"]


def test_training_pictures_name_classes_and_moments(tmp_path: Path) -> None:
    figure = class_figure(training())
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["0", "1", "2"]
    assert figure.axes[0].get_title() == "$z^*$ from start to epoch 2"
    written = save_picture(figure, tmp_path / "training")
    assert [p.suffix for p in written] == [".png", ".svg"]
    assert all(p.stat().st_size > 1000 for p in written)


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="no path"):
        residual_figure({})
