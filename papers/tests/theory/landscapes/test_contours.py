"""Pictures of landscapes: one scale for all, holes left open, words where nothing can be drawn."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from equilibria_papers.theory.landscapes import (
    Surface,
    contour_figure,
    curve_figure,
    surface_figure,
)
from equilibria_papers.theory.pictures import save_picture


def bowl(scale: float = 1.0, points: int = 7, name: str = "bowl") -> Surface:
    axis = torch.linspace(-1, 1, points, dtype=torch.float64)
    loss = scale * (0.1 + axis.unsqueeze(1) ** 2 + 2 * axis**2)
    values = {"loss": loss, "accuracy": 1 / (1 + loss), "failed": torch.zeros_like(loss)}
    return Surface(name, axis, axis, values, torch.ones(points, dtype=torch.bool))


def test_surfaces_share_one_color_scale() -> None:
    figure = contour_figure([bowl(1.0, name="one"), bowl(10.0, name="two")])
    panels = [a for a in figure.axes if a.get_title()]
    assert [a.get_title() for a in panels] == ["one", "two"]
    limits = {(a.collections[0].norm.vmin, a.collections[0].norm.vmax) for a in panels}
    assert len(limits) == 1
    low, high = limits.pop()
    np.testing.assert_allclose([low, high], [0.1, 31.0])


@pytest.mark.parametrize(("top", "extended"), [(None, "neither"), (1.0, "max"), (50.0, "neither")])
@pytest.mark.parametrize("log", [True, False])
def test_an_arrow_only_where_something_is_cut(top: float | None, extended: str, log: bool) -> None:
    figure = contour_figure([bowl(1.0), bowl(10.0)], top=top, log=log)
    panels = figure.axes[:2]
    assert {panel.collections[0].extend for panel in panels} == {extended}


def test_the_first_direction_goes_to_the_right() -> None:
    surface = bowl()
    tilted = dataclasses.replace(
        surface,
        values={**surface.values, "loss": (surface.a.unsqueeze(1) + 2).expand(7, 7).clone()},
    )
    figure = contour_figure([tilted], log=False)
    lines = figure.axes[0].collections[1]
    # The level lines of a plane that rises along a are vertical.
    for path in lines.get_paths():
        if len(path.vertices):
            columns = np.unique(np.round(path.vertices[:, 0], 6))
            assert len(columns) <= 2


def test_holes_and_failed_solves_are_drawn_apart(tmp_path: Path) -> None:
    surface = bowl()
    surface.values["loss"][0, 0] = torch.inf
    surface.values["loss"][5, 5] = torch.nan
    surface.values["failed"][:, 6] = 1.0
    figure = contour_figure([surface])
    norm = figure.axes[0].collections[0].norm
    assert np.isfinite([norm.vmin, norm.vmax]).all()
    assert any(
        c.hatches and "///" in c.hatches
        for c in figure.axes[0].collections
        if hasattr(c, "hatches")
    )
    for made in (figure, surface_figure(surface), surface_figure(surface, log=True)):
        assert all(p.stat().st_size > 1000 for p in save_picture(made, tmp_path / "holes"))


def test_a_training_s_path_is_drawn() -> None:
    way = torch.tensor([[0.9, 0.5], [0.2, 0.1], [0.0, 0.0]], dtype=torch.float64)
    figure = contour_figure([dataclasses.replace(bowl(), path=way)])
    lines = [np.stack(x.get_data(), 1) for x in figure.axes[0].get_lines()]
    assert any(line.shape == (3, 2) and np.allclose(line, way) for line in lines)


def test_flat_surfaces() -> None:
    flat = bowl()
    flat.values["loss"].fill_(1.0)
    for log in (True, False):
        contour_figure([flat], log=log)
    surface_figure(flat)


def test_curves_are_the_numbers() -> None:
    axis = torch.linspace(-1, 1, 5, dtype=torch.float64)
    loss = (axis**2).unsqueeze(1)
    values = {"loss": loss, "accuracy": 1 - loss / 2}
    done = torch.ones(5, dtype=torch.bool)
    curve = Surface("curve", axis, torch.zeros(1, dtype=torch.float64), values, done)
    figure = curve_figure([curve], log=True)
    left, right = figure.axes
    np.testing.assert_allclose(left.get_lines()[0].get_ydata(), axis**2)
    np.testing.assert_allclose(right.get_lines()[0].get_ydata(), 100 - 50 * axis**2)
    with pytest.raises(ValueError, match="use curve_figure"):
        contour_figure([curve])
    with pytest.raises(ValueError, match="use contour_figure"):
        curve_figure([bowl()])


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="no landscape"):
        contour_figure([])
    empty = bowl()
    empty.values["loss"].fill_(torch.nan)
    with pytest.raises(ValueError, match="no finite loss"):
        surface_figure(empty)
