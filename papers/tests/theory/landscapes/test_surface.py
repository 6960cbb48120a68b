"""Files of landscapes: whole, checked, never unpickled."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from equilibria_papers.theory.landscapes import LandscapeFileError, Surface, contour_figure
from equilibria_papers.theory.landscapes.measuring import fingerprint
from equilibria_papers.theory.pictures import save_picture


def surface() -> Surface:
    a, b = torch.linspace(-1, 1, 3).double(), torch.linspace(-2, 2, 5).double()
    loss = torch.arange(15.0).double().view(3, 5)
    loss[0, 0] = torch.nan
    values = {"loss": loss, "accuracy": torch.rand(3, 5).double()}
    done = torch.tensor([True, False, True])
    return Surface("a name", a, b, values, done, {"seed": 3, "model": "µ"})


def test_there_and_back(tmp_path: Path) -> None:
    given = surface()
    file = given.save(tmp_path / "grid.safetensors")
    found = Surface.load(file)
    assert found.name == given.name
    assert found.about == given.about
    for name in ("a", "b", "done", "holes"):
        assert torch.equal(getattr(found, name), getattr(given, name)), name
    torch.testing.assert_close(found.loss, given.loss, equal_nan=True)
    assert found.holes.nonzero().tolist() == [[0, 0]]
    assert bool(torch.isnan(found.loss[1]).all())


def test_files_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no landscape file"):
        Surface.load(tmp_path / "none")
    (tmp_path / "text").write_text("not a grid")
    with pytest.raises(LandscapeFileError, match="cannot be read"):
        Surface.load(tmp_path / "text")
    save_file({"a": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(LandscapeFileError, match="no landscape of this library"):
        Surface.load(tmp_path / "weights.safetensors")
    header = {"format": "equilibria-landscape-1", "name": "x", "about": "{}"}
    save_file({"a": torch.zeros(2)}, tmp_path / "part.safetensors", header)
    with pytest.raises(LandscapeFileError, match="damaged"):
        Surface.load(tmp_path / "part.safetensors")


def test_fingerprints_see_names_shapes_types_and_values() -> None:
    base = {"w": torch.arange(6.0), "b": torch.zeros(2)}
    same = {"b": torch.zeros(2), "w": torch.arange(6.0)}
    assert fingerprint(base) == fingerprint(same)
    others = [
        {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)},
        {"w": torch.arange(6.0).double(), "b": torch.zeros(2)},
        {"v": torch.arange(6.0), "b": torch.zeros(2)},
        {"w": torch.arange(6.0) + torch.tensor([0, 0, 0, 0, 0, 1e-6]), "b": torch.zeros(2)},
    ]
    assert len({fingerprint(x) for x in (base, *others)}) == 5
    strided = torch.arange(12.0)[::2]
    assert fingerprint({"w": strided}) == fingerprint({"w": strided.contiguous()})
    assert len(fingerprint({"n": torch.tensor(3), "e": torch.zeros(0)})) == 16


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
    assert all(p.stat().st_size > 1000 for p in save_picture(figure, tmp_path / "holes"))


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="no landscape"):
        contour_figure([])
    empty = bowl()
    empty.values["loss"].fill_(torch.nan)
    with pytest.raises(ValueError, match="no finite loss"):
        contour_figure([empty])
